"""Helpers that the commands that talk to a server share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.cli.calling.connection import WrongConnection, add_addr, connection
from penstock.cli.calling.explain import explain
from penstock.cli.calling.screen import complain, plain, print_json, visible, write
from penstock.client import Client, PenstockClientError

if TYPE_CHECKING:
    # The class is generic only for type checkers.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = [
    "NotText",
    "add_addr",
    "complain",
    "connected",
    "explain",
    "plain",
    "print_json",
    "read_stdin",
    "visible",
    "with_client",
    "write",
]


class NotText(Exception):
    """Stdin is not UTF-8; the message says where."""


def connected(args: argparse.Namespace) -> Client:
    """Make the client that the flags describe. Raises WrongConnection if the flags cannot work."""
    try:
        return Client(args.addr, **connection(args))
    except ValueError as error:
        raise WrongConnection(str(error)) from None


def with_client(args: argparse.Namespace, body: Callable[[Client], int]) -> int:
    """Connect and run `body`. A refusal of the server becomes one line on stderr and exit code 1, and a
    ValueError of the client, which does not go with the flags, exit code 2.
    """
    try:
        client = connected(args)
    except WrongConnection as error:
        complain(args.command, str(error))
        return 2
    with client:
        try:
            return body(client)
        except PenstockClientError as error:
            complain(args.command, explain(error, args.addr))
            return 1
        except ValueError as error:
            complain(args.command, str(error))
            return 2


def read_stdin(line: bool = False) -> str:
    """Read all of stdin, or its next line. Raises NotText."""
    try:
        text = sys.stdin.readline() if line else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise NotText(f"stdin is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text.isprintable() and any("\udc80" <= char <= "\udcff" for char in text):
        raise NotText("stdin is not UTF-8 text")  # a C locale passes undecodable bytes on as surrogates
    return text


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin, without their ends; empty ones are left out. Raises NotText."""
    while line := read_stdin(line=True):
        text = line.rstrip("\r\n")
        if text:
            yield text
