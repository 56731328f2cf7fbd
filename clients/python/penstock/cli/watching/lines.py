"""One line for each report, for where there is no terminal."""

from __future__ import annotations

from penstock.cli.watching import figures
from penstock.client import LatencySummary, LoadReport

_COLUMNS = (
    *(("UTC", 8), ("gen/s", 7), ("prompt/s", 9), ("running", 8), ("waiting", 8), ("KV", 6)),
    *(("first p50", 10), ("first p99", 10), ("inter p50", 10), ("inter p99", 10)),
)
HEADING = " ".join(f"{name:>{width}}" for name, width in _COLUMNS)
HEADING_EVERY = 20
"""Lines after which the names of the columns are said again."""


def line(report: LoadReport) -> str:
    """Write the report's numbers under HEADING. The time is the server's."""
    load, rates, latencies = report.load, report.rates, report.latencies
    first = latencies.time_to_first_token if latencies else LatencySummary()
    inter = latencies.inter_token if latencies else LatencySummary()
    used = load.kv_pages_used / load.kv_pages_total if load.kv_pages_total else None
    values = (
        report.at.strftime("%H:%M:%S"),
        figures.count(rates.generated_tokens_per_second if rates else None),
        figures.count(rates.prompt_tokens_per_second if rates else None),
        figures.count(load.running_requests),
        figures.count(load.queued_requests),
        figures.share(used),
        *map(figures.seconds, (first.p50, first.p99, inter.p50, inter.p99)),
    )
    return " ".join(f"{value:>{width}}" for value, (_, width) in zip(values, _COLUMNS, strict=True))
