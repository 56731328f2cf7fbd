"""Running calls that answer with a stream of messages which stand for themselves, sync and async: iterators
of values that cancel their call if they are closed early.

The call starts with the method that makes the stream. It is tried again only until its first message.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol, Self, TypeVar

import grpc
import grpc.aio

from penstock.client.connection.retries import Attempts
from penstock.client.error_table import from_rpc_error
from penstock.client.errors import ProtocolError
from penstock.client.replies.streams import cancelled_call, is_task_cancelled

ValueT = TypeVar("ValueT")


class Call(Protocol):
    """What a sync call with a stream of replies offers."""

    def __next__(self) -> Any: ...
    def cancel(self) -> object: ...


class ServerStream(Iterator[ValueT]):
    """The values that a server sends until it or the caller ends the call."""

    def __init__(
        self,
        start: Callable[[float | None], Call],
        attempts: Attempts,
        value_of: Callable[[Any], ValueT],
    ) -> None:
        """`start` starts the call, for each attempt; its argument is the timeout in seconds."""
        self._start, self._attempts, self._value_of = start, attempts, value_of
        self._began = False
        self._ended = threading.Event()
        self._ended.set()  # until there is a call that could be cancelled
        self._call = start(attempts.timeout())
        self._ended.clear()

    def __next__(self) -> ValueT:
        """Return the next value. Raises the errors of `penstock.client.errors`."""
        while not self._ended.is_set():
            try:
                message = next(self._call)
            except StopIteration:
                self._ended.set()
                raise
            except grpc.RpcError as error:
                if self._ended.is_set():  # closed by another thread, which cancelled this call
                    break
                failure = from_rpc_error(error, began=self._began)
                delay = None if self._began else self._attempts.delay_after(failure)
                if delay is None:
                    self._ended.set()
                    raise failure from error
                if not self._ended.wait(delay):
                    self._call = self._start(self._attempts.timeout())
                    if self._ended.is_set():  # another thread cancelled the call before this one
                        self._call.cancel()
            else:
                self._began = True
                return self._made(message)
        raise StopIteration

    def _made(self, message: Any) -> ValueT:
        """The value of a message. A message that makes no sense ends the call."""
        try:
            return self._value_of(message)
        except ProtocolError:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the call if it still runs, and end the iteration. May be called from another thread, and
        twice.
        """
        if not self._ended.is_set():
            self._ended.set()
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncServerStream(AsyncIterator[ValueT]):
    """The values that a server sends until it or the caller ends the call, for asyncio."""

    def __init__(
        self,
        start: Callable[[float | None], grpc.aio.UnaryStreamCall[Any, Any]],
        attempts: Attempts,
        value_of: Callable[[Any], ValueT],
    ) -> None:
        """`start` starts the call, for each attempt; its argument is the timeout in seconds."""
        self._start, self._attempts, self._value_of = start, attempts, value_of
        self._began = False
        self._ended = asyncio.Event()
        self._ended.set()  # until there is a call that could be cancelled
        self._call = start(attempts.timeout())
        self._messages = aiter(self._call)
        self._ended.clear()

    async def __anext__(self) -> ValueT:
        """Return the next value. Raises the errors of `penstock.client.errors`."""
        while not self._ended.is_set():
            try:
                message = await anext(self._messages)
            except StopAsyncIteration:
                self._ended.set()
                raise
            except grpc.RpcError as error:
                failure = from_rpc_error(error, began=self._began)
                delay = None if self._began else self._attempts.delay_after(failure)
                if delay is None:
                    self._ended.set()
                    raise failure from error
                await self._try_again(delay)
            except asyncio.CancelledError:
                closed = self._ended.is_set()
                self._ended.set()
                if is_task_cancelled():
                    self._call.cancel()
                    raise
                if closed:  # closed by another task, which cancelled this call
                    break
                raise await cancelled_call(self._call) from None
            else:
                self._began = True
                return await self._made(message)
        raise StopAsyncIteration

    async def _made(self, message: Any) -> ValueT:
        """The value of a message. A message that makes no sense ends the call."""
        try:
            return self._value_of(message)
        except ProtocolError:
            await self.aclose()
            raise

    async def _try_again(self, delay: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), delay)
            return  # closed meanwhile by another task
        self._call = self._start(self._attempts.timeout())
        self._messages = aiter(self._call)

    async def aclose(self) -> None:
        """Cancel the call if it still runs, and end the iteration."""
        if not self._ended.is_set():
            self._ended.set()
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # grpc.aio's call and its iterator refer to each other, so dropping this stream alone would not end
        # the call.
        if not self._ended.is_set():
            with contextlib.suppress(RuntimeError):  # the event loop is gone, and the call with it
                self._call.cancel()
