"""The options of `penstock serve` that say how long connections live."""

from __future__ import annotations

import argparse
from dataclasses import fields

from penstock.service.listening.connections import ConnectionOptions

_OPTIONS = ConnectionOptions()
_HELP = {
    "handshake_timeout_s": "close a connection whose TLS or HTTP/2 has not begun after so long",
    "keepalive_s": "send a ping to a peer of which nothing came for so long",
    "keepalive_timeout_s": "a peer that does not answer a ping for so long is gone, and its requests end",
    "max_connection_age_s": "close a connection this old once its RPCs have ended; this spreads load anew",
    "max_connection_age_grace_s": "how long its RPCs may still take then; 0: as long as they will",
    "max_connection_idle_s": "close a connection that has had no RPC for so long",
}


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Describe them."""
    group = parser.add_argument_group("connections", "0 switches each of these off")
    for name, text in _HELP.items():
        group.add_argument(
            f"--{name.removesuffix('_s').replace('_', '-')}",
            dest=name,
            type=float,
            default=getattr(_OPTIONS, name),
            metavar="SECONDS",
            help=f"{text}; default: %(default)g",
        )


def connection_options(args: argparse.Namespace) -> ConnectionOptions:
    """Of a command line; ServerOptions checks them."""
    return ConnectionOptions(**{field.name: getattr(args, field.name) for field in fields(ConnectionOptions)})
