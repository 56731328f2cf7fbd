"""From the engine's thread to readers: one wake-up of the event loop per step, one merging buffer per
request.

The engine calls each request's sink in turn; a sink only appends to the switchboard's queue, and the first
one of a step wakes the loop. So a step costs one `call_soon_threadsafe` however many requests it serves. Each
request has its own sink, not one for all with a lookup by id: an id may be used again while outputs of its
former, cancelled user are still on their way, and these must not reach the new one.

On the loop an output becomes a delta at once (text, stop strings), whether or not anybody reads, so a stop
string ends the request in the engine without waiting for a slow reader. Deltas wait merged: at most one per
weights version, no longer than the context. A reader that takes nothing for `stall_limit_s` while something
waits is given up: the request is cancelled in the engine, which frees its pages, and the reader finds
StalledReader.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from penstock.runtime.assemble import Assembler, Delta
from penstock.runtime.request import Output, PreparedPrompt, Request
from penstock.service.backend import Backend
from penstock.service.errors import StalledReader

log = logging.getLogger(__name__)


class Switchboard:
    """Carries outputs from the engine's thread to the buffers on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Buffer, Sequence[Output]]] = deque()
        self._awake = False
        self.holders: dict[str, Buffer] = {}
        """Id to the buffer of the request that has it in the engine: once the engine took an id again, what
        its former user cancels or ends must not hit the new one.
        """

    def post(self, buffer: Buffer, outputs: Sequence[Output]) -> None:
        """On the engine's thread. Appending before the check means that nothing is left behind asleep."""
        self._queue.append((buffer, outputs))
        if not self._awake:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: the server has ended and nobody reads
                self._queue.clear()

    def _deliver(self) -> None:
        self._awake = False
        for _ in range(len(self._queue)):
            buffer, outputs = self._queue.popleft()
            for output in outputs:
                buffer.deliver(output)


class PendingDelta:
    """Deltas of the same weights that wait to be read, merged into one."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.num_tokens = 0
        self.last = False
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        self.last = self.last or delta.finish is not None

    def merged(self) -> Delta:
        """All of them in one."""
        return Delta(
            "".join(d.text for d in self._deltas),
            tuple(i for d in self._deltas for i in d.token_ids),
            tuple(p for d in self._deltas for p in d.logprobs),
            self.generation,
            self._deltas[-1].finish,
            self._deltas[-1].timing,
            tuple(p for d in self._deltas for p in d.prompt_logprobs),
            "".join(d.reasoning for d in self._deltas),
            tuple(c for d in self._deltas for c in d.tool_calls),
        )


async def take_any(buffers: Sequence[Buffer]) -> tuple[int, Delta]:
    """The next delta of any of these, which must share their `changed`, and whose it is: of the first that
    has one. Raises what went wrong with any.
    """
    for buffer in buffers:
        buffer.reading = True
    try:
        while True:
            for index, buffer in enumerate(buffers):
                if buffer.can_take:
                    return index, buffer.pop()
            changed = buffers[0].changed
            changed.clear()
            await changed.wait()
    finally:
        for buffer in buffers:
            buffer.reading = False


class Buffer:
    """What one output made and its reader has not taken yet."""

    def __init__(
        self,
        engine: Backend,
        switchboard: Switchboard,
        request_id: str,
        assembler: Assembler,
        *,
        min_tokens: int = 1,
        stall_limit_s: float | None = None,
        changed: asyncio.Event | None = None,
    ) -> None:
        """`changed` is set whenever there may be something to take; outputs read together share one."""
        self._engine = engine
        self._switchboard = switchboard
        self._request_id = request_id
        self._assembler = assembler
        self._min_tokens = min_tokens
        self._stall_limit_s = stall_limit_s
        """None: the reader wants everything at the end (Generate), so it cannot stall."""
        self._pending: deque[PendingDelta] = deque()
        self._error: Exception | None = None
        self.changed = changed or asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._reading = False
        self._told_stop = False
        self._ended = False
        """The engine has no more for us, or we want no more."""
        self.sink: Callable[[Sequence[Output]], None] = lambda outputs: switchboard.post(self, outputs)

    def submit(self, request: Request, prepared: PreparedPrompt | None = None) -> None:
        """Queue the request in the engine; raises what it refuses."""
        self._engine.submit(request, self.sink, prepared)
        self._switchboard.holders[self._request_id] = self

    def _holds_id(self) -> bool:
        return self._switchboard.holders.get(self._request_id) is self

    def deliver(self, output: Output) -> None:
        """On the loop: take in one output. An error of this request's making must not reach the others'."""
        if self._ended:
            return
        try:
            delta = self._assembler.add(output)
        except Exception as error:  # noqa: BLE001 -- raised to the reader, whatever it is
            self._ended = output.last
            self._fail(error)
            return
        self._append(delta)
        if output.last:
            self._ended = True
        elif self._assembler.stop is not None and not self._told_stop:
            self._told_stop = True
            if self._holds_id():
                self._engine.finish(self._request_id, self._assembler.stop)
        self.changed.set()
        self._watch()

    async def take(self) -> Delta:
        """The next delta of at least `min_tokens` tokens, or the last one; raises what went wrong."""
        return (await take_any([self]))[1]

    @property
    def reading(self) -> bool:
        """Whether the reader waits: it does not stall then."""
        return self._reading

    @reading.setter
    def reading(self, value: bool) -> None:
        self._reading = value
        if value:
            self._stop_timer()
        else:
            self._watch()  # what other outputs made may wait here since before

    def pop(self) -> Delta:
        """What `can_take` found; raises what went wrong."""
        if self._error is not None:
            raise self._error
        return self._pending.popleft().merged()

    def close(self) -> None:
        """The reader is gone: cancel in the engine what still runs there. May be called twice."""
        self._stop_timer()
        if self._holds_id():
            del self._switchboard.holders[self._request_id]
            if not self._ended:
                self._engine.cancel(self._request_id)
        self._ended = True

    @property
    def can_take(self) -> bool:
        """Whether `pop` gives something."""
        if self._error is not None or len(self._pending) > 1:
            return True
        return bool(self._pending) and (
            self._pending[0].last or self._pending[0].num_tokens >= self._min_tokens
        )

    def _append(self, delta: Delta) -> None:
        if not (
            delta.token_ids or delta.text or delta.reasoning or delta.tool_calls or delta.finish is not None
        ):
            return
        if not self._pending or (delta.token_ids and self._pending[-1].generation != delta.generation):
            self._pending.append(PendingDelta(delta.generation))
        self._pending[-1].add(delta)

    def _watch(self) -> None:
        """Time a reader that is away while something waits."""
        if self._pending and not self._reading and self._timer is None and self._stall_limit_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._stall_limit_s, self._stalled)

    def _stalled(self) -> None:
        self._timer = None
        assert self._stall_limit_s is not None
        log.warning("request %r: not read for %g s, cancelled", self._request_id, self._stall_limit_s)
        self._fail(StalledReader(self._stall_limit_s))

    def _fail(self, error: Exception) -> None:
        """End with an error; what was buffered is dropped."""
        self._error = error
        self._pending.clear()
        self.close()
        self.changed.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
