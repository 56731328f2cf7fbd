"""The flags of `penstock serve` for who may call, and where their usage is kept."""

from __future__ import annotations

import argparse

from penstock.server_cli.serving.option_values import path


def add_keys_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags."""
    group = parser.add_argument_group("callers")
    group.add_argument(
        "--keys",
        type=path,
        metavar="FILE",
        help="answer only callers with a key of this file, which `penstock keys` makes and which is read "
        "again on SIGHUP; default: everybody may do everything",
    )
    group.add_argument(
        "--usage",
        dest="usage_file",
        type=path,
        metavar="FILE",
        help="count requests and tokens of every key in this SQLite file, which `penstock usage` shows; the "
        "last message of an answer is sent once it is counted; default: nothing is kept",
    )
