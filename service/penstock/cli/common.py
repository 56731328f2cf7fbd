"""What the commands that talk to a server share: address, sampling flags, and errors as one helpful line."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.client import (
    DEFAULT_ADDR,
    Client,
    DeadlineExceeded,
    Draining,
    DuplicateRequestId,
    InvalidRequest,
    NotReady,
    PenstockClientError,
    PromptTooLong,
    QueueFull,
    ServerError,
    UnavailableError,
    Unreachable,
    Unsupported,
)

if TYPE_CHECKING:
    # Generic only for type checkers.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_addr(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--addr", default=DEFAULT_ADDR, metavar="HOST:PORT", help="default: %(default)s")


def with_client(args: argparse.Namespace, body: Callable[[Client], int]) -> int:
    """Connect, run, and turn what the server refuses into one line on stderr and exit code 1."""
    with Client(args.addr) as client:
        try:
            return body(client)
        except PenstockClientError as error:
            complain(args.command, explain(error, args.addr))
            return 1


def complain(command: str, message: str) -> None:
    print(f"penstock {command}: {message}", file=sys.stderr)


def explain(error: PenstockClientError, addr: str) -> str:
    """What went wrong and what to do next, in one line."""
    text = " ".join(str(error).split())
    match error:
        case Unreachable():
            cause = text.rpartition(": ")[2].rstrip("]")
            if "resolving" in text or "resolution" in text:
                return f"{addr} is not an address that can be found ({cause}); give HOST:PORT with --addr"
            if "failed to connect" not in text:
                return f"the connection to {addr} broke ({cause}); see whether the server still runs"
            return (
                f"no server at {addr} ({cause}); start one with `penstock serve demo`, or name it with --addr"
            )
        case NotReady():
            return (
                f"the server at {addr} is still loading; try again in a moment, or watch its output ({text})"
            )
        case Draining():
            return f"the server at {addr} is shutting down; try again when it is back"
        case QueueFull():
            wait = "" if error.retry_after is None else f" in {error.retry_after:g} s"
            return f"the queue of {addr} is full; try again{wait}"
        case PromptTooLong():
            return f"{text}; shorten the prompt, or have it cut with --truncation left"
        case UnavailableError():
            return f"{addr} is not available now ({error.reason}): {text}; try again later"
        case InvalidRequest() if error.violations:
            listed = "; ".join(f"{v.field}: {v.description}" for v in error.violations)
            return f"the request is not valid: {listed}"
        case Unsupported():
            what = ", ".join(error.fields)
            return f"this server cannot do that{f' ({what})' if what else ''}: {text}; see `penstock info`"
        case DuplicateRequestId():
            return f"{text}; choose another --request-id"
        case DeadlineExceeded():
            return f"no answer in time from {addr}; allow more with --timeout"
        case ServerError():
            return f"the server failed ({error.code.name}): {text}; its log says more"
        case _:
            return f"the server refused ({error.reason or error.code.name}): {text}"


def plain(value: object) -> Any:
    """Dataclasses and enums as what json can write; NaN, which JSON lacks, as null."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(value: object) -> None:
    print(json.dumps(plain(value), indent=2, ensure_ascii=False))


_CONTROLS = {code: "�" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def write(text: str) -> None:
    """Show a model's text at once; on a terminal without control characters, which could rewrite it."""
    sys.stdout.write(text.replace("\r\n", "\n").translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
