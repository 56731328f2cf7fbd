"""The flags of `penstock serve` that bound the size of replies."""

from __future__ import annotations

import argparse

from penstock.server_cli.serving.option_values import size
from penstock.service.replies.reply_budget import MIB, ReplyLimits

_DEFAULTS = ReplyLimits()
_HELP = {
    "max_response_bytes": "largest reply of Generate, and most bytes that may wait for one stream's reader",
    "max_buffered_response_bytes": "most bytes of all replies; new requests are refused from 75 %% on",
}


def add_reply_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags under a heading of their own."""
    group = parser.add_argument_group("replies")
    for name, text in _HELP.items():
        default = getattr(_DEFAULTS, name)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=size,
            default=default,
            metavar="SIZE",
            help=f"{text}; default: {default // MIB}M",
        )
