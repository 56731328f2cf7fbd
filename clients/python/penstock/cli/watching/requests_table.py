"""The table of the oldest requests."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.calling.screen import visible
from penstock.cli.watching import figures
from penstock.client import LoadReport, RequestPhase, RequestStatus

_STYLES = {RequestPhase.WAITING: "yellow", RequestPhase.PREFILL: "cyan", RequestPhase.DECODE: "green"}
_MOST_CHARS = 48
"""Of an id; the rest is left out even if there is room."""


def requests_table(report: LoadReport, why_none: str, lines: int) -> RenderableType:
    """Show as many requests as fit into so many lines; the last line says how many more there are."""
    if why_none:
        return Text(visible(why_none), "bright_black", no_wrap=True, overflow="ellipsis")
    there = report.load.running_requests + report.load.queued_requests
    if not report.requests:
        return Text("no requests" if not there else f"{there} requests", "bright_black")
    room = lines - 1
    is_cut = there > min(room, len(report.requests))
    listed = report.requests[: room - is_cut]
    with_keys = any(request.key_id for request in report.requests)
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    names = ["phase", "age", "prompt", "computed", "generated", "preempted"]
    if with_keys:
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=16)
        names.insert(0, "key")
    for name in names[with_keys:]:
        table.add_column(justify="left" if name == "phase" else "right", no_wrap=True)
    table.add_row(*(Text(name, "bright_black") for name in ("request", *names)))
    for request in listed:
        table.add_row(*_row(request, with_keys))
    if is_cut:
        table.add_row(Text(f"and {max(there - len(listed), 0)} more", "bright_black"))
    return table


def _row(request: RequestStatus, with_key: bool) -> list[RenderableType]:
    name = request.request_id[:_MOST_CHARS]
    if request.output_index:
        name += f" [{request.output_index}]"
    return [
        Text(visible(name)),
        *([Text(visible(request.key_id))] if with_key else []),
        Text(request.phase.value, _STYLES.get(request.phase, "")),
        Text(figures.age(request.age)),
        Text(figures.count(request.prompt_tokens)),
        Text(figures.count(request.computed_tokens)),
        Text(figures.count(request.generated_tokens)),
        Text(str(request.preemptions) if request.preemptions else "", "yellow"),
    ]
