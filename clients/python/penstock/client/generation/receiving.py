"""Receives the messages of a running call that answers with a stream, sync and async.

The call starts at once. It is tried again only until its first message, and cancelled when its receiver is
closed or dropped before the end.

Where each message stands for itself, the running call is an iterator of values.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol, Self, TypeVar

import grpc
import grpc.aio

from penstock.client.connection.channel import Attempts
from penstock.client.error_table import from_rpc_error
from penstock.client.errors import PenstockClientError, ProtocolError

MessageT = TypeVar("MessageT")
SentT = TypeVar("SentT", covariant=True)


class Call(Protocol[SentT]):
    """What a sync call with a stream of replies offers."""

    def __next__(self) -> SentT: ...
    def cancel(self) -> object: ...


Start = Callable[[float | None], Call[MessageT]]
"""Starts the call, for each attempt; the argument is its timeout in seconds."""
AsyncStart = Callable[[float | None], grpc.aio.UnaryStreamCall[Any, MessageT]]


class Receiver(Iterator[MessageT]):
    """The messages that a server sends until it or the caller ends the call."""

    def __init__(self, start: Start[MessageT], attempts: Attempts) -> None:
        self._start, self._attempts = start, attempts
        self._began = False
        self.is_complete = False
        """Whether the server has ended the call, with OK."""
        self._ended = threading.Event()
        self._ended.set()  # until there is a call that could be cancelled
        self._call = start(attempts.timeout())
        self._ended.clear()

    def __next__(self) -> MessageT:
        """Return the next message. Raises the errors of `penstock.client.errors`."""
        while not self._ended.is_set():
            try:
                message = next(self._call)
            except StopIteration:
                self.is_complete = True
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
                self._try_again(delay)
            else:
                self._began = True
                return message
        raise StopIteration

    def _try_again(self, delay: float) -> None:
        if not self._ended.wait(delay):
            self._call = self._start(self._attempts.timeout())
            # closed meanwhile by another thread, which cancelled the call before this one
            if self._ended.is_set():
                self._call.cancel()

    def close(self) -> None:
        """Cancel the call if it still runs, and end the iteration. May be called from another thread, and
        twice.
        """
        if not self._ended.is_set():
            self._ended.set()
            self._call.cancel()

    def __del__(self) -> None:
        self.close()


class AsyncReceiver(AsyncIterator[MessageT]):
    """The messages that a server sends until it or the caller ends the call, for asyncio."""

    def __init__(self, start: AsyncStart[MessageT], attempts: Attempts) -> None:
        self._start, self._attempts = start, attempts
        self._began = False
        self.is_complete = False
        """Whether the server has ended the call, with OK."""
        self._ended = asyncio.Event()
        self._ended.set()  # until there is a call that could be cancelled
        self._call = start(attempts.timeout())
        self._messages = aiter(self._call)
        self._ended.clear()

    async def __anext__(self) -> MessageT:
        """Return the next message. Raises the errors of `penstock.client.errors`."""
        while not self._ended.is_set():
            try:
                message = await anext(self._messages)
            except StopAsyncIteration:
                self.is_complete = True
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
                return message
        raise StopAsyncIteration

    async def _try_again(self, delay: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), delay)
            return  # closed meanwhile by another task
        self._call = self._start(self._attempts.timeout())
        self._messages = aiter(self._call)

    def close(self) -> None:
        """Cancel the call if it still runs, and end the iteration."""
        if not self._ended.is_set():
            self._ended.set()
            self._call.cancel()

    def __del__(self) -> None:
        # grpc.aio's call and its iterator refer to each other, so dropping this receiver alone would not end
        # the call.
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and the call with it
            self.close()


def is_task_cancelled() -> bool:
    """Say whether this task was cancelled, and not only its call: grpc.aio raises asyncio.CancelledError for
    both.

    Without this, closing the client would look like a task's own cancellation to a task that waits for an
    answer.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancelled_call(call: grpc.aio.Call) -> PenstockClientError:
    """Make the error of a call that was cancelled on this side, for which grpc.aio raises no RpcError."""
    error = grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
    return from_rpc_error(error)


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
