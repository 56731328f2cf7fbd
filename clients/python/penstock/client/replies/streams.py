"""Running Stream calls, sync and async: iterators of events that cancel their call if they are closed early.

The call starts with the method that makes the stream, not with the first iteration. Leaving the `with` block,
calling `close()`, or dropping the last reference ends it on the server, too, which frees the request's slot
and pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol, Self

import grpc
import grpc.aio

from penstock.client.connection.retries import Attempts
from penstock.client.error_table import from_rpc_error
from penstock.client.errors import PenstockClientError, ProtocolError
from penstock.client.replies.accumulate import Accumulator
from penstock.client.values.chat_values import ToolCall
from penstock.client.values.results import Generation, StreamEvent
from penstock.v1 import inference_pb2


class _Call(Protocol):
    """What a sync Stream call offers."""

    def __next__(self) -> inference_pb2.StreamResponse: ...
    def cancel(self) -> object: ...


AsyncCall = grpc.aio.UnaryStreamCall[inference_pb2.StreamRequest, inference_pb2.StreamResponse]
Start = Callable[[float | None], _Call]
"""Starts the call, for each attempt; the argument is its timeout in seconds."""
AsyncStart = Callable[[float | None], AsyncCall]


class _Progress:
    """The answer so far, for both kinds of streams."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._answer = Accumulator()
        self._generation: Generation | None = None

    def _delay_after(self, error: PenstockClientError) -> float | None:
        """Seconds until the call is tried again; None if the error is final, as every error is once the
        answer has begun.
        """
        return None if self._answer.started is not None else self._attempts.delay_after(error)

    def _failure_of(self, error: grpc.RpcError) -> PenstockClientError:
        return from_rpc_error(error, began=self._answer.started is not None)

    @property
    def request_id(self) -> str | None:
        """The request's id at the server, for `abort`; None until the first event has come."""
        return self._answer.started.request_id if self._answer.started is not None else None

    def text(self, index: int = 0) -> str:
        """All text of output `index` so far; `reasoning`, `token_ids` and `tool_calls` work alike."""
        return self._answer.so_far(index).text

    def reasoning(self, index: int = 0) -> str:
        """All reasoning of output `index` received so far."""
        return self._answer.so_far(index).reasoning

    def token_ids(self, index: int = 0) -> tuple[int, ...]:
        """All token ids of output `index` received so far."""
        return tuple(self._answer.so_far(index).token_ids)

    def tool_calls(self, index: int = 0) -> tuple[ToolCall, ...]:
        """All complete calls of output `index` received so far."""
        return tuple(self._answer.so_far(index).tool_calls)

    def _whole(self) -> Generation:
        if self._generation is None:
            raise ProtocolError.local("the stream was closed before its end")
        return self._generation


class GenerationStream(_Progress, Iterator[StreamEvent]):
    """The events of a running request."""

    def __init__(self, start: Start, attempts: Attempts) -> None:
        super().__init__(attempts)
        self._start = start
        self._ended = threading.Event()
        self._ended.set()  # until there is a call that could be cancelled
        self._call = start(attempts.timeout())
        self._ended.clear()

    def __next__(self) -> StreamEvent:
        """Return the next event. Raises the errors of `penstock.client.errors`."""
        while not self._ended.is_set():
            try:
                return self._answer.feed(next(self._call))
            except StopIteration:
                self._ended.set()
                self._generation = self._answer.end()
                raise
            except grpc.RpcError as error:
                if self._ended.is_set():  # closed by another thread, which cancelled this call
                    break
                failure = self._failure_of(error)
                delay = self._delay_after(failure)
                if delay is None:
                    self._ended.set()
                    raise failure from error
            except ProtocolError:
                self.close()
                raise
            self._try_again(delay)
        raise StopIteration

    def _try_again(self, delay: float) -> None:
        if not self._ended.wait(delay):
            self._call = self._start(self._attempts.timeout())
            # closed meanwhile by another thread, which cancelled the call before this one
            if self._ended.is_set():
                self._call.cancel()

    def result(self) -> Generation:
        """Read to the end and return the whole answer, as `generate` does. Raises ProtocolError if the stream
        was closed.
        """
        for _ in self:
            pass
        return self._whole()

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


class AsyncGenerationStream(_Progress, AsyncIterator[StreamEvent]):
    """The events of a running request, for asyncio."""

    def __init__(self, start: AsyncStart, attempts: Attempts) -> None:
        super().__init__(attempts)
        self._start = start
        self._ended = asyncio.Event()
        self._ended.set()  # until there is a call that could be cancelled
        self._call = start(attempts.timeout())
        self._messages = aiter(self._call)
        self._ended.clear()

    async def __anext__(self) -> StreamEvent:
        """Return the next event. Raises the errors of `penstock.client.errors`."""
        while not self._ended.is_set():
            try:
                return self._answer.feed(await anext(self._messages))
            except StopAsyncIteration:
                self._ended.set()
                self._generation = self._answer.end()
                raise
            except grpc.RpcError as error:
                failure = self._failure_of(error)
                delay = self._delay_after(failure)
                if delay is None:
                    self._ended.set()
                    raise failure from error
            except asyncio.CancelledError:
                closed = self._ended.is_set()
                self._ended.set()
                if is_task_cancelled():
                    self._call.cancel()
                    raise
                if closed:  # closed by another task, which cancelled this call
                    break
                raise await cancelled_call(self._call) from None
            except ProtocolError:
                await self.aclose()
                raise
            await self._try_again(delay)
        raise StopAsyncIteration

    async def _try_again(self, delay: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), delay)
            return  # closed meanwhile by another task
        self._call = self._start(self._attempts.timeout())
        self._messages = aiter(self._call)

    async def result(self) -> Generation:
        """Read to the end and return the whole answer, as `generate` does. Raises ProtocolError if the stream
        was closed.
        """
        async for _ in self:
            pass
        return self._whole()

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


def is_task_cancelled() -> bool:
    """Whether this task was cancelled, and not only its call: grpc.aio raises asyncio.CancelledError for
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
