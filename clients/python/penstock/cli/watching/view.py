"""What `penstock top` shows: one picture of a report, for a screen of any size. Pure functions.

What a server says is text of a stranger: it reaches the screen through `visible` only, and never as rich's
markup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.cli.calling.screen import visible
from penstock.cli.watching import figures
from penstock.cli.watching.curves import bar, curve
from penstock.cli.watching.history import History, Point
from penstock.cli.watching.requests_table import requests_table
from penstock.client import LoadReport

_LABEL, _FIGURE = 11, 9
"""Columns of the names and of the numbers beside the curves."""
_FRAMED_COLUMNS, _FRAMED_LINES = 96, 16
"""A smaller screen has no room for frames."""
_LEFT_SHARE = 0.52
_LOAD_LINES, _LATENCY_LINES, _WORK_LINES = 6, 5, 2
_UPPER_LINES = max(_LOAD_LINES, _LATENCY_LINES + _WORK_LINES) + 2
"""Of the two upper frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What there is to show."""

    addr: str
    model: str
    report: LoadReport
    history: History
    problem: str = ""
    """Why no reports come; empty while they come."""
    why_no_requests: str = ""
    """Why no requests are listed; empty if they are."""


@dataclass(frozen=True, slots=True)
class Screen:
    """What it is shown on."""

    columns: int
    lines: int
    ascii_only: bool = False


def view(shown: Shown, screen: Screen) -> RenderableType:
    """Show everything that the screen has room for, the most important first."""
    if screen.columns >= _FRAMED_COLUMNS and screen.lines >= _FRAMED_LINES:
        return _framed(shown, screen)
    parts: list[RenderableType] = [_headline(shown)]
    left = screen.lines - 1
    for part, lines in (
        (_load(shown, screen.columns, left, screen.ascii_only), min(_LOAD_LINES, left)),
        (_latencies(shown.report), _LATENCY_LINES),
        (_work(shown.report), _WORK_LINES),
    ):
        if lines > left:
            break
        parts.append(part)
        left -= lines
    else:
        if left >= 2:
            parts.append(requests_table(shown.report, shown.why_no_requests, left))
    return Group(*parts)


def lines_of(report: LoadReport) -> int:
    """Return as many lines as it takes to show a report with all its requests."""
    return 1 + _LOAD_LINES + _LATENCY_LINES + _WORK_LINES + 2 + len(report.requests)


def _framed(shown: Shown, screen: Screen) -> RenderableType:
    left = int(screen.columns * _LEFT_SHARE)
    right = screen.columns - left
    upper = Table.grid(padding=0)
    upper.add_column(width=left)
    upper.add_column(width=right)
    upper.add_row(
        _panel(_load(shown, left - 4, _LOAD_LINES, screen.ascii_only), "load, last 3 minutes", _UPPER_LINES),
        _panel(Group(_latencies(shown.report), _work(shown.report)), "latency, last minute", _UPPER_LINES),
    )
    rest = screen.lines - 1 - _UPPER_LINES
    parts: list[RenderableType] = [_headline(shown), upper]
    if rest >= 4:
        table = requests_table(shown.report, shown.why_no_requests, rest - 2)
        parts.append(_panel(table, "requests, oldest first", rest))
    return Group(*parts)


def _panel(content: RenderableType, title: str, lines: int) -> Panel:
    return Panel(
        content, title=title, title_align="left", height=lines, box=box.ROUNDED, border_style="bright_black"
    )


def _headline(shown: Shown) -> Text:
    report = shown.report
    text = Text(no_wrap=True, overflow="ellipsis")
    if shown.problem:
        text.append(" LOST ", "bold white on red")
        text.append(f" {visible(shown.problem)} ", "red")
    elif report.load.paused:
        text.append(" PAUSED ", "bold black on yellow")
    else:
        text.append(" SERVING ", "bold black on green")
    text.append(f" {visible(shown.model)}", "bold")
    text.append(f" at {visible(shown.addr)}")
    weights = report.load.weights
    text.append(f", weights {visible(weights.label)} (generation {weights.generation})")
    if report.load.loaded_adapters:
        text.append(f", adapters {report.load.loaded_adapters}")
    if report.totals is not None:
        text.append(f", up {figures.age((report.at - report.totals.since).total_seconds())}")
    return text


def _load(shown: Shown, columns: int, lines: int, ascii_only: bool) -> RenderableType:
    """Draw the first lines of those with curves."""
    report, history = shown.report, shown.history
    load, rates = report.load, report.rates
    width = max(columns - _LABEL - _FIGURE - 2, 0)

    def drawn(value: Callable[[Point], float | None], style: str, most: float | None = None) -> Text:
        return Text(curve(history.curve(value, width), most=most, ascii_only=ascii_only), style)

    total = load.kv_pages_total or 1
    used, cached = load.kv_pages_used / total, report.kv_pages_cached / total
    most = report.max_running_requests
    rows = (
        (
            "generated/s",
            figures.count(rates.generated_tokens_per_second if rates else None),
            drawn(lambda point: point.generated_per_s, "green"),
        ),
        (
            "prompt/s",
            figures.count(rates.prompt_tokens_per_second if rates else None),
            drawn(lambda point: point.prompt_per_s, "cyan"),
        ),
        (
            "running",
            f"{figures.count(load.running_requests)}/{figures.count(most)}",
            drawn(lambda point: float(point.running), "blue", float(most or 1)),
        ),
        (
            "waiting",
            figures.count(load.queued_requests),
            drawn(lambda point: float(point.waiting), "yellow"),
        ),
        ("KV used", figures.share(used), drawn(lambda point: point.pages_used, "magenta", 1.0)),
        (
            "KV pages",
            figures.count(load.kv_pages_total),
            bar([(used, "magenta"), (cached, "cyan")], width, ascii_only=ascii_only),
        ),
    )
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column(width=_FIGURE, no_wrap=True, justify="right", style="bold")
    grid.add_column(no_wrap=True)
    for row in rows[:lines]:
        grid.add_row(*row)
    return grid


def _latencies(report: LoadReport) -> RenderableType:
    """Draw a table of latencies."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=_LABEL, no_wrap=True)
    for _ in range(4):
        table.add_column(justify="right", min_width=6, no_wrap=True)
    table.add_row("", *(Text(name, "bright_black") for name in ("p50", "p90", "p99", "count")))
    found = report.latencies
    for label, summary in (
        ("first token", found and found.time_to_first_token),
        ("inter-token", found and found.inter_token),
        ("queue", found and found.queue),
        ("end to end", found and found.end_to_end),
    ):
        values = (summary.p50, summary.p90, summary.p99) if summary else (None, None, None)
        shown = (Text(figures.seconds(value), "bold" if value is not None else "") for value in values)
        table.add_row(label, *shown, figures.count(summary.count if summary else None))
    return table


def _work(report: LoadReport) -> RenderableType:
    """Write two lines on the engine's steps, and on what was saved and lost."""
    rates, totals = report.rates, report.totals
    if rates is None or totals is None:
        return _line("this server was started without metrics", "yellow")
    steps = f"{figures.count(rates.steps_per_second)} steps/s, {figures.count(rates.rows_per_step)} rows each"
    hits = f"prefix hits {figures.share(rates.prefix_hit_share)}"
    ended = f"{figures.count(rates.ended_requests_per_second)} ended/s"
    accepted = f", accepted {figures.share(rates.accepted_share)}" if totals.proposed_tokens else ""
    return Group(
        _line(f"{steps}, padding {figures.share(rates.padding_share)}{accepted}"),
        _line(f"{hits}, {ended}, {figures.count(totals.preemptions)} preempted"),
    )


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
