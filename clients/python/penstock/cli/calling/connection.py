"""The flags that say which server to call, how to reach it, and with which key."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypedDict

from penstock.cli.calling.flag_values import number, whole
from penstock.client import DEFAULT_ADDR, Retry, Tls

MAX_RETRIES = 1000


class Connection(TypedDict):
    """The arguments of both clients besides the address."""

    tls: Tls | bool
    token: str | None
    insecure: bool
    timeout: float | None
    retries: Retry | None


class WrongConnection(Exception):
    """The flags, or files that they name, cannot work; the message says what to do."""


def add_addr(
    parser: argparse.ArgumentParser,
    *,
    timeout: bool = True,
    retries: bool = True,
    insecure: str = "allow sending the key to another machine without TLS",
) -> None:
    """Add the flags of every command that talks to a server. A command that handles `timeout` or `retries`
    itself leaves them out. `insecure` is the help of --insecure.
    """
    default = os.environ.get("PENSTOCK_ADDR") or DEFAULT_ADDR
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--addr",
        default=default,
        metavar="HOST:PORT",
        help="or unix:/PATH, or several addresses separated by commas, called in turn; "
        f"default: $PENSTOCK_ADDR, else {DEFAULT_ADDR}",
    )
    group.add_argument("--tls", action="store_true", help="use TLS; the other flags of TLS imply it")
    group.add_argument(
        "--ca", metavar="FILE", help="trust these certificates (PEM); default: the well-known authorities"
    )
    group.add_argument("--cert", metavar="FILE", help="show this certificate (PEM) to the server")
    group.add_argument("--key", metavar="FILE", help="the private key of --cert (PEM)")
    group.add_argument(
        "--tls-name", metavar="NAME", help="the name in the server's certificate; default: the host of --addr"
    )
    token = group.add_mutually_exclusive_group()
    token.add_argument(
        "--token",
        metavar="KEY",
        help="the key that the server asks for; other users of this machine can see it in the list of "
        "processes; default: $PENSTOCK_TOKEN",
    )
    token.add_argument("--token-file", metavar="FILE", help="a file whose first line is the key")
    group.add_argument("--insecure", action="store_true", help=insecure)
    if retries:
        group.add_argument(
            "--retries",
            type=whole(0, MAX_RETRIES),
            default=0,
            metavar="N",
            help="repeat a call that the server could not take, up to N times, ever later; default: 0",
        )
    if timeout:
        group.add_argument(
            "--timeout",
            type=number(above=0),
            metavar="S",
            help="give a call up after S seconds; default: no limit for generation, weights and pauses, 10 "
            "for other calls",
        )


def connection(args: argparse.Namespace) -> Connection:
    """Return the arguments of the client that the flags describe. Raises WrongConnection for a file that
    cannot be read.
    """
    given = args.tls or any(value is not None for value in (args.ca, args.cert, args.key, args.tls_name))
    retries: int = getattr(args, "retries", 0)
    try:
        tls = Tls(_user(args.ca), _user(args.cert), _user(args.key), args.tls_name) if given else False
    except ValueError as error:
        raise WrongConnection(f"{error} (--cert and --key)") from None
    return Connection(
        tls=tls,
        token=_token(args),
        insecure=args.insecure,
        timeout=getattr(args, "timeout", None),
        retries=Retry(attempts=retries + 1) if retries else None,
    )


def _token(args: argparse.Namespace) -> str | None:
    """Return the key, or None. An empty one counts as none, so that a variable can be emptied if no key is
    wanted.
    """
    if args.token_file is None:
        found = os.environ.get("PENSTOCK_TOKEN") if args.token is None else args.token
        return str(found).strip() or None if found is not None else None
    try:
        text = Path(args.token_file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise WrongConnection(f"cannot read --token-file {args.token_file}: {why}") from None
    if not (line := text.partition("\n")[0].strip()):
        raise WrongConnection(f"--token-file {args.token_file} has no key in its first line")
    return line


def _user(file: str | None) -> Path | None:
    return None if file is None else Path(file).expanduser()
