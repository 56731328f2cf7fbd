"""A running request as an async iterator of deltas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Self

from penstock.runtime.embedding.active_ids import EmbeddedEngine
from penstock.runtime.embedding.running import RunningRequest, SinkOf
from penstock.runtime.embedding.stream import Progress
from penstock.runtime.generation.jobs import Job
from penstock.runtime.generation.preparing import prepare_job
from penstock.runtime.generation.results import Generation
from penstock.runtime.generation.switchboard import Switchboard
from penstock.runtime.loop.interface import Sink
from penstock.runtime.requests.request import StepOutput
from penstock.runtime.text.assembler import Delta

Key = tuple[int, int]
"""(number of a request, index of its output)."""


class Inbox:
    """What the engine's steps made and nobody has taken in yet, on one event loop."""

    def __init__(self) -> None:
        self._items: deque[tuple[Key, StepOutput]] = deque()
        self._changed = asyncio.Event()

    def put(self, key: Key, output: StepOutput) -> None:
        """Adds what a step made of the output that `key` names."""
        self._items.append((key, output))
        self._changed.set()

    def wake(self) -> None:
        """Whoever waits looks again whether there is anything to wait for."""
        self._changed.set()

    async def wait(self) -> None:
        """Until there is an item, or `wake` was called."""
        await self._changed.wait()
        self._changed.clear()

    def take(self) -> tuple[Key, StepOutput] | None:
        """The oldest item, if there is one."""
        return self._items.popleft() if self._items else None


class _Slot:
    """Receives one output for an inbox."""

    def __init__(self, inbox: Inbox, key: Key) -> None:
        self._inbox = inbox
        self._key = key

    def deliver(self, output: StepOutput) -> None:
        self._inbox.put(self._key, output)


def sinks(switchboard: Switchboard, inbox: Inbox, number: int = 0) -> SinkOf:
    """Sinks that bring the outputs of the request of a number to the inbox."""

    def sink_of(index: int) -> Sink:
        slot = _Slot(inbox, (number, index))
        return lambda outputs: switchboard.post(slot, outputs)

    return sink_of


class AsyncGenerationStream(Progress, AsyncIterator[Delta]):
    """The deltas of a request, as its outputs are generated; the last delta of each output has `finish`.

    The request begins with the first `anext`, or with `async with`. Leaving the block, `aclose`, or dropping
    the last reference ends it and frees its slot and pages.
    """

    def __init__(self, engine: EmbeddedEngine, switchboard: Switchboard, job: Job) -> None:
        self._engine = engine
        self._switchboard = switchboard
        self._job = job
        self._inbox = Inbox()
        self._deltas: deque[Delta] = deque()
        self._closed = False

    async def _begin(self) -> RunningRequest | None:
        """Tokenizes the prompt on another thread and submits the request, unless that was done. None where
        the stream was closed meanwhile.
        """
        if self._request is None:
            prepared = await asyncio.to_thread(prepare_job, self._engine, self._job)
            if self._closed:
                return None
            if self._request is None:
                self._request = RunningRequest(self._engine, prepared, sinks(self._switchboard, self._inbox))
        return self._request

    async def __anext__(self) -> Delta:
        """The next delta of any output. Raises what is refused, or the error that the request ended with."""
        while not self._deltas:
            request = None if self._closed else await self._begin()
            if request is None:
                raise StopAsyncIteration
            item = self._inbox.take()
            if item is not None:
                (_, index), output = item
                self._take(request, index, output)
            elif request.num_unread:
                await self._inbox.wait()
            else:
                raise StopAsyncIteration
        return self._deltas.popleft()

    def _take(self, request: RunningRequest, index: int, output: StepOutput) -> None:
        try:
            delta = request.take(index, output)
        except BaseException:  # raised on: the stream gives nothing after it
            self._closed = True
            raise
        if delta is not None:
            self._deltas.append(delta)

    async def result(self) -> Generation:
        """Reads to the end and returns the whole, as `AsyncEngine.generate` would. RuntimeError where the
        stream was closed before.
        """
        async for _ in self:
            pass
        return self._whole()

    async def aclose(self) -> None:
        """Ends the request if it still runs; iteration ends."""
        self._closed = True
        if self._request is not None:
            self._request.leave()
        self._inbox.wake()

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._request is not None:
            self._request.leave()
