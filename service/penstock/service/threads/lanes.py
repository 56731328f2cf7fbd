"""Threads for work that blocks, apart by who may hold it up, and each with a bound on what it has in hand.

What callers write may take seconds, up to its limit: templates, grammars, long lists of words, megabytes of
text. On the threads that tokenize everybody's prompts a handful of such requests would keep all others
waiting. Above its bound a lane refuses at once (Busy) instead of keeping what it will not come to for long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from penstock.runtime.host.processors import available_processors
from penstock.service.errors import Busy
from penstock.service.limits.pace import Pace

T = TypeVar("T")
MIB = 1024 * 1024
INLINE_BYTES = 4096
"""A smaller message, or part of one, is worked on at once: that takes well under a millisecond."""
LONG_CHARS = 500_000
"""Longer texts, which only come here to be cut, take seconds; a long context has more, see `Lanes.fit`."""
MOST_TOKEN_CHARS = 8
"""Of a text that fills its context honestly, on average."""
MOST_TEMPLATES = 8
"""Callers' own templates that are rendered or wait for it."""
MESSAGE_BYTES: ContextVar[int] = ContextVar("message_bytes", default=0)
"""The size of the request of the RPC that this task serves."""


class Lane:
    """The threads for one kind of work. Used on the event loop; threads are started when they are needed."""

    def __init__(self, name: str, num_threads: int, most: int) -> None:
        """`most`: how much work may be in hand, running and waiting, in the unit of `run`'s weights."""
        self._name, self._most = name, most
        self._pool = ThreadPoolExecutor(num_threads, f"penstock-{name}")
        self._pace = Pace()

    async def run(self, work: Callable[[], T], weight: int = 1) -> T:
        """`work()`, on one of the threads. Raises Busy where it would be too much in hand; one piece of work
        alone is never too much. What is given up while it waits is not begun; what runs comes to its end, and
        counts until then.
        """
        held = self._pace.active
        if held and held + weight > self._most:
            raise Busy(self._name, self._most, self._pace.retry_after_s(weight))
        return await self._begun(work, weight)

    def _begun(self, work: Callable[[], T], weight: int) -> asyncio.Future[T]:
        """Its future, which no frame keeps: an error of the work refers to the frames that it went through,
        and the future to the error, so together they would keep the request until Python looks for cycles.
        """
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)
        self._pace.entered(weight)

        def release(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks for a lane any more
                loop.call_soon_threadsafe(self._pace.left, weight)

        future.add_done_callback(release)
        return asyncio.wrap_future(future)

    @property
    def held(self) -> int:
        """How much is in hand."""
        return self._pace.active

    def close(self) -> None:
        """No more work; what has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """The lanes of one server."""

    def __init__(self) -> None:
        quick = min(32, available_processors() + 4)
        # They are rendered one by one, each in up to a second (`runtime.chat.sandbox`): as many as wait make
        # the longest wait of an honest one behind hostile ones.
        self._templates = Lane("templates", 4, MOST_TEMPLATES)
        self._heavy = Lane("heavy", 64, 1024)  # most only wait: the compiler of grammars has few threads
        self._convert = Lane("convert", 4, 64 * MIB)
        self._texts = Lane("texts", quick, 64 * MIB)
        self._long_texts = Lane("long-texts", 4, 32 * MIB)
        self._long_chars = LONG_CHARS

        self._all = (
            self._templates,
            self._heavy,
            self._convert,
            self._texts,
            self._long_texts,
        )

    def fit(self, max_model_len: int) -> None:
        """Texts that fill a context of so many tokens are not among those that only come to be cut."""
        self._long_chars = max(LONG_CHARS, max_model_len * MOST_TOKEN_CHARS)

    async def template(self, work: Callable[[], T]) -> T:
        """Work on a caller's own template."""
        return await self._templates.run(work)

    async def heavy(self, work: Callable[[], T]) -> T:
        """Other work that may take seconds."""
        return await self._heavy.run(work)

    async def convert(self, work: Callable[[], T], num_bytes: int) -> T:
        """Work that takes the longer the larger a message, or a part of one, is; of a small one it is done at
        once, on the event loop.
        """
        return work() if num_bytes <= INLINE_BYTES else await self._convert.run(work, num_bytes)

    async def text(self, work: Callable[[], T], num_chars: int) -> T:
        """Work on a text of so many characters, or on what takes as long."""
        lane = self._texts if num_chars <= self._long_chars else self._long_texts
        return await lane.run(work, num_chars)

    def close(self) -> None:
        """No more work; what has not begun is dropped."""
        for lane in self._all:
            lane.close()
