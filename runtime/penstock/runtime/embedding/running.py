"""A request whose outputs the engine is generating, and all that they have so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.chat.messages import ToolCall
from penstock.runtime.embedding.active_ids import EmbeddedEngine
from penstock.runtime.generation.live_output import LiveOutput
from penstock.runtime.generation.preparing import PreparedJob, assembler_of
from penstock.runtime.generation.results import (
    Generation,
    Output,
    PromptInfo,
    Timing,
    Usage,
    merged_timing,
)
from penstock.runtime.loop.interface import Sink
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
        """Appends a delta."""
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
        """All of it, once it has ended."""
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
        """Submits every output. The sinks must hold no reference to this object, so that it is freed when
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
        """What a step added to one output; None where that is nothing. An error of one output ends them all,
        and is raised.
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
        """Nobody reads any more: whatever still runs is cancelled, and the id may be used again. May be
        called twice.
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
        """What one output has. IndexError where there is none of that index."""
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
        """All of the request, once every output has ended."""
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
            ),
            timing=Timing.of(timing),
        )


def _says_something(delta: Delta) -> bool:
    return bool(
        delta.delta or delta.token_ids or delta.reasoning or delta.tool_calls or delta.finish is not None
    )
