"""The picture at many sizes: what there is room for is there, and nothing spills over."""

from __future__ import annotations

import dataclasses
import io
import re
from datetime import timedelta

import pytest
from rich.cells import cell_len
from rich.console import Console

from penstock.cli.watching.history import History
from penstock.cli.watching.view import Screen, Shown, lines_of, view
from penstock.client import LoadReport, RequestPhase, RequestStatus, WeightsVersion
from tests.clients.watching import REPORT

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\nevil\x08\u202egnp.exe[red]x[/red]"
SIZES = [
    (200, 60),
    (120, 40),
    (100, 30),
    (96, 16),
    (95, 16),
    (80, 24),
    (79, 10),
    (60, 12),
    (40, 8),
    (20, 4),
    (3, 1),
]


def shown(report: LoadReport = REPORT, **more: str) -> Shown:
    history = History()
    for back_s in range(100, -1, -1):
        history.add(dataclasses.replace(report, at=report.at - timedelta(seconds=back_s)))
    return Shown(**{"addr": "host:1", "model": "demo", "report": report, "history": history} | more)  # type: ignore[arg-type]


def printed(
    what: Shown, columns: int, lines: int, *, ascii_only: bool = False, colour: bool = False
) -> list[str]:
    out = io.StringIO()
    console = Console(
        file=out,
        width=columns,
        height=lines,
        force_terminal=colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
        _environ={},
    )
    console.print(view(what, Screen(columns, lines, ascii_only)))
    return out.getvalue().removesuffix("\n").split("\n")


@pytest.mark.parametrize(("columns", "lines"), SIZES)
@pytest.mark.parametrize("num_requests", [0, 3, 500])
def test_it_fits_every_screen(columns: int, lines: int, num_requests: int) -> None:
    requests = tuple(
        dataclasses.replace(REPORT.requests[i % 3], request_id=f"请求-{i}-{'x' * (i % 200)}")
        for i in range(num_requests)
    )
    load = dataclasses.replace(REPORT.load, running_requests=num_requests, queued_requests=0)
    rows = printed(shown(dataclasses.replace(REPORT, requests=requests, load=load)), columns, lines)
    assert len(rows) <= lines
    assert max(map(cell_len, rows)) <= columns


@pytest.mark.parametrize(("columns", "lines"), [(120, 40), (80, 24)])
def test_a_screen_of_usual_size_shows_everything(columns: int, lines: int) -> None:
    text = "\n".join(printed(shown(), columns, lines))
    for part in (
        *("SERVING", "demo at host:1", "weights step-7 (generation 7)", "adapters 5", "up 30 s"),
        *("1,234", "100", "3/64", "60 %", "50 steps/s", "2.2 rows", "padding 12 %", "accepted 75 %"),
        *("62.5 ms", "250 ms", "2 s", "31.2 ms", "1 h 06 m"),
        *("prefix hits 50 %", "2.5 ended/s", "9 preempted"),
        *("oldest [1]", "alice", "second", "newest", "decode", "prefill", "waiting", "149", "512"),
    ):
        assert part in text, part
    assert re.search(r"queue +- +- +- +0", text)


def test_a_small_screen_shows_the_most_important() -> None:
    rows = printed(shown(), 50, 4)
    assert rows[0].startswith(" SERVING  demo at host:1")
    assert [row.split()[0] for row in rows[1:]] == ["generated/s", "prompt/s", "running"]
    rows = printed(shown(), 50, 12)
    assert "first token" in "\n".join(rows)
    assert "steps/s" not in "\n".join(rows)


def test_requests_that_have_no_room_are_counted() -> None:
    """80 columns and 18 lines leave four for the table: the names, two requests and how many are left."""
    rows = printed(shown(), 80, 18)
    assert [row.split()[0] for row in rows[-4:]] == ["request", "oldest", "second", "and"]
    assert rows[-1].strip() == "and 3 more"  # 3 run and 2 wait, as the load says


def test_requests_of_a_server_without_keys_have_no_column_for_them() -> None:
    requests = tuple(dataclasses.replace(request, key_id="") for request in REPORT.requests)
    rows = printed(shown(dataclasses.replace(REPORT, requests=requests)), 80, 24)
    names = next(row for row in rows if row.startswith("request"))
    assert names.split() == ["request", "phase", "age", "prompt", "computed", "generated", "preempted"]


def test_states() -> None:
    paused = dataclasses.replace(REPORT, load=dataclasses.replace(REPORT.load, paused=True))
    assert printed(shown(paused), 80, 24)[0].startswith(" PAUSED  demo")
    assert printed(shown(problem="no server at host:1"), 80, 24)[0].startswith(
        " LOST  no server at host:1  demo at host:1"
    )
    assert "the key does not allow this" in "\n".join(
        printed(shown(why_no_requests="the key does not allow this"), 80, 24)
    )


def test_a_server_without_metrics() -> None:
    bare = dataclasses.replace(REPORT, totals=None, rates=None, latencies=None, requests=())
    text = "\n".join(printed(shown(bare), 80, 24))
    assert "this server was started without metrics" in text
    assert "3/64" in text
    assert "5 requests" in text
    assert re.search(r"generated/s +- ", text)


@pytest.mark.parametrize(("columns", "lines"), SIZES)
@pytest.mark.parametrize("colour", [False, True])
def test_a_server_cannot_move_the_cursor(columns: int, lines: int, colour: bool) -> None:
    """Whatever it says: of the terminal's controls only colours are left, and no line is more than it was."""
    request = RequestStatus(HOSTILE, 0, HOSTILE, RequestPhase.DECODE, 1.0, 1, 1, 1, 0, 0)
    load = dataclasses.replace(REPORT.load, weights=WeightsVersion(HOSTILE, 1))
    report = dataclasses.replace(REPORT, requests=(request,) * 3, load=load)
    for more in ({}, {"problem": HOSTILE}, {"why_no_requests": HOSTILE}):
        rows = printed(shown(report, model=HOSTILE, addr=HOSTILE, **more), columns, lines, colour=colour)
        assert len(rows) <= lines
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", row) for row in rows]
        assert all(row.isprintable() for row in plain), plain
        assert max(map(cell_len, plain)) <= columns


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    assert "[red]demo[/red]" in printed(shown(model="[red]demo[/red]"), 120, 30)[0]


def test_a_terminal_that_knows_ascii_only() -> None:
    rows = printed(shown(), 80, 24, ascii_only=True)
    assert all(row.isascii() for row in rows)


def test_one_report_with_all_its_requests() -> None:
    report = dataclasses.replace(REPORT, requests=REPORT.requests * 20)
    for columns in (80, 120):
        text = "\n".join(printed(shown(report), columns, lines_of(report)))
        assert text.count("second") == 20
