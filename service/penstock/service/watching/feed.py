"""LoadFeed: tells everybody who watches a server how busy it is, from snapshots that all of them share.

While nobody watches, nothing is done. A snapshot serves all watchers whose turn comes while it is fresh, so
however many watch, the engine is asked ten times in a second at most. It is asked on a thread, because that
takes locks.

A watch is a stream that stays, so it has places of its own (`Bounds.max_watch_rpcs`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

from penstock.service.lifecycle.underway import Calls
from penstock.service.requests.control import LEAST_INTERVAL_S, Watch
from penstock.service.threads.lanes import in_thread
from penstock.service.watching.snapshot import Snapshot

FRESH_S = 0.9 * LEAST_INTERVAL_S
"""For how many seconds a snapshot is told to whoever asks. No watcher gets one twice, because none asks again
so soon.
"""


class LoadFeed:
    """The watches of one server. Used on its event loop only."""

    def __init__(self, look: Callable[[int], Snapshot], calls: Calls) -> None:
        """`look` takes a snapshot with at most so many requests. It blocks."""
        self._look = look
        self._calls = calls
        self._wanted: Counter[int] = Counter()
        """How many watchers there are, by the number of requests that each wants."""
        self._taken: asyncio.Task[Snapshot] | None = None
        """The latest snapshot, or the one that is being taken."""
        self._taken_s = 0.0
        self._taken_requests = 0

    @property
    def num_watchers(self) -> int:
        """How many watches have not ended."""
        return self._wanted.total()

    async def messages(self, watch: Watch, check: Callable[[], None] = lambda: None) -> AsyncIterator[bytes]:
        """Yield a serialized WatchLoadResponse now and after every interval. Raises Draining when the server
        begins to stop, and what `check` raises, which is called before each message.

        A caller that takes a message late gets the next one at once, and it is as new as any: what was due
        meanwhile is left out.
        """
        now = asyncio.get_running_loop().time
        self._wanted[watch.max_requests] += 1
        try:
            check()  # before the engine is asked for anything
            due = now()
            while True:
                async with self._calls.preparing():
                    await asyncio.sleep(due - now())
                    due = now() + watch.interval_s
                    snapshot = await self._latest(watch.max_requests)
                check()
                yield snapshot.message(watch.max_requests)
        finally:
            self._wanted[watch.max_requests] -= 1
            self._wanted += Counter()  # drops the counts of zero

    async def _latest(self, max_requests: int) -> Snapshot:
        """Take a fresh snapshot with this many requests. One is taken at a time."""
        now = asyncio.get_running_loop().time
        while True:
            taken = self._taken
            is_busy = taken is not None and not taken.done()
            is_fresh = now() - self._taken_s < FRESH_S
            if taken is not None and is_fresh and self._taken_requests >= max_requests:
                return await asyncio.shield(taken)
            if taken is not None and is_busy:
                await asyncio.wait({taken})
            else:
                self._taken_s, self._taken_requests = now(), max(self._wanted)
                self._taken = asyncio.ensure_future(self._take(self._taken_requests))

    async def _take(self, max_requests: int) -> Snapshot:
        return await in_thread(partial(self._look, max_requests))
