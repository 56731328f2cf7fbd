"""The option of `penstock serve` that says who may call."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_keys_flags(parser: argparse.ArgumentParser) -> None:
    """Describe it."""
    group = parser.add_argument_group("callers")
    group.add_argument(
        "--keys",
        type=lambda text: Path(text).expanduser(),
        metavar="FILE",
        help="answer only those who send one of the keys in this file, which `penstock keys` makes; it is "
        "read again on SIGHUP; default: everybody may do everything",
    )
