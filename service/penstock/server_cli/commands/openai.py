"""`penstock openai`: speaks OpenAI's HTTP API, and calls a gRPC server for it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.cli.calling.common import add_addr, complain
from penstock.cli.calling.connection import WrongConnection, connection
from penstock.openai.serving.run import serve
from penstock.openai.settings import LOG_FORMATS, Settings
from penstock.server_cli.serving.flag_names import flags_of, with_flags
from penstock.server_cli.serving.option_values import path, size

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers

_DEFAULTS = Settings()
_SIZES = {
    "max_header_bytes": "the first line and the headers of a request",
    "max_body_bytes": "the body of a request",
    "max_waiting_body_bytes": "all bodies together that are on their way in, in each worker",
}
_TIMES = {
    "header_timeout_s": "the headers of a request must arrive within this time",
    "receive_limit_s": "the body of a request must arrive within this time",
    "keep_alive_s": "a connection may stay for this long without a request",
    "stall_limit_s": "a client must take what waits for it within this time, and 1 s more for each 64 KiB",
    "request_timeout_s": "a request may take this long at the server; 0: no limit",
    "grace_s": "running requests may go on for this long after SIGTERM",
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "openai",
        help="speak OpenAI's HTTP API, as a client of a server",
        description="Speak OpenAI's HTTP API, and call a gRPC server for it. Keys are those of the server.",
    )
    add_addr(
        parser,
        timeout=False,
        retries=False,
        insecure="allow keys to cross the network without TLS, to the server and from callers, and let other "
        "machines use the key of --token",
    )
    _add_listening(parser)
    _add_limits(parser)
    _add_rest(parser)
    parser.set_defaults(flags=flags_of(parser))


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. Returns 0 after a graceful end, 1 if a worker could not start, and 2 for
    flags that cannot work.
    """
    try:
        return serve(settings_of(args))
    except (WrongConnection, ValueError) as error:
        complain("openai", _with_flags(str(error), args.flags))
        return 2


def _with_flags(message: str, flags: Mapping[str, str]) -> str:
    """The message with flags in place of settings, also of those whose names are words."""
    told = with_flags(message, flags)
    return told.replace("use tls,", "use --tls,").replace(
        "allow it with insecure", "allow it with --insecure"
    )


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the flags describe. Raises WrongConnection and ValueError."""
    server = connection(args)
    found: dict[str, Any] = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(Settings)
        if hasattr(args, field.name)
    }
    found |= {"tls": server["tls"], "token": server["token"], "cors_origins": tuple(args.cors_origins)}
    return Settings(**found)


def _add_listening(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("listening")
    group.add_argument(
        "--host", default=_DEFAULTS.host, help="address to listen on; default: %(default)s, this machine only"
    )
    group.add_argument(
        "--port",
        type=int,
        default=_DEFAULTS.port,
        metavar="N",
        help="0 lets the system choose; default: %(default)s",
    )
    group.add_argument(
        "--tls-cert",
        type=path,
        metavar="FILE",
        help="certificate chain in PEM form: the port speaks HTTPS; read again when it changes; default: "
        "plain HTTP",
    )
    group.add_argument("--tls-key", type=path, metavar="FILE", help="private key of --tls-cert in PEM form")
    group.add_argument(
        "--client-ca",
        type=path,
        metavar="FILE",
        help="authorities of clients' certificates in PEM form; clients without such a certificate are "
        "refused; default: clients need none",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=_DEFAULTS.workers,
        metavar="N",
        help="how many processes serve the port; default: %(default)s",
    )
    group.add_argument(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin, such as https://example.org, call the front from browsers; * lets "
        "all; may be given several times; default: none",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-connections",
        type=int,
        default=_DEFAULTS.max_connections,
        metavar="N",
        help="connections at once; each worker has an equal share of them; default: %(default)s",
    )
    group.add_argument(
        "--max-connections-per-address",
        type=int,
        default=_DEFAULTS.max_connections_per_address,
        metavar="N",
        help="of one IPv4 address or IPv6 /64 network; default: %(default)s",
    )
    for name, text in _SIZES.items():
        group.add_argument(
            _flag(name),
            dest=name,
            type=size,
            default=getattr(_DEFAULTS, name),
            metavar="SIZE",
            help=f"{text}; default: {_size(getattr(_DEFAULTS, name))}",
        )
    for name, text in _TIMES.items():
        default = getattr(_DEFAULTS, name)
        group.add_argument(
            _flag(name.removesuffix("_s")),
            dest=name,
            type=type(default),
            default=default,
            metavar="SECONDS",
            help=f"{text}; default: {default:g}",
        )


def _add_rest(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what else it serves and logs")
    group.add_argument("--no-page", dest="page", action="store_false", help="serve no web page at /")
    group.add_argument(
        "--log-format",
        default=_DEFAULTS.log_format,
        choices=LOG_FORMATS,
        help="text for people, or a JSON object on each line; default: %(default)s",
    )
    group.add_argument(
        "--no-access-log", dest="access_log", action="store_false", help="no line for each request"
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _size(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K"
