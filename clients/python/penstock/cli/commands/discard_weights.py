"""`penstock discard-weights`: drops weights that were pushed with --stage-only."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.calling.common import add_addr, complain, visible, with_client
from penstock.cli.calling.flag_values import words
from penstock.client import Client

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "discard-weights",
        help="drop weights that were pushed with --stage-only",
        description="Drop weights that were pushed with `penstock push-weights --stage-only`, and free their "
        "memory.",
    )
    parser.add_argument(
        "update_id", type=words(), metavar="ID", help="the id of the update; `penstock info` shows it"
    )
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Discard. Returns 1 if no update of that id was staged."""
    return with_client(args, lambda client: _discard(client, args))


def _discard(client: Client, args: argparse.Namespace) -> int:
    if not client.discard_weights(args.update_id):
        complain(args.command, f"no update {args.update_id} is staged; `penstock info` shows the one that is")
        return 1
    print(visible(f"dropped the update {args.update_id}"))
    return 0
