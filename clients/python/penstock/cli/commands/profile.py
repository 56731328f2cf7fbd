"""`penstock profile`: records what a server's engine does in its next steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.calling.common import add_addr, complain, print_json, visible, with_client
from penstock.cli.calling.flag_values import number, whole
from penstock.client import Client

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


_TRACE = "perfetto_trace.json.gz"
_EPILOG = f"""\
The server must have been started with --profile-dir, and keeps the profile there; --out fetches a copy. It
goes on serving while it records, more slowly. If it has no work, start some meanwhile. Ctrl-C ends the
recording.

Open {_TRACE} at https://ui.perfetto.dev ("Open trace file"). It has tracks for the model, the
sampler, and the parts of each step: schedule, pack, dispatch, wait, emit.

examples:
  penstock profile --steps 50 --out profiles
  penstock profile --max-time 5
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "profile",
        help="record what a server's engine does in its next steps",
        description="Record what host and device do in the next steps of a server's engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps",
        type=whole(1, 1000),
        metavar="N",
        help="end after this many steps, at most 1000; default: 100",
    )
    parser.add_argument(
        "--max-time",
        type=number(0.1, 300.0),
        metavar="SECONDS",
        help="end after this time even if there were fewer steps; default: 60",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="fetch the files, to a new folder in this one"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Record, and print where the profile is. Returns 2 if --out cannot be written."""
    return with_client(args, lambda client: _profile(client, args))


def _profile(client: Client, args: argparse.Namespace) -> int:
    try:
        profile = client.profile(steps=args.steps, max_time=args.max_time, folder=args.out)
    except OSError as error:
        why = error.strerror or str(error)
        complain(args.command, f"cannot write {error.filename or args.out}: {why}")
        return 2
    if args.json:
        print_json(profile)
        return 0
    idle = "" if profile.steps else ": the server had no work, so start some meanwhile"
    print(f"recorded {profile.steps} steps in {profile.duration:.2f} s{idle}")
    print(visible(f"at the server: {profile.path} ({profile.num_bytes / 1e6:.1f} MB)"))
    if profile.folder is not None:
        print(visible(f"here: {profile.folder}"))
    print(f"open {_TRACE} in it at https://ui.perfetto.dev")
    return 0
