"""`penstock top`: shows a server's load while it changes."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from penstock.cli.calling.common import add_addr, complain, print_json, with_client
from penstock.cli.calling.flag_values import number, whole
from penstock.cli.watching.following import Event, Following, Lost, Refused
from penstock.cli.watching.lines import HEADING, HEADING_EVERY, line
from penstock.cli.watching.picture import Picture
from penstock.cli.watching.view import Screen, lines_of, view
from penstock.client import Client, LoadReport, NotReady

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

_DRAW_S = 1.0
"""The screen is drawn again after so many seconds even if nothing came: it may have another size by now."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch a server's load, latencies and requests",
        description="Watch a server's throughput, latencies, queue, KV cache and requests. Ctrl-C ends it. "
        "Without a terminal it prints one line for each report.",
    )
    add_addr(parser, timeout=False, retries=False)
    parser.add_argument(
        "--interval",
        type=number(0.1, 60),
        default=1.0,
        metavar="S",
        help="seconds from one report to the next, 0.1 to 60; default: 1",
    )
    parser.add_argument(
        "--requests",
        type=whole(0, 1000),
        default=50,
        metavar="N",
        help="list the N oldest requests, as far as there is room, which needs a key with the role control; "
        "0: none; default: 50",
    )
    parser.add_argument("--once", action="store_true", help="print one report and end")
    parser.add_argument(
        "--json", action="store_true", help="print each report as a line of JSON; with --once indented"
    )


def run(args: argparse.Namespace) -> int:
    with contextlib.suppress(AttributeError):  # stdout may be no file, and may know no more than ASCII
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return with_client(args, lambda client: _watch(client, args))


def _watch(client: Client, args: argparse.Namespace) -> int:
    """Show reports until Ctrl-C. Raises the error of a server that refuses, or that has never answered."""
    picture = Picture(args.addr)
    with Following(client, args.addr, interval=args.interval, max_requests=args.requests) as following:
        first = _first(following, picture)
        if args.once and args.json:
            print_json(first)
        elif args.once:
            console = Console()
            console.print(view(picture.shown(), Screen(console.width, lines_of(first))))
        else:
            with _until_interrupted():
                if args.json or not sys.stdout.isatty():
                    _print_all(following, first, as_json=args.json)
                else:
                    _draw(following, picture)
    return 0


def _first(following: Following, picture: Picture) -> LoadReport:
    """Return the first report. A server that is still loading is waited for."""
    waits = False
    while picture.report is None:
        event = _next(following)
        if isinstance(event, Lost):
            if event.error is not None and not isinstance(event.error, NotReady):
                raise event.error
            if not waits:
                complain("top", event.why)
            waits = True
        if event is not None:
            picture.take(event)
    return picture.report


def _next(following: Following, timeout_s: float | None = None) -> Event | None:
    """Return the next event; None after `timeout_s` seconds without one. Raises the error of a refusal."""
    event = following.next(timeout_s)
    if isinstance(event, Refused):
        raise event.error
    return event


def _draw(following: Following, picture: Picture) -> None:
    """Show all reports on a terminal, each in place of the one before."""
    console = Console()

    def drawn() -> Screen:
        return Screen(console.width, console.height, ascii_only=console.options.ascii_only)

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(view(picture.shown(), drawn()), refresh=True)
            event = _next(following, _DRAW_S)
            while event is not None:  # draws once for all that has come
                picture.take(event)
                event = _next(following, 0)


def _print_all(following: Following, first: LoadReport, *, as_json: bool) -> None:
    """Print all reports, each as a line."""
    event: Event | None = first
    num_lines = 0
    while True:
        if isinstance(event, Lost):
            complain("top", event.why)
        elif isinstance(event, LoadReport) and as_json:
            print_json(event, one_line=True)
        elif isinstance(event, LoadReport):
            if num_lines % HEADING_EVERY == 0:
                print(HEADING)
            print(line(event), flush=True)
            num_lines += 1
        event = _next(following)


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    """End the block without an error at Ctrl-C, and in the same way at SIGTERM, so that the terminal is as it
    was before.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
