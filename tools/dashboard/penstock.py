"""The dashboard of Penstock: its rows together."""

from __future__ import annotations

import json

from tools.dashboard import engine_rows, load_rows, service_rows
from tools.dashboard.grafana import dashboard, datasource_variable, variable

ROWS = (
    load_rows.OVERVIEW,
    load_rows.TRAFFIC,
    load_rows.LATENCY,
    engine_rows.BATCH,
    engine_rows.CACHE,
    engine_rows.WEIGHTS,
    service_rows.SERVICE,
    service_rows.PROCESS,
)


def text() -> str:
    """Write the file's content."""
    made = dashboard(
        "Penstock",
        "penstock",
        "Servers of Penstock: load, latency, the engine's steps, the KV cache, weight updates and "
        "the process. "
        "docs/how-to/monitor.md explains it.",
        ROWS,
        (
            datasource_variable(),
            variable("model", "Model", "label_values(penstock_build_info, model)"),
            variable("instance", "Server", 'label_values(penstock_build_info{model=~"$model"}, instance)'),
        ),
    )
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"
