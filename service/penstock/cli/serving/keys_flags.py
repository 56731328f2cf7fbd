"""The options of `penstock serve` that say who may call, and where to keep what they used."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_keys_flags(parser: argparse.ArgumentParser) -> None:
    """Describe them."""
    group = parser.add_argument_group("callers")
    group.add_argument(
        "--keys",
        type=lambda text: Path(text).expanduser(),
        metavar="FILE",
        help="answer only those who send one of the keys in this file, which `penstock keys` makes; it is "
        "read again on SIGHUP; default: everybody may do everything",
    )
    group.add_argument(
        "--usage",
        dest="usage_file",
        type=lambda text: Path(text).expanduser(),
        metavar="FILE",
        help="count requests and tokens of every key in this SQLite file, which `penstock usage` shows; an "
        "answer's last message leaves once it is counted; default: nothing is kept",
    )
