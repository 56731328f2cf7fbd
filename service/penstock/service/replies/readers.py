"""The reader of a request takes what its outputs generated, in turn. A reader that stalls for too long is
given up, and its request ends in the engine, which frees the pages.

The RPC of such a reader may still be blocked in sending; `sending` ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from penstock.service.access.ownership import told_id
from penstock.service.backend import Backend
from penstock.service.errors import StalledReader
from penstock.service.replies.pending import Taken, prompt_bytes
from penstock.service.replies.reply_budget import ReplyBudget
from penstock.service.replies.streams import Buffer

log = logging.getLogger(__name__)

SECONDS_PER_LINE = 10.0
STALL_S = 1.0
"""A reader that takes nothing for so long, although something waits, has stalled; it may come back."""
SLOWEST_BYTES_PER_S = 128 * 1024
"""A client that takes a large message more slowly than this may be given up before it has all of it."""


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
        """Called by a buffer: see `streams.Reader`."""
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
