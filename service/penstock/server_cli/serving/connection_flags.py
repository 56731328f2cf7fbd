"""The flags of `penstock serve` for how long connections live."""

from __future__ import annotations

import argparse

from penstock.service.listening.connections import ConnectionOptions

_OPTIONS = ConnectionOptions()
_HELP = {
    "handshake_timeout_s": "close a connection whose handshake (TLS, HTTP/2) is not done within this time",
    "keepalive_s": "send a ping to a peer that has sent nothing for this long",
    "keepalive_timeout_s": "end the requests of a peer that does not answer a ping within this time",
    "max_connection_age_s": "close a connection this old once its RPCs have ended, to spread load again",
    "max_connection_age_grace_s": "how long RPCs of such a connection may go on; 0: until their end",
    "max_connection_idle_s": "close a connection that has had no RPC for this long",
}


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags."""
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
