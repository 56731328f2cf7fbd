"""`penstock flush-cache`: makes a server forget cached prompt prefixes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.calling.common import add_addr, print_json, with_client
from penstock.client import Client

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "flush-cache",
        help="forget all cached prompt prefixes",
        description="Forget all cached prompt prefixes. Running requests keep their pages, which are not "
        "shared with new ones.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Flush, and print how many pages that freed."""
    return with_client(args, lambda client: _flush(client, args.json))


def _flush(client: Client, as_json: bool) -> int:
    flushed = client.flush_cache()
    if as_json:
        print_json(flushed)
    else:
        print(f"{flushed.pages_freed} pages are free; running requests keep {flushed.pages_in_use}")
    return 0
