"""Running Stream calls, sync and async: iterators of events that cancel their call if they are closed early.

The call starts with the method that makes the stream, not with the first iteration. Leaving the `with` block,
calling `close()`, or dropping the last reference ends it on the server, too, which frees the request's slot
and pages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Self

from penstock.client.connection.retries import Attempts
from penstock.client.errors import ProtocolError
from penstock.client.replies.accumulate import Accumulator
from penstock.client.replies.receiving import AsyncReceiver, AsyncStart, Receiver, Start
from penstock.client.values.chat_values import ToolCall
from penstock.client.values.results import Generation, StreamEvent
from penstock.v1 import inference_pb2


class _Progress:
    """The answer so far, for both kinds of streams."""

    def __init__(self) -> None:
        self._answer = Accumulator()
        self._generation: Generation | None = None
        self._is_finished = False

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

    def _finish(self) -> None:
        """Make the whole answer, once the server has sent all. Raises ProtocolError if that was not all."""
        if not self._is_finished:
            self._is_finished = True
            self._generation = self._answer.end()

    def _whole(self) -> Generation:
        if self._generation is None:
            raise ProtocolError.local("the stream was closed before its end")
        return self._generation


class GenerationStream(_Progress, Iterator[StreamEvent]):
    """The events of a running request."""

    def __init__(self, start: Start[inference_pb2.StreamResponse], attempts: Attempts) -> None:
        super().__init__()
        self._messages = Receiver(start, attempts)

    def __next__(self) -> StreamEvent:
        """Return the next event. Raises the errors of `penstock.client.errors`."""
        try:
            return self._answer.feed(next(self._messages))
        except StopIteration:
            if self._messages.is_complete:
                self._finish()
            raise
        except ProtocolError:
            self.close()
            raise

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
        self._messages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGenerationStream(_Progress, AsyncIterator[StreamEvent]):
    """The events of a running request, for asyncio."""

    def __init__(self, start: AsyncStart[inference_pb2.StreamResponse], attempts: Attempts) -> None:
        super().__init__()
        self._messages = AsyncReceiver(start, attempts)

    async def __anext__(self) -> StreamEvent:
        """Return the next event. Raises the errors of `penstock.client.errors`."""
        try:
            return self._answer.feed(await anext(self._messages))
        except StopAsyncIteration:
            if self._messages.is_complete:
                self._finish()
            raise
        except ProtocolError:
            await self.aclose()
            raise

    async def result(self) -> Generation:
        """Read to the end and return the whole answer, as `generate` does. Raises ProtocolError if the stream
        was closed.
        """
        async for _ in self:
            pass
        return self._whole()

    async def aclose(self) -> None:
        """Cancel the call if it still runs, and end the iteration."""
        self._messages.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
