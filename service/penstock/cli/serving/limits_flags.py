"""The flags of `penstock serve` that bound what goes on at once."""

from __future__ import annotations

import argparse
import dataclasses

from penstock.service.limits.bounds import Bounds

_DEFAULTS = Bounds()
_COUNTS = {
    "max_rpcs": "Generate, Stream, Tokenize and Detokenize calls at once, of all callers",
    "max_rpcs_per_address": "the same of one IPv4 address or IPv6 /64 network; behind a proxy all have its",
    "max_rpcs_per_connection": "the same of one connection",
    "max_tokenize_rpcs": "Tokenize and Detokenize calls at once",
    "max_control_rpcs": "other calls of penstock.v1 at once, such as Abort and GetLoad; half per address",
    "max_health_rpcs": "health checks and watches at once; half per address",
    "max_reflection_rpcs": "calls of server reflection at once; half per address",
    "max_receiving_rpcs": "messages that are on their way in for over half a second; half per address",
    "max_connections": "connections; what is above is closed",
}


def add_limits_flags(parser: argparse.ArgumentParser) -> None:
    """Describe them, under a heading of their own."""
    group = parser.add_argument_group(
        "bounds",
        "what is above is refused as BUSY, with a time to come back; 0 switches a bound off",
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
        help="end a call whose message does not come within so long; default: %(default)g",
    )


def bounds(args: argparse.Namespace) -> Bounds:
    """The bounds of a command line. Raises ConfigError."""
    return Bounds(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Bounds)})
