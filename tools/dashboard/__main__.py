"""Writes deploy/observability/grafana/dashboards/penstock.json."""

from __future__ import annotations

from pathlib import Path

from tools.dashboard.penstock import text

PLACE = Path(__file__).parents[2] / "deploy/observability/grafana/dashboards/penstock.json"

if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
    print(f"wrote {PLACE}")
