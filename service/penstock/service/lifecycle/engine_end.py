"""Ends an engine that may hang: each step has a time limit, and the server goes on without an engine that
exceeds it.

Without the limits a device that does not answer, or a lock that is never released, would keep the process
alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from penstock.runtime.errors import PenstockError
from penstock.service.backend import Backend
from penstock.service.lifecycle.watchdog import stack_of
from penstock.service.threads.blocking import in_thread

log = logging.getLogger(__name__)

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
