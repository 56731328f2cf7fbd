"""Receives the messages of a call that may send many, and decodes messages.

Messages are decoded here and not by gRPC, which answers an undecodable one with an untyped INTERNAL. Here it
is INVALID_ARGUMENT, and fields that protobuf would drop silently are refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from penstock.runtime.errors import InvalidRequest, RequestError, Violation
from penstock.service.limits.admission import PACKAGES
from penstock.service.requests.parts import check_parts
from penstock.service.requests.support import check_known

M = TypeVar("M", bound=Message)


def decode(parse: Callable[[bytes], M], data: bytes, vocab_size: int = 0) -> M:
    """Parse the request. Raises InvalidRequest if the bytes are no such message, or have too many parts."""
    try:
        check_parts(cast("Descriptor", parse(b"").DESCRIPTOR), data, vocab_size)
        return parse(data)
    except (DecodeError, ValueError) as error:  # ValueError: a string that is not UTF-8
        raise InvalidRequest([Violation("", f"the request cannot be decoded: {error}")]) from error


def decoded(method: str, parse: Any, data: bytes, vocab_size: int = 0) -> tuple[Any, RequestError | None]:
    """Parse the message, and return it with the error that refuses its unknown fields, if it has any and the
    method is ours.
    """
    request = decode(parse, data, vocab_size)
    try:
        if method.startswith(PACKAGES):
            check_known(request, parse, data)
    except RequestError as error:
        return request, error.with_traceback(None)  # the traceback would keep the message's bytes alive
    return request, None


def decoded_whole(method: str, parse: Any, data: bytes) -> Any:
    """Parse the message. Raises the error that refuses its unknown fields, if it has any and the method is
    ours.
    """
    request, refusal = decoded(method, parse, data)
    if refusal is not None:
        raise refusal
    return request


async def all_decoded(method: str, parse: Any, chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Decode each message of a call. They must be small: this is done on the event loop."""
    async for data in chunks:
        yield decoded_whole(method, parse, data)


@dataclass(frozen=True)
class Undecoded:
    """A message as it was received, to be decoded in the thread that works on it."""

    method: str
    parse: Any
    data: bytes

    def decode(self) -> Any:
        """Return the message. It takes the longer the larger it is. Raises InvalidRequest and
        UnsupportedFeature.
        """
        return decoded_whole(self.method, self.parse, self.data)


class Incoming:
    """The messages of a call that sends many, undecoded, to be iterated over once.

    It is no generator, because one that is not read to its end would keep the call alive until a garbage
    collection.
    """

    def __init__(self, method: str, parse: Any, receive: Callable[[], Awaitable[Any]]) -> None:
        """`receive` returns the bytes of the next message, or gRPC's EOF. It raises what refuses the
        message.
        """
        self._method, self._parse, self._receive = method, parse, receive

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Undecoded:
        data = await self._receive()
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return Undecoded(self._method, self._parse, data)
