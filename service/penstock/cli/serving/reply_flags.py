"""The flags of `penstock serve` that bound what replies may take."""

from __future__ import annotations

import argparse
import dataclasses

from penstock.cli.serving.engine_flags import size
from penstock.service.replies.reply_limits import MIB, ReplyLimits

_DEFAULTS = ReplyLimits()
_HELP = {
    "max_response_bytes": "largest reply of Generate, and most that may wait for the reader of one stream",
    "max_buffered_response_bytes": "the same of all requests; new ones are refused shortly before",
}


def add_reply_flags(parser: argparse.ArgumentParser) -> None:
    """Describe them, under a heading of their own."""
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


def reply_limits(args: argparse.Namespace) -> ReplyLimits:
    """The limits of a command line. Raises ConfigError."""
    return ReplyLimits(**{field.name: getattr(args, field.name) for field in dataclasses.fields(ReplyLimits)})
