"""The flags of `penstock serve` for OpenAI's HTTP API, which a process beside the server answers."""

from __future__ import annotations

import argparse
import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.openai.settings import Settings
from penstock.runtime.errors import ConfigError
from penstock.server_cli.serving.option_values import port
from penstock.service.limits.bounds import MANY
from penstock.service.listening.listen_options import host_problems, unix_address
from penstock.service.options import ServerOptions

_DEFAULTS = Settings()
_FOLDER, _SOCKET = "penstock-front-", "grpc"
"""What the names of these folders begin with, and the name of the socket within."""
_LAST_REPLIES_S = 1.0
"""Seconds after the server's grace that callers may take for what is left of their answers."""


def add_openai_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags under a heading of their own."""
    group = parser.add_argument_group("OpenAI's API over HTTP")
    group.add_argument(
        "--openai-port",
        type=port,
        metavar="N|none",
        help="a process beside the server speaks OpenAI's HTTP API at this port, with the certificate of "
        "--tls-cert, and serves a web page; 0 lets the system choose; default: none",
    )
    group.add_argument("--openai-host", metavar="HOST", help="host of that port; default: that of --host")


def front_settings(args: argparse.Namespace, options: ServerOptions) -> Settings | None:
    """What the OpenAI front of a server with these options is told; None if there is to be none. Raises
    ConfigError.
    """
    host, wanted, listen = args.openai_host, args.openai_port, options.listen
    if wanted is None:
        if host is not None:
            raise ConfigError("openai_host: needs an openai_port")
        return None
    if not 0 <= wanted <= 65535:
        raise ConfigError(f"openai_port: must be from 0 to 65535, not {wanted}")
    if host is not None and (bad := host_problems("openai_host", host)):
        raise ConfigError("; ".join(bad))
    host = host or options.host
    problem = listen.exposure_problem((host,), keys=options.keys is not None)
    if problem is not None:
        raise ConfigError(f"openai_{problem}")
    # JSON takes more bytes than the message that is made of it.
    most_bytes = max(2 * options.max_receive_bytes, _DEFAULTS.max_body_bytes)
    assert listen.unix_socket is not None, "socket_for_the_front has seen to it"
    return Settings(
        addr=unix_address(listen.unix_socket),
        insecure=True,  # what the server thinks of its own exposure is checked above
        host=host,
        port=wanted,
        tls_cert=listen.tls_cert,
        tls_key=listen.tls_key,
        client_ca=listen.client_ca,
        max_connections=options.bounds.max_connections or MANY,
        max_body_bytes=most_bytes,
        max_waiting_body_bytes=max(_DEFAULTS.max_waiting_body_bytes, 4 * most_bytes),
        stall_limit_s=options.stall_limit_s,
        grace_s=options.grace_s + _LAST_REPLIES_S,
        log_format=args.log_format,
        access_log=options.access_log,
    )


@contextlib.contextmanager
def socket_for_the_front(args: argparse.Namespace) -> Iterator[bool]:
    """Have the server listen on a Unix socket, through which the OpenAI front calls it. Gives whether it is a
    private one that is made up here, because the command line has none.

    Such a socket speaks no TLS, and no bound of one address or connection counts for it, so the front needs
    no certificates and its callers have all the room that there is.
    """
    if args.openai_port is None or args.unix_socket is not None:
        yield False
        return
    _remove_left_sockets()
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:  # which only this user may enter
        args.unix_socket = Path(folder) / _SOCKET
        yield True


def _remove_left_sockets() -> None:
    """Remove such folders of servers that were killed, and so could not remove their own. Those of other
    users cannot be entered.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_SOCKET}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                path.parent.rmdir()
