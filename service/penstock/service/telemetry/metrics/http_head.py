"""Reads the head of an HTTP request, and writes replies. Requests with bodies are not needed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

MAX_HEAD_BYTES = 8192
END_OF_HEAD = b"\r\n\r\n"


class BadHead(Exception):
    """A head that is no HTTP/1 request. Its text is one of ours, and quotes nothing."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request."""

    method: str
    target: str
    headers: Mapping[str, str]
    """By their names in lower case. Values of a name that comes several times are joined by commas."""


def parsed(data: bytes) -> Head:
    """The head of these bytes, which end with END_OF_HEAD. Raises BadHead."""
    first, *lines = data.removesuffix(END_OF_HEAD).decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        raise BadHead("this is no HTTP/1 request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadHead("a header of the request has no name")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return Head(words[0], words[1], headers)


def reply(
    status: HTTPStatus,
    body: bytes,
    content_type: str = "text/plain; charset=utf-8",
    *,
    headers: Mapping[str, str] | None = None,
    with_body: bool = True,
) -> bytes:
    """A whole reply, after which the connection is closed. Without `with_body` it is that to HEAD."""
    lines = {
        "Content-Type": content_type,
        "Content-Length": str(len(body)),
        "Connection": "close",
        "X-Content-Type-Options": "nosniff",
        **(headers or {}),
    }
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + (body if with_body else b"")
