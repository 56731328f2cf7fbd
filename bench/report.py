"""Makes one table from the records of several engines, for bench/RESULTS.md.

python -m bench.report bench/out/penstock.jsonl bench/out/vllm.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.measures import record
from bench.measures.figures import label, medians
from bench.workloads import TABLE

Repeats = list[Mapping[str, float]]


def grouped(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Repeats]]:
    """Group the figures of all repeats by engine and workload."""
    found: dict[str, dict[str, Repeats]] = {}
    for line in records:
        found.setdefault(line["engine"], {}).setdefault(line["workload"], []).append(line["figures"])
    return found


def comparison(found: Mapping[str, Mapping[str, Repeats]]) -> str:
    """Write a table in Markdown with the medians: one row for each figure that a workload is about, one
    column for each engine.
    """
    engines = list(found)
    lines = [f"| workload | figure | {' | '.join(engines)} |", f"|---|---|{'---:|' * len(engines)}"]
    for name, workload in TABLE.items():
        for figure in workload.figures:
            values = [medians(of.get(name, [{}])).get(figure) for of in found.values()]
            if any(values):
                cells = " | ".join(f"{value[0]:.4g}" if value else "" for value in values)
                lines.append(f"| {name} | {label(figure)} | {cells} |")
    return "\n".join(lines)


def facts(records: Iterable[Mapping[str, Any]]) -> str:
    """Return for each engine its commit, versions, options, start-up times, peak memory and compiles after
    warm-up.
    """
    lines: dict[str, dict[str, Any]] = {}
    for line in records:
        of = lines.setdefault(line["engine"], {"peak_rss_bytes": 0})
        of |= {name: line[name] for name in ("commit", "versions", "options", "startup")}
        of["peak_rss_bytes"] = max(of["peak_rss_bytes"], line.get("peak_rss_bytes", 0))
        if "compiles_after_warmup" in line:
            of["compiles_after_warmup"] = line["compiles_after_warmup"]
    return "\n".join(
        f"- **{engine}**: "
        + "; ".join(f"{name} {_plain(name, value)}" for name, value in of.items() if value not in ("", {}))
        for engine, of in lines.items()
    )


def _plain(name: str, value: Any) -> str:
    if name == "peak_rss_bytes":
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON lines")
    args = parser.parse_args()
    records = [line for file in args.files for line in record.read_lines(file)]
    print(f"{comparison(grouped(records))}\n\n{facts(records)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
