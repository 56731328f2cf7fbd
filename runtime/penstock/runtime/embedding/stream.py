"""A running request as an iterator of deltas, for threads."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Self

from penstock.runtime.chat.messages import ToolCall
from penstock.runtime.embedding.active_ids import EmbeddedEngine
from penstock.runtime.embedding.running import RunningRequest, SinkOf
from penstock.runtime.generation.jobs import Job
from penstock.runtime.generation.preparing import prepare_job
from penstock.runtime.generation.results import Generation, PromptInfo
from penstock.runtime.requests.request import StepOutput
from penstock.runtime.text.assembler import Delta

Item = tuple[int, Sequence[StepOutput]]
"""(index of an output, what a step made of it)."""


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
        """All text of one output so far; the other methods likewise."""
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
        self._request = RunningRequest(engine, prepare_job(engine, job), _sinks(self._inbox))

    def __next__(self) -> Delta:
        """The next delta of any output. Raises the error that the request ended with."""
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
        """Reads to the end and returns the whole, as `Engine.generate` would. RuntimeError where the stream
        was closed before.
        """
        for _ in self:
            pass
        return self._whole()

    def close(self) -> None:
        """Ends the request if it still runs; iteration ends. Any thread may call it, also twice."""
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


def _sinks(inbox: queue.SimpleQueue[Item | None]) -> SinkOf:
    return lambda index: lambda outputs: inbox.put((index, outputs))
