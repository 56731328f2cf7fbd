"""`penstock resume`: ends a pause."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.calling.common import add_addr, with_client
from penstock.client import Client

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "resume",
        help="let a paused server go on",
        description="Let a paused server go on, after what the pause has freed is there again. It does "
        "nothing to a server that is not paused.",
    )
    add_addr(parser)


def run(args: argparse.Namespace) -> int:
    """Resume."""
    return with_client(args, _resume)


def _resume(client: Client) -> int:
    client.resume()
    print("the server makes tokens")
    return 0
