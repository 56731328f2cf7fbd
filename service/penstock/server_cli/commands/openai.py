"""`penstock openai`: speaks OpenAI's HTTP API, and calls a gRPC server for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.cli.calling.common import add_addr, complain
from penstock.cli.calling.connection import WrongConnection, connection
from penstock.openai.serving.run import serve
from penstock.openai.settings import Settings
from penstock.server_cli.serving.flags import AddFlag, Flags, options_of, size, size_text, with_flags
from penstock.shared.logs import LOG_FORMATS

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
    flags = Flags(parser, _DEFAULTS)
    _add_listening(flags.group("listening"))
    _add_limits(flags.group("limits"))
    _add_store(flags.group("responses that are kept"))
    _add_files(flags.group("files and batches"))
    _add_rest(flags.group("what else it serves and logs"))
    parser.set_defaults(flags={"addr": "--addr", "token": "--token", **flags.by_option})


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
    """Write the message with flags in place of settings, also of those whose names are words."""
    told = with_flags(message, flags)
    return told.replace("use tls,", "use --tls,").replace(
        "allow it with insecure", "allow it with --insecure"
    )


def settings_of(args: argparse.Namespace) -> Settings:
    """Make the settings that the flags describe. Raises WrongConnection and ValueError."""
    server = connection(args)
    return options_of(
        Settings, args, tls=server["tls"], token=server["token"], cors_origins=tuple(args.cors_origins)
    )


def _add_listening(flag: AddFlag) -> None:
    flag("host", "address to listen on; default: %(default)s, this machine only")
    flag("port", "0 lets the system choose", "N")
    flag(
        "tls_cert",
        "certificate chain in PEM form: the port speaks HTTPS; read again when it changes; default: "
        "plain HTTP",
        "FILE",
    )
    flag("tls_key", "private key of --tls-cert in PEM form", "FILE")
    flag(
        "client_ca",
        "authorities of clients' certificates in PEM form; clients without such a certificate are "
        "refused; default: clients need none",
        "FILE",
    )
    flag("workers", "how many processes serve the port", "N")
    flag(
        "cors_origins",
        "let pages of this origin, such as https://example.org, call the front from browsers; * lets "
        "all; may be given several times; default: none",
        "ORIGIN",
        name="--cors-origin",
        action="append",
        default=[],
    )


def _add_limits(flag: AddFlag) -> None:
    flag("max_connections", "connections at once; each worker has an equal share of them", "N")
    flag("max_connections_per_address", "of one IPv4 address or IPv6 /64 network", "N")
    for name, text in _SIZES.items():
        flag(name, f"{text}; default: {size_text(getattr(_DEFAULTS, name))}", "SIZE", type=size)
    for name, text in _TIMES.items():
        flag(name, f"{text}; default: %(default)g", "SECONDS")


def _add_store(flag: AddFlag) -> None:
    flag(
        "store",
        "keep responses of /v1/responses in this file, which is made, so that requests can go on from them; "
        "default: nothing is kept",
        "FILE",
    )
    most = size_text(_DEFAULTS.store_max_bytes)
    flag("store_max_bytes", f"most of that file; the oldest leave; default: {most}", "SIZE", type=size)
    flag("store_days", "how long a response is kept; default: %(default)g", "DAYS")


def _add_files(flag: AddFlag) -> None:
    flag(
        "files",
        "keep callers' files and batches in this folder, which is made if there is none; default: there are "
        "no files and no batches",
        "FOLDER",
    )
    flag("files_max_bytes", "all that is in it; default: 10G", "SIZE", type=size)
    flag("files_days", "keep files, and batches after their end, for so many days", "DAYS")
    flag("batch_concurrency", "lines of a batch that run at a time", "N")


def _add_rest(flag: AddFlag) -> None:
    flag(
        "adapter_updates",
        "serve vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter, for keys with the role control; on "
        "a server without keys everybody may use them; default: off",
        action="store_true",
    )
    flag("page", "serve no web page at /", name="--no-page", action="store_false")
    flag("log_format", "text for people, or a JSON object on each line", choices=LOG_FORMATS)
    flag("access_log", "no line for each request", name="--no-access-log", action="store_false")
