"""The flags of `penstock serve` that bound what goes on at once."""

from __future__ import annotations

import argparse

from penstock.service.limits.bounds import Bounds

_DEFAULTS = Bounds()
_COUNTS = {
    "max_rpcs": "Generate, Stream, Embed, Score, Tokenize and Detokenize calls at once, of all callers",
    "max_rpcs_per_address": "such calls of one IPv4 address or IPv6 /64 network; a proxy is one address",
    "max_rpcs_per_connection": "such calls of one connection",
    "max_tokenize_rpcs": "Tokenize and Detokenize calls at once",
    "max_control_rpcs": "other calls of penstock.v1 at once, such as Abort and GetLoad; half per address",
    "max_update_rpcs": "UpdateWeights calls at once, of which one updates; half per address",
    "max_watch_rpcs": "WatchLoad calls at once (penstock top); half per address",
    "max_health_rpcs": "health checks and watches at once; half per address",
    "max_reflection_rpcs": "calls of server reflection at once; half per address",
    "max_receiving_rpcs": "messages that take over half a second to arrive; half per address",
    "max_connections": "connections of one address; further ones are closed at once",
}


def add_limits_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags under a heading of their own."""
    group = parser.add_argument_group(
        "bounds",
        "calls beyond a bound are refused as BUSY, with a time to come back; 0 switches a bound off",
    )
    for name, text in _COUNTS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(_DEFAULTS, name),
            metavar="N",
            help=f"{text}; default: %(default)s",
        )
    group.add_argument(
        "--receive-limit",
        dest="receive_limit_s",
        type=float,
        default=_DEFAULTS.receive_limit_s,
        metavar="SECONDS",
        help="end a call whose message does not arrive within this time; default: %(default)g",
    )
    group.add_argument(
        "--update-stall-limit",
        dest="update_stall_limit_s",
        type=float,
        default=_DEFAULTS.update_stall_limit_s,
        metavar="SECONDS",
        help="end an UpdateWeights whose next message does not arrive within this time; nothing has changed "
        "then; default: %(default)g",
    )
