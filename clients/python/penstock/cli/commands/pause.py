"""`penstock pause`: stops a server from making tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.calling.changes import add_policy, running
from penstock.cli.calling.common import add_addr, print_json, with_client
from penstock.client import Client

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


_EPILOG = """\
New requests queue up, and time limits go on. The server stays paused until `penstock resume`. Pausing it
again applies --policy to the requests that the first pause has kept, and frees what it asks for in addition.

examples:
  penstock pause --policy keep
  penstock pause --policy abort --free-kv-cache --offload-weights
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "pause",
        help="stop a server from making tokens",
        description="Stop a server from making tokens, until `penstock resume`.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--free-kv-cache",
        action="store_true",
        help="free the memory of the KV cache until then; not with --policy keep, which needs it",
    )
    parser.add_argument(
        "--offload-weights", action="store_true", help="move the weights to host memory until then"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_policy(parser, "wait")
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Pause, and print what became of the running requests."""
    return with_client(args, lambda client: _pause(client, args))


def _pause(client: Client, args: argparse.Namespace) -> int:
    done = client.pause(
        policy=args.policy,
        drain_timeout_s=args.drain_timeout,
        free_kv_cache=args.free_kv_cache,
        offload_weights=args.offload_weights,
    )
    if args.json:
        print_json(done)
        return 0
    print("the server is paused; `penstock resume` ends that")
    if requests := running(done.in_flight):
        print(f"running requests: {requests}")
    if done.freed_bytes:
        print(f"freed {done.freed_bytes / 1e6:.1f} MB of the device's memory")
    return 0
