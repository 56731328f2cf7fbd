"""From the engine's thread to readers: one wake-up of the event loop per step, one merging buffer per output.

The engine calls each output's sink in turn; a sink only appends to the switchboard's queue, and the first one
of a step wakes the loop. So a step costs one `call_soon_threadsafe` however many requests it serves. Each
output has its own sink, not one for all with a lookup by id: an id may be used again while outputs of its
former, cancelled user are still on their way, and these must not reach the new one.

On the loop an output becomes a delta at once (text, stop strings), whether or not anybody reads, so a stop
string ends the request in the engine without waiting for a slow reader. Deltas wait merged and packed
(`pending`).

The outputs of a request have one reader, which `readers` is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.runtime.generation.live_output import LiveOutput
from penstock.runtime.generation.switchboard import Switchboard
from penstock.runtime.requests.request import PreparedPrompt, Request, StepOutput
from penstock.runtime.text.assembler import Assembler
from penstock.service.backend import Backend
from penstock.service.replies.pending import Encode, Pending, Taken


class ServerSwitchboard(Switchboard):
    """The switchboard of a server, which also knows who has which id in the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.holders: dict[str, Buffer] = {}
        """Request id to the buffer that owns it now. Ids can be used again; this keeps a late cancel of the
        old request from hitting the new one.
        """


class Reader(Protocol):
    """Who takes what a request's outputs made, as its buffers see it."""

    def noticed(self, num_bytes: int) -> None:
        """There may be something to take, and about so many bytes more wait."""
        ...


class Buffer:
    """What one output made and its reader has not taken yet."""

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
        made: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """`request_id` is the engine's, of this output; `encode` as `Pending` has it; `made` is told how many
        tokens came, whether or not they are read.
        """
        self._engine = engine
        self._switchboard = switchboard
        self._request_id = request_id
        self._live = LiveOutput(engine, request_id, assembler, holds_id=self._holds_id)
        self._reader = reader
        self._min_tokens = min_tokens
        self._made = made
        self._pending = Pending(encode)
        self._error: Exception | None = None
        self._ended = False
        """The engine has no more for us, or we want no more."""
        self.sink: Callable[[Sequence[StepOutput]], None] = lambda outputs: switchboard.post(self, outputs)

    def submit(self, request: Request, prepared: PreparedPrompt | None = None) -> None:
        """Queue the request in the engine; raises what it refuses."""
        self._engine.submit(request, self.sink, prepared)
        self._switchboard.holders[self._request_id] = self

    def _holds_id(self) -> bool:
        return self._switchboard.holders.get(self._request_id) is self

    def deliver(self, output: StepOutput) -> None:
        """On the loop: take in one output. An error of this request's making must not reach the others'."""
        if self._ended:
            return
        try:
            delta = self._live.add(output)
            self._made(len(delta.token_ids))
            size = self._pending.add(delta)
        except Exception as error:  # noqa: BLE001 -- raised to the reader, whatever it is
            self._ended = output.last
            self.fail(error)
            if left := self.leave():
                self._engine.cancel(left)
            self._reader.noticed(0)
            return
        self._ended = output.last
        self._reader.noticed(size)

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits to be taken, be it too little for a message."""
        return bool(self._pending) or self._error is not None

    @property
    def can_take(self) -> bool:
        """Whether `pop` gives something."""
        return self._error is not None or self._pending.has(self._min_tokens)

    def pop(self) -> Taken:
        """What `can_take` found: a delta of at least `min_tokens` tokens, or one that cannot get more, or the
        last one; raises what went wrong.
        """
        if self._error is not None:
            raise self._error
        return self._pending.pop()

    def fail(self, error: Exception) -> None:
        """End with an error, unless there is one; what was buffered is dropped."""
        self._error = self._error or error
        self._pending.clear()

    def leave(self) -> str | None:
        """The reader is gone: want no more. The engine's id of what is to be cancelled there, if it still
        runs. May be called twice.
        """
        running = None
        if self._holds_id():
            del self._switchboard.holders[self._request_id]
            if not self._ended:
                running = self._request_id
        self._ended = True
        return running
