"""`penstock trace`: changes how much a server traces, or tells it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from penstock.cli.calling.common import add_addr, print_json, with_client
from penstock.client import Client, TraceLevel

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


_EPILOG = """\
levels: off records nothing; requests has each call and the phases of its request; steps also the engine's
steps, and which of them a request took part in; detailed also a span for each request and step, which may
cost a tenth of the throughput. The level holds until it is changed again, or the server ends. Which calls are
recorded is another question: see --trace-sample-ratio of `penstock serve`.

examples:
  penstock trace
  penstock trace --level detailed
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "trace",
        help="change how much a server traces, or show it",
        description="Change how much a server traces, also of requests that run; without --level only show "
        "it. Both show what became of the server's spans.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--level", choices=get_args(TraceLevel), help="how much is traced from now on")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Change the level if one is given, and print what is in force."""
    return with_client(args, lambda client: _trace(client, args))


def _trace(client: Client, args: argparse.Namespace) -> int:
    status = client.set_tracing(args.level)
    if args.json:
        print_json(status)
        return 0
    was = f", was {status.previous}" if status.previous != status.current else ""
    print(f"the level is {status.current}{was}")
    print(
        f"spans since the server's start: {status.spans_exported} exported, {status.spans_dropped} dropped "
        f"because too many waited, {status.spans_failed} failed"
    )
    return 0
