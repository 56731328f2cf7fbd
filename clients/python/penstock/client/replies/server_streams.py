"""Running calls that answer with a stream of messages which stand for themselves, sync and async: iterators
of values that cancel their call if they are closed early.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self, TypeVar

from penstock.client.connection.retries import Attempts
from penstock.client.errors import ProtocolError
from penstock.client.replies.receiving import AsyncReceiver, AsyncStart, Receiver, Start

ValueT = TypeVar("ValueT")


class ServerStream(Iterator[ValueT]):
    """The values that a server sends until it or the caller ends the call."""

    def __init__(self, start: Start[Any], attempts: Attempts, value_of: Callable[[Any], ValueT]) -> None:
        self._messages = Receiver(start, attempts)
        self._value_of = value_of

    def __next__(self) -> ValueT:
        """Return the next value. Raises the errors of `penstock.client.errors`."""
        message = next(self._messages)
        try:
            return self._value_of(message)
        except ProtocolError:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the call if it still runs, and end the iteration. May be called from another thread, and
        twice.
        """
        self._messages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncServerStream(AsyncIterator[ValueT]):
    """The values that a server sends until it or the caller ends the call, for asyncio."""

    def __init__(self, start: AsyncStart[Any], attempts: Attempts, value_of: Callable[[Any], ValueT]) -> None:
        self._messages = AsyncReceiver(start, attempts)
        self._value_of = value_of

    async def __anext__(self) -> ValueT:
        """Return the next value. Raises the errors of `penstock.client.errors`."""
        message = await anext(self._messages)
        try:
            return self._value_of(message)
        except ProtocolError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Cancel the call if it still runs, and end the iteration."""
        self._messages.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
