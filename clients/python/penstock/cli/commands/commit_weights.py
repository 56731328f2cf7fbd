"""`penstock commit-weights`: swaps in weights that were pushed with --stage-only."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.calling.changes import add_policy, outcome
from penstock.cli.calling.common import add_addr, print_json, visible, with_client
from penstock.cli.calling.flag_values import words
from penstock.client import Client

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "commit-weights",
        help="swap in weights that were pushed with --stage-only",
        description="Swap in weights that were pushed with `penstock push-weights --stage-only`. It may be "
        "run again if its answer was lost.",
    )
    parser.add_argument(
        "update_id", type=words(), metavar="ID", help="the id of the update; `penstock info` shows it"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_policy(parser, "as it was pushed")
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Commit, and print which weights are in use."""
    return with_client(args, lambda client: _commit(client, args))


def _commit(client: Client, args: argparse.Namespace) -> int:
    change = client.commit_weights(args.update_id, policy=args.policy, drain_timeout_s=args.drain_timeout)
    if args.json:
        print_json(change)
    else:
        for line in outcome(change).splitlines():
            print(visible(line))
    return 0
