"""Running Stream calls, sync and async: iterators of events that cancel their call if they are closed early.

The call starts with the method that makes the stream, not with the first iteration. Leaving the `with` block,
calling `close()`, or dropping the last reference ends it on the server, too, which frees the request's slot
and pages.

The messages of a stream are folded into events, and at the end into the value that `generate` would return,
which checks the order that the contract promises: started; for each output deltas and then finished; summary;
end. Any other order raises ProtocolError, so that a caller never takes half an answer for a whole one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Self

from penstock.client.connection.channel import Attempts
from penstock.client.errors import ProtocolError
from penstock.client.generation import messages
from penstock.client.generation.receiving import AsyncReceiver, AsyncStart, Receiver, Start
from penstock.client.values.chat_values import ToolCall
from penstock.client.values.results import (
    Delta,
    Finish,
    Finished,
    Generation,
    HiddenStates,
    Logprobs,
    Output,
    Started,
    StreamEvent,
    Summary,
    ToolCallDelta,
    WeightsSpan,
    WeightsVersion,
)
from penstock.v1 import inference_pb2


@dataclass(slots=True)
class OutputSoFar:
    """What one output has so far."""

    weights: list[WeightsSpan]
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    has_logprobs: bool = False
    thoughts: list[str] = field(default_factory=list)
    whole_calls: list[ToolCall] = field(default_factory=list)
    calls_in_pieces: list[list[ToolCallDelta]] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    state_size: int | None = None
    finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """All calls, of which the last may still grow if they come in pieces."""
        grown = [
            ToolCall(pieces[0].id, pieces[0].name, "".join(piece.arguments_json for piece in pieces))
            for pieces in self.calls_in_pieces
        ]
        return (*self.whole_calls, *grown)

    def add(self, delta: Delta) -> None:
        if delta.delta:
            self.pieces.append(delta.delta)
        if delta.reasoning:
            self.thoughts.append(delta.reasoning)
        if delta.weights is not None:
            if not self.token_ids:
                self.weights.clear()
            self.weights.append(WeightsSpan(len(self.token_ids), delta.weights))
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.has_logprobs = True
            self.sampled.extend(delta.logprobs.sampled)
            self.top.extend(delta.logprobs.top)
        self.whole_calls.extend(delta.tool_calls)
        for piece in delta.tool_call_deltas:
            if piece.index == len(self.calls_in_pieces):
                self.calls_in_pieces.append([])
            elif piece.index != len(self.calls_in_pieces) - 1:
                raise ProtocolError.local(f"the server sent a piece of call {piece.index} out of order")
            self.calls_in_pieces[-1].append(piece)
        if delta.hidden_states is not None:
            self.state_size = delta.hidden_states.size
            self.states.append(delta.hidden_states.values)

    def output(self, index: int, finish: Finish) -> Output:
        return Output(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish=finish,
            logprobs=Logprobs(tuple(self.sampled), tuple(self.top)) if self.has_logprobs else None,
            weights=tuple(self.weights),
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            hidden_states=None
            if self.state_size is None
            else HiddenStates(self.state_size, b"".join(self.states)),
        )


class Accumulator:
    """The state of one stream. Call `feed` with each message, then `end` when the call has ended with OK."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._summary: Summary | None = None
        self._weights = WeightsVersion("", 0)
        self._outputs: dict[int, OutputSoFar] = {}

    def feed(self, message: inference_pb2.StreamResponse) -> StreamEvent:
        """Return the event of one message. Raises ProtocolError if the message may not come now."""
        kind = message.WhichOneof("event")
        if self._summary is not None:
            raise ProtocolError.local(f"the server sent {kind or 'an unknown event'} after the summary")
        if (self._started is None) != (kind == "started"):
            when = "before started" if self._started is None else "twice"
            raise ProtocolError.local(f"the server sent {kind or 'an unknown event'} {when}")
        match kind:
            case "started":
                return self._start(message.started)
            case "delta":
                return self._add(message.delta)
            case "finished":
                return self._finish(message.finished)
            case "summary":
                return self._summarize(message.summary)
            case _:
                raise ProtocolError.local("the server sent an event that this client does not know")

    def end(self) -> Generation:
        """Return the whole answer. Raises ProtocolError if the call ended before its summary."""
        if self._started is None or self._summary is None:
            raise ProtocolError.local("the server ended the stream before its summary")
        return Generation(
            request_id=self._started.request_id,
            model=self._started.model,
            prompt=self._started.prompt,
            outputs=tuple(
                so_far.output(index, so_far.finish)
                for index, so_far in sorted(self._outputs.items())
                if so_far.finish is not None
            ),
            usage=self._summary.usage,
            timing=self._summary.timing,
        )

    def so_far(self, index: int) -> OutputSoFar:
        """Return what output `index` has so far; empty before its first delta."""
        return self._outputs.get(index) or OutputSoFar([WeightsSpan(0, self._weights)])

    @property
    def started(self) -> Started | None:
        return self._started

    def _start(self, message: inference_pb2.StreamStarted) -> Started:
        self._weights = messages.weights_version(message.weights)
        self._started = Started(
            request_id=message.request_id,
            model=message.model,
            prompt=messages.prompt_info(message.prompt),
            weights=self._weights,
            paused=message.paused,
        )
        return self._started

    def _open(self, index: int, kind: str) -> OutputSoFar:
        so_far = self._outputs.setdefault(index, OutputSoFar([WeightsSpan(0, self._weights)]))
        if so_far.finish is not None:
            raise ProtocolError.local(f"the server sent {kind} for output {index}, which had finished")
        return so_far

    def _add(self, message: inference_pb2.OutputDelta) -> Delta:
        so_far = self._open(message.index, "delta")
        delta = Delta(
            index=message.index,
            delta=message.text,
            token_ids=tuple(message.token_ids),
            logprobs=messages.logprobs(message.logprobs) if message.HasField("logprobs") else None,
            weights=messages.weights_version(message.weights) if message.HasField("weights") else None,
            reasoning=message.reasoning,
            tool_calls=tuple(messages.tool_call(call) for call in message.tool_calls),
            hidden_states=messages.hidden_states(message),
            tool_call_deltas=tuple(map(messages.tool_call_delta, message.tool_call_deltas)),
        )
        so_far.add(delta)
        return delta

    def _finish(self, message: inference_pb2.OutputFinished) -> Finished:
        so_far = self._open(message.index, "finished")
        so_far.finish = messages.finish(message.finish)
        return Finished(message.index, so_far.finish, so_far.text)

    def _summarize(self, message: inference_pb2.StreamSummary) -> Summary:
        if not self._outputs or any(o.finish is None for o in self._outputs.values()):
            raise ProtocolError.local("the server sent summary before every output had finished")
        messages.check_indices(sorted(self._outputs))
        self._summary = Summary(messages.usage(message.usage), messages.timing(message.timing))
        return self._summary


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
        """Return all text of output `index` so far; `reasoning`, `token_ids` and `tool_calls` work alike."""
        return self._answer.so_far(index).text

    def reasoning(self, index: int = 0) -> str:
        """Return all reasoning of output `index` received so far."""
        return self._answer.so_far(index).reasoning

    def token_ids(self, index: int = 0) -> tuple[int, ...]:
        """Return all token ids of output `index` received so far."""
        return tuple(self._answer.so_far(index).token_ids)

    def tool_calls(self, index: int = 0) -> tuple[ToolCall, ...]:
        """Return all calls of output `index` received so far; the last may still grow if they come in
        pieces.
        """
        return self._answer.so_far(index).tool_calls

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
