"""Carries outputs from the engine's thread to readers: one wake-up of the event loop per step, one buffer per
output.

The engine calls each output's sink in turn. A sink only appends to the switchboard's queue, and the first one
of a step wakes the loop. So a step costs one `call_soon_threadsafe`, however many requests it serves. Each
output has its own sink, instead of one sink that looks up ids: an id may be used again while outputs of its
former, cancelled user are still on their way, and these must not reach the new one.

On the loop an output becomes a delta at once (text, stop strings), whether or not it is read. So a stop
string ends the request in the engine without waiting for a slow reader. Deltas wait merged and packed
(`pending`). The outputs of a request have one reader (`readers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.runtime.generation.live_output import LiveOutput
from penstock.runtime.generation.switchboard import Switchboard
from penstock.runtime.requests.fanout import PreparedPrompt
from penstock.runtime.requests.request import Request, StepOutput
from penstock.runtime.text.assembler import Assembler
from penstock.service.backend import Backend
from penstock.service.replies.pending import Encode, Pending, Taken


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
        made: Callable[[int, int], None] = lambda tokens, reasoning: None,
    ) -> None:
        """`request_id` is the engine's id of this output. `encode` is as for `Pending`. `made` is told how
        many tokens came, and how many are known to be reasoning, whether or not they are read.
        """
        self._engine = engine
        self._switchboard = switchboard
        self._request_id = request_id
        self._live = LiveOutput(engine, request_id, assembler, holds_id=self._holds_id)
        self._reader = reader
        self._min_tokens = min_tokens
        self._made = made
        self._pending = Pending(encode)
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
