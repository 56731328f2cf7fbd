"""Notices when the engine's thread or the event loop hangs, and ends an engine that may hang.

`Watchdog` logs where one of them hangs, and notices when it moves again. It watches from a thread of its own,
and takes none of their locks. While only the engine's thread hangs, health turns NOT_SERVING. While the event
loop hangs, health cannot answer at all, and probes notice that; the watchdog then only logs where the loop
hangs. If a thread does not release Python's interpreter, the watchdog cannot run either.

A thread hangs if it has work and does none of it for the time limit, which is therefore far above the time of
any step. Programs are compiled before the watch begins.

`EngineEnd` ends an engine that may hang: each step has a time limit, and the server goes on without an engine
that exceeds it. Without the limits a device that does not answer, or a lock that is never released, would
keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from penstock.runtime.errors import PenstockError
from penstock.runtime.loop.interface import Pulse
from penstock.service.backend import Backend
from penstock.service.threads.lanes import in_thread

log = logging.getLogger(__name__)

_LONGEST_PERIOD_S = 5.0


class Stillness:
    """Decides whether something that should make progress stands still. Times are in seconds, of
    any clock.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._since_s = now_s
        self._progress = -1
        self._is_still = False

    def look(self, now_s: float, progress: int, should_move: bool) -> bool:
        """Say whether it has had work and made no progress for longer than the limit."""
        if progress != self._progress or not should_move:
            self._since_s, self._progress = now_s, progress
        self._is_still = now_s - self._since_s > self._limit_s
        return self._is_still

    def excuse(self, now_s: float) -> None:
        """Do not count the time so far, because nobody looked. What was found to stand still stays so."""
        if not self._is_still:
            self._since_s = now_s


class Watchdog:
    """Watches one engine, and the event loop that it is made on, from `start` to `stop`."""

    def __init__(self, limit_s: float, pulse: Callable[[], Pulse], tell: Callable[[bool], None]) -> None:
        """Call `tell(hangs)` on the event loop when the engine's thread begins or ceases to hang."""
        self._limit_s = limit_s
        self._pulse = pulse
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beats = 0
        self._asked = 0
        self._stopped = threading.Event()
        self._engine_hangs = False
        self._loop_hangs = False

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="penstock-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. Waits for nothing."""
        self._stopped.set()

    def _run(self) -> None:
        period_s = min(self._limit_s / 4, _LONGEST_PERIOD_S)
        looked_s = time.monotonic()
        engine, loop = Stillness(self._limit_s, looked_s), Stillness(self._limit_s, looked_s)
        while not self._stopped.wait(period_s):
            now_s = time.monotonic()
            if (
                now_s - looked_s > period_s + self._limit_s / 2
            ):  # the whole process, or the machine, stood still
                engine.excuse(now_s)
                loop.excuse(now_s)
            looked_s = now_s
            self._look_at_loop(loop, now_s)
            self._look_at_engine(engine, now_s)

    def _look_at_loop(self, stillness: Stillness, now_s: float) -> None:
        hangs = stillness.look(now_s, self._beats, should_move=True)
        # the loop has answered the last question; otherwise that question still waits
        if self._asked == self._beats:
            self._asked += 1
            self._on_loop(self._beat)
        if hangs and not self._loop_hangs:
            log.error(
                "the event loop has not run for %g s, so the server answers nothing; it is at:\n%s",
                self._limit_s,
                stack_of(self._loop_thread),
            )
        elif self._loop_hangs and not hangs:
            log.warning("the event loop runs again")
        self._loop_hangs = hangs

    def _beat(self) -> None:
        self._beats += 1

    def _look_at_engine(self, stillness: Stillness, now_s: float) -> None:
        pulse = self._pulse()
        hangs = stillness.look(now_s, pulse.progress, pulse.has_work)
        if hangs == self._engine_hangs:
            return
        self._engine_hangs = hangs
        if hangs:
            log.error(
                "the engine's thread has work and did nothing for %g s, so health is NOT_SERVING; "
                "it is at:\n%s",
                self._limit_s,
                stack_of(pulse.thread_id),
            )
        else:
            log.warning("the engine's thread moves again")
        self._on_loop(lambda: self._tell(hangs))

    def _on_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(call)


def stack_of(thread_id: int | None) -> str:
    """Say what a thread is doing now, as a stack with the innermost call last."""
    frame = None if thread_id is None else sys._current_frames().get(thread_id)
    return "(there is no such thread)" if frame is None else "".join(traceback.format_stack(frame))


T = TypeVar("T")
LIMIT_S = 4.0
"""Seconds that the engine may take for what takes milliseconds if it does not hang. Together with the grace
and the last replies it fits into the 30 s that orchestrators give.
"""


class EngineEnd:
    """Ends one engine. Used on the event loop, which it never blocks."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine
        self.hangs = False
        """Whether the engine exceeded a limit, so that one of its threads is still running."""

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait for the running ones, for at most `grace_s` seconds. Returns whether
        all have ended.
        """
        return bool(await self._within(grace_s + LIMIT_S, partial(self._engine.drain, grace_s)))

    async def abort(self, grace_s: float) -> None:
        """End the requests that are left after the grace."""
        if self.hangs:
            return
        work = partial(self._engine.abort, all_requests=True, message="the server is shutting down")
        try:
            aborted = await self._within(LIMIT_S, work)
        except PenstockError:  # it is dead, and has ended all of them itself
            return
        if aborted is not None:
            log.warning("grace of %g s is over; aborted %d requests", grace_s, len(aborted))

    async def shutdown(self) -> None:
        """Stop the engine's thread. A hanging engine is told to stop, too, but nothing waits for it."""
        await self._within(0 if self.hangs else LIMIT_S, self._engine.shutdown)

    async def _within(self, limit_s: float, work: Callable[[], T]) -> T | None:
        """Return what `work` returns, or None if it takes longer than `limit_s`."""
        try:
            return await asyncio.wait_for(in_thread(work), limit_s)
        except TimeoutError:
            if not self.hangs:
                stack = stack_of(self._engine.pulse().thread_id)
                log.error("the engine hangs, so the server ends without it; its thread is at:\n%s", stack)
            self.hangs = True
            return None
