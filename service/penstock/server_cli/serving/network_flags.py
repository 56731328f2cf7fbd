"""The flags of `penstock serve` for where it listens and who can reach that."""

from __future__ import annotations

import argparse

from penstock.server_cli.serving.option_values import octal, path, port
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions

_OPTIONS = ServerOptions()
_LISTEN = ListenOptions()


def add_listen_flags(net: argparse._ArgumentGroup) -> None:
    """Add these flags."""
    net.add_argument(
        "--host", default=_OPTIONS.host, help="address to listen on; default: %(default)s, this machine only"
    )
    net.add_argument(
        "--port",
        type=port,
        default=_OPTIONS.port,
        metavar="N|none",
        help="0 lets the system choose; none: only the Unix socket; default: %(default)s",
    )
    net.add_argument(
        "--unix-socket",
        type=path,
        metavar="PATH",
        help="listen on this Unix socket, too; its address for clients is unix:/absolute/path; default: none",
    )
    net.add_argument(
        "--unix-socket-mode",
        type=octal,
        default=_LISTEN.unix_socket_mode,
        metavar="MODE",
        help="mode of the socket's file, in octal: whoever may write to it may connect; "
        f"default: {_LISTEN.unix_socket_mode:o}, this user only",
    )
    net.add_argument(
        "--control-port",
        type=int,
        metavar="N",
        help="serve what changes the server for everybody (flush, pause, weights) at this port and not at "
        "--port; 0 lets the system choose; default: all at --port",
    )
    net.add_argument(
        "--control-host", metavar="HOST", help="host of the control port; default: that of --host"
    )
    net.add_argument(
        "--front-processes",
        type=int,
        default=_OPTIONS.front_processes,
        metavar="N",
        help="so many further processes speak gRPC with the clients of --port, to send more messages "
        "a second than one process can; 0: the process of the engine does it; default: %(default)s",
    )
    net.add_argument(
        "--tls-cert",
        type=path,
        metavar="FILE",
        help="certificate chain in PEM form: ports speak TLS; read again when it changes; default: no TLS",
    )
    net.add_argument("--tls-key", type=path, metavar="FILE", help="private key of --tls-cert in PEM form")
    net.add_argument(
        "--client-ca",
        type=path,
        metavar="FILE",
        help="authorities of clients' certificates in PEM form; clients without such a certificate are "
        "refused; default: clients need none",
    )
    net.add_argument(
        "--insecure",
        action="store_true",
        help="allow listening where other machines can connect, without TLS or without keys or client "
        "certificates",
    )
