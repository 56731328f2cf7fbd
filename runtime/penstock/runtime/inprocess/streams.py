"""A running request as an iterator of deltas, for threads and for an event loop.

`GenerationStream` is the iterator for threads, and `AsyncGenerationStream` the one for an event loop. Behind
both is a `RunningRequest`: a request whose outputs the engine is generating, and all that they have so far.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.chat.messages import ToolCall
from penstock.runtime.inprocess.active_ids import EmbeddedEngine
from penstock.runtime.loop.interface import Sink
from penstock.runtime.prompting.jobs import Job, PreparedJob, assembler_of, prepare_job
from penstock.runtime.prompting.outputs import LiveOutput, Switchboard
from penstock.runtime.prompting.results import (
    Generation,
    Output,
    PromptInfo,
    Timing,
    Usage,
    merged_timing,
)
from penstock.runtime.requests.request import Finish, RequestTiming, StepOutput, TokenLogprobs
from penstock.runtime.text.assembler import Delta

SinkOf = Callable[[int], Sink]
"""Makes the sink for the output of an index. A sink is called on the engine's thread, and must not block."""


@dataclass(slots=True)
class OutputSoFar:
    """What one output has. It grows as deltas arrive."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden: list[NDArray[np.float32]] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning_tokens: int = 0
    weights: list[tuple[int, int]] = field(default_factory=list)
    finish: Finish | None = None
    timing: RequestTiming | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        if delta.token_ids and (not self.weights or self.weights[-1][1] != delta.weights_generation):
            self.weights.append((len(self.token_ids), delta.weights_generation))
        if delta.delta:
            self.pieces.append(delta.delta)
        if delta.reasoning:
            self.thoughts.append(delta.reasoning)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.hidden is not None:
            self.hidden.append(delta.hidden)
        self.tool_calls += delta.tool_calls
        self.reasoning_tokens += delta.reasoning_tokens
        self.finish, self.timing = delta.finish, delta.timing

    def whole(self, index: int, *, has_logprobs: bool) -> Output:
        """Return all of it, once it has ended."""
        assert self.finish is not None, "an output that has not ended is not whole"
        assert self.timing is not None, "an end has its timing"
        return Output(
            index=index,
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish=self.finish,
            timing=Timing.of(self.timing),
            logprobs=tuple(self.logprobs) if has_logprobs else None,
            hidden_states=np.concatenate(self.hidden) if self.hidden else None,
            reasoning="".join(self.thoughts),
            tool_calls=tuple(self.tool_calls),
            weights=tuple(self.weights),
        )


class RunningRequest:
    """A request in the engine. It is used by one thread at a time; only `leave` may be called on any."""

    def __init__(self, engine: EmbeddedEngine, prepared: PreparedJob, sink_of: SinkOf) -> None:
        """Submit every output. The sinks must hold no reference to this object, so that it is freed when
        nobody reads it. Raises what `submit` refuses; then nothing runs.
        """
        self.request_id = prepared.job.request_id
        self._engine = engine
        self._job = prepared.job
        self._prompt = prepared.prompt
        self._image_tokens = sum(item.num_tokens for item in prepared.requests[0].media)
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._outputs = [OutputSoFar() for _ in prepared.requests]
        self._live: list[LiveOutput] = []
        self._unread = len(prepared.requests)
        engine.active_ids.take(self.request_id)
        self._to_leave = deque([None])
        try:
            pairs = zip(prepared.requests, prepared.shared, strict=True)
            for index, (request, shared) in enumerate(pairs):
                assembler = assembler_of(self._job, request, index, prepared.text, engine.text, engine.forms)
                engine.submit(request, sink_of(index), shared)
                # Only what was submitted here is listed, and so ended by `leave`.
                self._live.append(LiveOutput(engine, request.request_id, assembler))
        except BaseException:  # raised on: what was submitted before must not run for nobody
            self.leave()
            raise

    @property
    def num_unread(self) -> int:
        """How many outputs have not ended yet, as far as was read."""
        return self._unread

    def take(self, index: int, output: StepOutput) -> Delta | None:
        """Return what a step added to one output; None where that is nothing. An error of one output ends
        them all, and is raised.
        """
        try:
            delta = self._live[index].add(output)
        except BaseException:  # raised on: the other outputs must not run for nobody
            self.leave()
            raise
        if delta.prompt_logprobs:
            self._prompt_logprobs = delta.prompt_logprobs
        self._outputs[index].add(delta)
        if delta.finish is not None:
            self._unread -= 1
            if not self._unread:
                self.leave()
        return delta if _says_something(delta) else None

    def leave(self) -> None:
        """Stop reading: whatever still runs is cancelled, and the id may be used again. May be called
        twice.
        """
        try:
            self._to_leave.pop()  # by one thread only, without a lock
        except IndexError:
            return
        running = [live.request_id for live in self._live if not live.has_ended]
        if running:
            self._engine.cancel(*running)  # before the id is free, or the next request would be cancelled
        self._engine.active_ids.release(self.request_id)

    def so_far(self, index: int) -> OutputSoFar:
        """Return what one output has. IndexError where there is none of that index."""
        return self._outputs[index]

    @property
    def prompt(self) -> PromptInfo:
        """The prompt as the model sees it. Its log-probabilities come with the first delta of output 0."""
        return PromptInfo(
            token_ids=self._prompt.token_ids,
            truncated_tokens=self._prompt.num_truncated,
            logprobs=self._prompt_logprobs,
        )

    def generation(self) -> Generation:
        """Return all of the request, once every output has ended."""
        times = [so_far.timing for so_far in self._outputs if so_far.timing is not None]
        timing = merged_timing(times)
        assert timing is not None, "every output has ended"
        has_logprobs = self._job.logprobs is not None
        return Generation(
            request_id=self.request_id,
            model=self._engine.info.name,
            prompt=self.prompt,
            outputs=tuple(o.whole(i, has_logprobs=has_logprobs) for i, o in enumerate(self._outputs)),
            usage=Usage(
                prompt_tokens=len(self._prompt.token_ids),
                cached_prompt_tokens=timing.cached_prompt_tokens,
                completion_tokens=sum(len(o.token_ids) for o in self._outputs),
                reasoning_tokens=sum(o.reasoning_tokens for o in self._outputs),
                image_tokens=self._image_tokens,
                proposed_tokens=timing.proposed_tokens,
                accepted_tokens=timing.accepted_tokens,
            ),
            timing=Timing.of(timing),
        )


def _says_something(delta: Delta) -> bool:
    return bool(
        delta.delta
        or delta.token_ids
        or delta.reasoning
        or delta.tool_call_deltas
        or delta.finish is not None
    )


class Progress:
    """What a stream knows of its request so far."""

    _request: RunningRequest | None = None

    @property
    def request_id(self) -> str:
        """The request's id, for `Engine.abort`."""
        return self._begun().request_id

    @property
    def prompt(self) -> PromptInfo:
        """The prompt as the model sees it; its log-probabilities, if asked for, come with the first delta."""
        return self._begun().prompt

    def text(self, index: int = 0) -> str:
        """Return all text of one output so far; the other methods likewise."""
        return "".join(self._begun().so_far(index).pieces)

    def reasoning(self, index: int = 0) -> str:
        return "".join(self._begun().so_far(index).thoughts)

    def token_ids(self, index: int = 0) -> tuple[int, ...]:
        return tuple(self._begun().so_far(index).token_ids)

    def tool_calls(self, index: int = 0) -> tuple[ToolCall, ...]:
        return tuple(self._begun().so_far(index).tool_calls)

    def _begun(self) -> RunningRequest:
        if self._request is None:
            raise RuntimeError("the stream has not begun: use it with `async with`, or iterate over it")
        return self._request

    def _whole(self) -> Generation:
        request = self._begun()
        if request.num_unread:
            raise RuntimeError("the stream was closed before its end")
        return request.generation()


Item = tuple[int, Sequence[StepOutput]]
"""(index of an output, what a step made of it)."""


class GenerationStream(Progress, Iterator[Delta]):
    """The deltas of a request, as its outputs are generated; the last delta of each output has `finish`.

    The request runs from the moment when the stream is made. Leaving the `with` block, `close`, or dropping
    the last reference ends it and frees its slot and pages.
    """

    def __init__(self, engine: EmbeddedEngine, job: Job) -> None:
        """Tokenizes the prompt and submits the request. Raises what is refused."""
        self._inbox: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._deltas: deque[Delta] = deque()
        self._closed = False
        self._request = RunningRequest(engine, prepare_job(engine, job), _queue_sinks(self._inbox))

    def __next__(self) -> Delta:
        """Return the next delta of any output. Raises the error that the request ended with."""
        while not self._deltas:
            if self._closed or not self._begun().num_unread:
                raise StopIteration
            self._take(self._inbox.get())
        return self._deltas.popleft()

    def _take(self, item: Item | None) -> None:
        if item is None:  # closed by another thread
            return
        index, outputs = item
        try:
            for output in outputs:
                delta = self._begun().take(index, output)
                if delta is not None:
                    self._deltas.append(delta)
        except BaseException:  # raised on: the stream gives nothing after it
            self._closed = True
            raise

    def result(self) -> Generation:
        """Read to the end and return the whole, as `Engine.generate` would. RuntimeError where the stream
        was closed before.
        """
        for _ in self:
            pass
        return self._whole()

    def close(self) -> None:
        """End the request if it still runs; iteration ends. Any thread may call it, also twice."""
        self._closed = True
        self._begun().leave()
        self._inbox.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._request is not None:  # else it was refused
            self._request.leave()


def _queue_sinks(inbox: queue.SimpleQueue[Item | None]) -> SinkOf:
    return lambda index: lambda outputs: inbox.put((index, outputs))


Key = tuple[int, int]
"""(number of a request, index of its output)."""


class Inbox:
    """What the engine's steps made and nobody has taken in yet, on one event loop."""

    def __init__(self) -> None:
        self._items: deque[tuple[Key, StepOutput]] = deque()
        self._changed = asyncio.Event()

    def put(self, key: Key, output: StepOutput) -> None:
        """Add what a step made of the output that `key` names."""
        self._items.append((key, output))
        self._changed.set()

    def wake(self) -> None:
        """Let whoever waits look again whether there is anything to wait for."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait until there is an item, or `wake` was called."""
        await self._changed.wait()
        self._changed.clear()

    def take(self) -> tuple[Key, StepOutput] | None:
        """Take the oldest item, if there is one."""
        return self._items.popleft() if self._items else None


class _Slot:
    """Receives one output for an inbox."""

    def __init__(self, inbox: Inbox, key: Key) -> None:
        self._inbox = inbox
        self._key = key

    def deliver(self, output: StepOutput) -> None:
        self._inbox.put(self._key, output)


def sinks(switchboard: Switchboard, inbox: Inbox, number: int = 0) -> SinkOf:
    """Yield sinks that bring the outputs of the request of a number to the inbox."""

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
        """Tokenize the prompt on another thread and submit the request, unless that was done. Return None
        where the stream was closed meanwhile.
        """
        if self._request is None:
            prepared = await asyncio.to_thread(prepare_job, self._engine, self._job)
            if self._closed:
                return None
            if self._request is None:
                self._request = RunningRequest(self._engine, prepared, sinks(self._switchboard, self._inbox))
        return self._request

    async def __anext__(self) -> Delta:
        """Return the next delta of any output. Raises what is refused, or the error that the request ended
        with.
        """
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
        """Read to the end and return the whole, as `AsyncEngine.generate` would. RuntimeError where the
        stream was closed before.
        """
        async for _ in self:
            pass
        return self._whole()

    async def aclose(self) -> None:
        """End the request if it still runs; iteration ends."""
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
