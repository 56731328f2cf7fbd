"""Carries what outputs generate from the engine's thread to their readers, in three stages.

A `Buffer` takes it from the engine: one wake-up of the event loop per step, one buffer per output. The engine
calls each output's sink in turn. A sink only appends to the switchboard's queue, and the first one of a step
wakes the loop. So a step costs one `call_soon_threadsafe`, however many requests it serves. Each output has
its own sink, instead of one sink that looks up ids: an id may be used again while outputs of its former,
cancelled user are still on their way, and these must not reach the new one.

On the loop an output becomes a delta at once (text, stop strings), whether or not it is read. So a stop
string ends the request in the engine without waiting for a slow reader. `Pending` merges deltas into few, in
the wire's form. Log-probabilities are encoded when they come, one step's at a time. So what waits takes about
as much memory as its message will have bytes, a twentieth of what it takes as Python objects; no large amount
must be encoded at once when a slow reader comes; and the size of the message is known.

The `RequestReader` of a request takes what its outputs generated, in turn. A reader that stalls for too long
is given up, and its request ends in the engine, which frees the pages. The RPC of such a reader may still be
blocked in sending; `rpcs.ending` ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.chat.messages import ToolCall, ToolCallDelta
from penstock.runtime.prompting.outputs import LiveOutput, Switchboard
from penstock.runtime.requests.request import (
    Finish,
    PreparedPrompt,
    Request,
    RequestTiming,
    StepOutput,
    TokenLogprobs,
)
from penstock.runtime.text.assembler import Assembler, Delta
from penstock.service.access.ownership import told_id
from penstock.service.backend import Backend
from penstock.service.errors import StalledReader
from penstock.service.replies.reply_budget import ReplyBudget, logprobs_bytes

log = logging.getLogger(__name__)

Encode = Callable[[Sequence[TokenLogprobs]], bytes]
"""Serializes log-probabilities to a `Logprobs` message. Messages of consecutive tokens may be joined as
bytes.
"""
MAX_DELTA_BYTES = 1024 * 1024
"""About the largest size of a merged delta: gRPC's clients refuse messages above 4 MiB by default."""
_TOKEN_BYTES = 3
"""Bytes of a token id on the wire, below 2^21."""
_CALL_BYTES = 16
"""Bytes of the field headers of a tool call, or of a piece of one."""


class Taken(NamedTuple):
    """A merged delta that a reader takes. The last one of an output has `finish` and `timing`. It is a named
    tuple because that is cheap to make.
    """

    text: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    token_ids: Sequence[int]
    logprobs: bytes
    """A serialized `Logprobs`; empty if the request asked for none."""
    weights_generation: int
    """The generation of the weights that generated the tokens."""
    finish: Finish | None
    timing: RequestTiming | None
    prompt_logprobs: tuple[TokenLogprobs, ...]
    num_bytes: int
    """About the size of the message."""
    hidden: bytes = b""
    """The hidden states of the tokens, or the pooled one, float32 with the lowest byte first; empty if the
    request asked for none."""
    num_merged: int = 0
    """How many further deltas were merged with the first."""
    tool_call_deltas: Sequence[ToolCallDelta] = ()
    """Pieces of calls, if the request asked for them; then there are no `tool_calls`."""


class _Joined:
    """The text, ids and log-probabilities of several deltas, packed."""

    __slots__ = ("call_deltas", "hidden", "ids", "logprobs", "reasoning", "text")

    def __init__(self, first: _Merged) -> None:
        self.ids = array("I", first.token_ids)
        self.logprobs = bytearray(first.logprobs)
        self.hidden = bytearray(first.hidden)
        self.text, self.reasoning = io.StringIO(), io.StringIO()
        self.text.write(first.text)
        self.reasoning.write(first.reasoning)
        self.call_deltas = list(first.call_deltas)


class _Merged:
    """Deltas that the same weights generated, merged into one. Where the reader keeps up there is only one
    delta, and nothing is packed.
    """

    __slots__ = (
        "_calls", "_finish", "_joined", "_num_merged", "_prompt_logprobs", "_timing", "call_deltas", "hidden",
        "logprobs", "num_bytes", "num_tokens", "reasoning", "text", "token_ids", "weights_generation",
    )  # fmt: skip

    def __init__(self, delta: Delta, logprobs: bytes, num_bytes: int) -> None:
        self.weights_generation = delta.weights_generation
        self.num_bytes = num_bytes
        self.num_tokens = len(delta.token_ids)
        self.text, self.reasoning, self.token_ids = delta.delta, delta.reasoning, delta.token_ids
        """Those of the first delta."""
        self.logprobs = logprobs
        self.hidden = b"" if delta.hidden is None else hidden_bytes(delta.hidden)
        self._calls = delta.tool_calls
        self.call_deltas: Sequence[ToolCallDelta] = delta.tool_call_deltas
        self._prompt_logprobs = delta.prompt_logprobs
        self._finish, self._timing = delta.finish, delta.timing
        self._joined: _Joined | None = None
        """Those of all deltas, if there are several."""
        self._num_merged = 0

    @property
    def is_last(self) -> bool:
        return self._finish is not None

    def add(self, delta: Delta, logprobs: bytes, num_bytes: int) -> None:
        joined = self._joined
        if joined is None:
            joined = self._joined = _Joined(self)
        self._num_merged += 1
        joined.ids.extend(delta.token_ids)
        joined.logprobs += logprobs
        if delta.hidden is not None:
            joined.hidden += hidden_bytes(delta.hidden)
        joined.text.write(delta.delta)
        joined.reasoning.write(delta.reasoning)
        self._calls += delta.tool_calls
        if delta.tool_call_deltas:
            joined.call_deltas.extend(delta.tool_call_deltas)
        self._prompt_logprobs += delta.prompt_logprobs
        self._finish, self._timing = delta.finish, delta.timing
        self.num_bytes += num_bytes
        self.num_tokens += len(delta.token_ids)

    def taken(self) -> Taken:
        text, reasoning, logprobs, hidden = self.text, self.reasoning, self.logprobs, self.hidden
        ids: Sequence[int] = self.token_ids
        call_deltas = self.call_deltas
        if (joined := self._joined) is not None:
            text, reasoning, ids = joined.text.getvalue(), joined.reasoning.getvalue(), joined.ids
            logprobs, hidden = bytes(joined.logprobs), bytes(joined.hidden)
            call_deltas = _joined_calls(joined.call_deltas)
        return Taken(
            text,
            reasoning,
            self._calls,
            ids,
            logprobs,
            self.weights_generation,
            self._finish,
            self._timing,
            self._prompt_logprobs,
            self.num_bytes,
            hidden,
            self._num_merged,
            call_deltas,
        )


def _joined_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Make one delta for each call that these add to. They are in the order of the calls."""
    joined = []
    for _, of_call in groupby(deltas, key=lambda delta: delta.index):
        pieces = list(of_call)
        arguments = "".join(piece.arguments_json for piece in pieces)
        joined.append(dataclasses.replace(pieces[0], arguments_json=arguments))
    return joined


class Pending:
    """The merged deltas of one output. A new one begins after MAX_DELTA_BYTES, and with new weights."""

    def __init__(self, encode: Encode | None = None, *, calls_in_pieces: bool = False) -> None:
        """`encode` is None if no log-probabilities are sent. `calls_in_pieces`: pieces of calls are sent as
        they are made, and no whole calls.
        """
        self._encode = encode
        self._calls_in_pieces = calls_in_pieces
        self._merged: deque[_Merged] = deque()

    def __bool__(self) -> bool:
        return bool(self._merged)

    def has(self, min_tokens: int) -> bool:
        """Say whether there is a delta of at least `min_tokens` tokens, or one that nothing more can be
        merged into.
        """
        merged = self._merged
        if not merged:
            return False
        return merged[0].num_tokens >= min_tokens or merged[0].is_last or len(merged) > 1

    def add(self, delta: Delta) -> int:
        """Add a delta. Returns about how many bytes it adds to messages.

        The prompt's log-probabilities are included, but not in `Taken.num_bytes`: a stream sends them in its
        first message, not in a delta.
        """
        if delta.tool_calls or delta.tool_call_deltas:
            if self._calls_in_pieces:
                delta = dataclasses.replace(delta, tool_calls=())
            else:
                delta = dataclasses.replace(delta, tool_call_deltas=())
        if not (
            delta.token_ids
            or delta.delta
            or delta.reasoning
            or delta.tool_calls
            or delta.tool_call_deltas
            or delta.finish is not None
        ):
            return 0
        logprobs = self._encode(delta.logprobs) if self._encode is not None and delta.logprobs else b""
        size = len(logprobs) + _TOKEN_BYTES * len(delta.token_ids)
        if delta.hidden is not None:
            size += delta.hidden.nbytes
        for text in (delta.delta, delta.reasoning):
            if text:
                size += _text_bytes(text)
        calls: Iterable[ToolCall | ToolCallDelta] = chain(delta.tool_calls, delta.tool_call_deltas)
        for call in calls:
            size += _CALL_BYTES + sum(map(_text_bytes, (call.id, call.name, call.arguments_json)))
        if not self._merged or self._ends(self._merged[-1], delta, size):
            self._merged.append(_Merged(delta, logprobs, size))
        else:
            self._merged[-1].add(delta, logprobs, size)
        return size + prompt_bytes(delta.prompt_logprobs)

    @staticmethod
    def _ends(last: _Merged, delta: Delta, size: int) -> bool:
        """Say whether `delta` must begin a new merged delta."""
        if delta.token_ids and last.weights_generation != delta.weights_generation:
            return True
        return last.num_bytes + size > MAX_DELTA_BYTES and last.num_bytes > 0

    def pop(self, min_tokens: int) -> Taken | None:
        """Remove and return the oldest merged delta, if `has` finds one."""
        return self._merged.popleft().taken() if self.has(min_tokens) else None

    def clear(self) -> None:
        """Drop everything, because nobody wants it any more."""
        self._merged.clear()


def hidden_bytes(states: NDArray[np.float32]) -> bytes:
    """Write hidden states as they are sent: each number with its lowest byte first."""
    return states.astype("<f4", copy=False).tobytes()


def prompt_bytes(values: Sequence[TokenLogprobs]) -> int:
    """Estimate the size of a prompt's log-probabilities on the wire. All entries have equally many
    candidates.
    """
    return logprobs_bytes(len(values), len(values[-1].top)) if values else 0


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class ServerSwitchboard(Switchboard):
    """The switchboard of a server, which also knows which buffer has which id in the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.holders: dict[str, Buffer] = {}
        """Maps a request id to the buffer that currently owns it. Ids can be reused; this keeps a late cancel
        of the old request from hitting the new one.
        """


class Reader(Protocol):
    """What takes the outputs of a request, as its buffers see it."""

    def noticed(self, num_bytes: int, *, can_take: bool) -> None:
        """Note that about `num_bytes` bytes more wait, and whether they are enough to be taken."""
        ...


class Buffer:
    """What one output has generated and its reader has not taken yet."""

    def __init__(
        self,
        engine: Backend,
        switchboard: ServerSwitchboard,
        request_id: str,
        assembler: Assembler,
        reader: Reader,
        *,
        encode: Encode | None = None,
        min_tokens: int = 1,
        calls_in_pieces: bool = False,
        made: Callable[[int, int], None] = lambda tokens, reasoning: None,
    ) -> None:
        """`request_id` is the engine's id of this output. `encode` and `calls_in_pieces` are as for
        `Pending`. `made` is told how many tokens came, and how many are known to be reasoning, whether or not
        they are read.
        """
        self._engine = engine
        self._switchboard = switchboard
        self._request_id = request_id
        self._live = LiveOutput(engine, request_id, assembler, holds_id=self._holds_id)
        self._reader = reader
        self._min_tokens = min_tokens
        self._made = made
        self._pending = Pending(encode, calls_in_pieces=calls_in_pieces)
        self._error: BaseException | None = None
        self._ended = False
        """Whether the engine has sent the last output, or no more outputs are wanted."""
        self.sink: Callable[[Sequence[StepOutput]], None] = lambda outputs: switchboard.post(self, outputs)

    def submit(self, request: Request, prepared: PreparedPrompt | None = None) -> None:
        """Queue the request in the engine. Raises what the engine refuses."""
        self._engine.submit(request, self.sink, prepared)
        self._switchboard.holders[self._request_id] = self

    def _holds_id(self) -> bool:
        return self._switchboard.holders.get(self._request_id) is self

    def deliver(self, output: StepOutput) -> None:
        """Take in one output, on the event loop. An error here ends this request only."""
        if self._ended:
            return
        try:
            delta = self._live.add(output)
            self._made(len(delta.token_ids), delta.reasoning_tokens)
            size = self._pending.add(delta)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- raised to the reader, also a panic of a library in Rust
            self._ended = output.last
            self.fail(error)
            if left := self.leave():
                self._engine.cancel(left)
            self._reader.noticed(0, can_take=True)
            return
        self._ended = output.last
        self._reader.noticed(size, can_take=self.can_take)

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits to be taken, even if it is too little for a message."""
        return bool(self._pending) or self._error is not None

    @property
    def can_take(self) -> bool:
        """Whether `take` returns something, or raises."""
        return self._error is not None or self._pending.has(self._min_tokens)

    def take(self) -> Taken | None:
        """Remove and return what `can_take` finds: a delta of at least `min_tokens` tokens, or one that
        cannot get more, or the last one; None if there is nothing yet. Raises the error if there was one.
        """
        if self._error is not None:
            raise self._error
        return self._pending.pop(self._min_tokens)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless there is one already. What was buffered is dropped."""
        self._error = self._error or error
        self._pending.clear()

    def leave(self) -> str | None:
        """Stop taking outputs, because the reader is gone. Returns the engine's id if the output must be
        cancelled there. May be called twice.
        """
        running = None
        if self._holds_id():
            del self._switchboard.holders[self._request_id]
            if not self._ended:
                running = self._request_id
        self._ended = True
        return running


SECONDS_PER_LINE = 10.0


class StallLog:
    """Logs readers that were given up: at most one line in SECONDS_PER_LINE, however many there are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._next = 0.0
        self._untold = 0

    def tell(self, what: str, limit_s: float) -> None:
        """Log that `what` was not read for `limit_s` seconds. `what` must be safe to print."""
        if self._clock() < self._next:
            self._untold += 1
            return
        others = f"; and {self._untold} more since the last such line" if self._untold else ""
        log.warning("%s: not read for %g s, ended%s", what, limit_s, others)
        self._next, self._untold = self._clock() + SECONDS_PER_LINE, 0


STALL_S = 1.0
"""A reader that takes nothing for so long, although something waits, has stalled; it may come back."""
SLOWEST_BYTES_PER_S = 128 * 1024
"""A client that takes a large message more slowly than this may be given up before it has all of it."""


class Absence:
    """How long a reader has been away while something waited for it.

    A stream's reader is away while each of its messages is being sent, so going and coming back must be
    cheap: one timer stays for many absences, and looks again when it fires. Used on the event loop only.
    """

    __slots__ = ("_due", "_limit_s", "_loop", "_on_stall", "_since_ns", "_stalled", "_timer")

    def __init__(
        self, limit_s: float, stalled: Callable[[], None], on_stall: Callable[[int, float, bool], None]
    ) -> None:
        """`stalled` is called when the reader was away for `limit_s` seconds. `on_stall` is as for
        `RequestReader`.
        """
        self._limit_s = limit_s
        self._stalled = stalled
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._since_ns = 0
        """Since when the reader is away, in monotonic ns; 0 if it is not."""
        self._due = 0.0
        """When it will be given up, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, num_bytes: int) -> None:
        """Note that the reader is away, unless it is already. It may take longer for a message of `num_bytes`
        bytes.
        """
        if self._since_ns:
            return
        self._since_ns = time.monotonic_ns()
        self._due = self._loop.time() + self._limit_s + num_bytes / SLOWEST_BYTES_PER_S
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)

    def begin_again(self, num_bytes: int) -> None:
        """If the reader is away, note that it is so only from now on, for a message of `num_bytes` bytes."""
        if self._since_ns:
            self.end()
            self.begin(num_bytes)

    def end(self) -> None:
        """Note that the reader is back, or has something else to do."""
        if self._since_ns:
            self._tell(gave_up=False)

    def close(self) -> None:
        """Stop watching. May be called twice."""
        self.end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._since_ns:
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._look)
            return
        self._tell(gave_up=True)
        self._stalled()

    def _tell(self, *, gave_up: bool) -> None:
        since_ns, self._since_ns = self._since_ns, 0
        seconds = (time.monotonic_ns() - since_ns) / 1e9
        if gave_up or seconds >= STALL_S:
            self._on_stall(since_ns, seconds, gave_up)


class RequestReader:
    """Takes what the outputs of one request generated. Used on the event loop only."""

    def __init__(
        self,
        engine: Backend,
        request_id: str,
        budget: ReplyBudget,
        stalls: StallLog,
        *,
        stall_limit_s: float | None = None,
        collects: bool = False,
        on_stall: Callable[[int, float, bool], None] = lambda since_ns, seconds, gave_up: None,
    ) -> None:
        """`request_id` is the engine's. `stall_limit_s` is None if the reader collects everything until the
        end, so that it cannot stall. With `collects` what it took counts as waiting until `forget`.
        `on_stall` is told of each stall that is over: since when, in monotonic ns, for how many seconds, and
        whether the reader was given up.
        """
        self._engine = engine
        self._request_id = request_id
        self._stalls = stalls
        self._collects = collects
        self._absence: Absence | None = None
        if stall_limit_s is not None:
            self._absence = Absence(stall_limit_s, partial(self._stalled, stall_limit_s), on_stall)
        self._share = budget.share(self.fail)
        self._buffers: Sequence[Buffer] = ()
        self._active: list[int] = []
        """The outputs whose end was not taken yet, in the order of their turns."""
        self._reading = False
        self._wake: asyncio.Future[None] | None = None
        """Done when there is something to take; None unless the reader waits for that."""
        self._sending = 0
        """Size in bytes of the message that is being sent."""
        self._prompt_bytes = 0
        """Size of the prompt's log-probabilities if they were taken and may not have been sent yet."""

    def reads(self, buffers: Sequence[Buffer]) -> None:
        """Read from these buffers, one for each output."""
        self._buffers = buffers
        self._active = list(range(len(buffers)))

    @property
    def is_done(self) -> bool:
        """Whether the end of every output was taken."""
        return not self._active

    async def take(self) -> tuple[int, Taken]:
        """Wait for the next delta of any output, and return the output's index and the delta; the last one of
        each output has `finish`. Raises the error of any output.
        """
        self._reading = True
        self._sending = 0
        if self._absence is not None:
            self._absence.end()
        try:
            while True:
                for turn, index in enumerate(self._active):
                    taken = self._buffers[index].take()
                    if taken is not None:
                        self._took(taken, turn, index)
                        return index, taken
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
        finally:
            self._wake = None
            self._reading = False
            self._watch()  # other outputs' deltas may be waiting already

    def _took(self, taken: Taken, turn: int, index: int) -> None:
        if not self._collects:
            self._share.add(-taken.num_bytes)
            if taken.num_merged:
                self._share.merged(taken.num_merged)
            if taken.prompt_logprobs:
                self._prompt_bytes += prompt_bytes(taken.prompt_logprobs)
        if taken.finish is not None or len(self._active) > 1:
            # The other outputs go first the next time, so that a fast output does not keep a slow one
            # waiting.
            last = [] if taken.finish is not None else [index]
            self._active = [*self._active[turn + 1 :], *self._active[:turn], *last]
        if self._collects and self.is_done:
            self._share.seal()

    def sending(self, num_bytes: int) -> None:
        """Note that a message of this size is being sent, until the next call of `sending` or `take`. A
        larger message may keep the reader away for longer.
        """
        self._sending = num_bytes
        if self._absence is not None:
            self._absence.begin_again(num_bytes)

    def sent_prompt(self) -> None:
        """Note that the message with the prompt's log-probabilities has been sent."""
        self._share.add(-self._prompt_bytes)
        self._prompt_bytes = 0

    def noticed(self, num_bytes: int, *, can_take: bool) -> None:
        """Take what a buffer tells: see `Reader`."""
        if self._reading:
            if can_take:
                self._wake_up()
        elif self._absence is not None and (num_bytes or can_take):
            self._absence.begin(self._sending)
        if num_bytes:
            self._share.add(num_bytes)

    def fail(self, error: Exception) -> None:
        """End all outputs. The reader gets this error, unless an output had one before."""
        for buffer in self._buffers:
            buffer.fail(error)
        self.close()
        self._share.seal()
        self._share.add(self._prompt_bytes - self._share.num_bytes)  # gRPC still holds these, until `forget`
        self._wake_up()

    def close(self) -> None:
        """Stop reading, and cancel in the engine what still runs there. May be called twice."""
        if self._absence is not None:
            self._absence.close()
        running = [left for buffer in self._buffers if (left := buffer.leave()) is not None]
        if running:
            self._engine.cancel(*running)

    def forget(self) -> None:
        """Stop counting what was taken: it has been sent, or will never be."""
        self._share.close()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _watch(self) -> None:
        """Note that the reader is away, if something waits for it."""
        if self._reading or self._absence is None:
            return
        for index in self._active:
            if self._buffers[index].is_waiting:
                self._absence.begin(self._sending)
                return

    def _stalled(self, limit_s: float) -> None:
        self._stalls.tell(f"request {told_id(self._request_id)}", limit_s)
        self.fail(StalledReader(limit_s))
