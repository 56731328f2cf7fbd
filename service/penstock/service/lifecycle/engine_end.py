"""The end of an engine, which may hang: each step has a limit, and what does not come back is left behind.

Without the limits a device that does not answer, or a lock that nobody gives back, would keep the process
from its end until somebody kills it.
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
"""How long the engine may take for what takes milliseconds if it does not hang. With the grace and the last
replies it fits the 30 s that orchestrators give.
"""


class EngineEnd:
    """Ends one engine. Used on the event loop, which none of this holds up."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine
        self.hangs = False
        """It did not come back, so a thread of it is still there."""

    async def drain(self, grace_s: float) -> bool:
        """Take nothing new and wait for what runs, for so long; whether all of it came to its end."""
        return bool(await self._within(grace_s + LIMIT_S, partial(self._engine.drain, grace_s)))

    async def abort(self, grace_s: float) -> None:
        """End what is left after the grace."""
        if self.hangs:
            return
        work = partial(self._engine.abort, all_requests=True, message="the server is shutting down")
        try:
            aborted = await self._within(LIMIT_S, work)
        except PenstockError:  # it is dead, and has ended all of them by itself
            return
        if aborted is not None:
            log.warning("grace of %g s is over; aborted %d requests", grace_s, len(aborted))

    async def shutdown(self) -> None:
        """Stop its thread. One that hangs is told as well, but nobody waits for it."""
        await self._within(0 if self.hangs else LIMIT_S, self._engine.shutdown)

    async def _within(self, limit_s: float, work: Callable[[], T]) -> T | None:
        """What it returns; None where it hangs."""
        try:
            return await asyncio.wait_for(in_thread(work), limit_s)
        except TimeoutError:
            if not self.hangs:
                stack = stack_of(self._engine.pulse().thread_id)
                log.error("the engine hangs and is left behind; its thread is here:\n%s", stack)
            self.hangs = True
            return None
