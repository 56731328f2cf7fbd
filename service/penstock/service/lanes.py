"""Threads for work that blocks, apart by who may hold it up.

What callers write may take seconds, up to its limit: templates, grammars, long lists of words, megabytes of
text. On the threads that tokenize everybody's prompts (asyncio's own: a few more than there are cores) a
handful of such requests would keep all others waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
MAX_TEMPLATES = 4
"""They are rendered one after the other anyway (`penstock.runtime.chat.sandbox`)."""
MAX_HEAVY = 64
"""Most only wait: the compiler of grammars has few threads, and says when it has none to spare."""


class Lanes:
    """The threads of one server. Threads are started when they are needed."""

    def __init__(self) -> None:
        self._templates = ThreadPoolExecutor(MAX_TEMPLATES, "penstock-templates")
        self._heavy = ThreadPoolExecutor(MAX_HEAVY, "penstock-heavy")

    async def template(self, work: Callable[[], T]) -> T:
        """Work on a caller's own template."""
        return await asyncio.get_running_loop().run_in_executor(self._templates, work)

    async def heavy(self, work: Callable[[], T]) -> T:
        """Other work that may take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._heavy, work)

    def close(self) -> None:
        """No more work; what has not begun is dropped."""
        for pool in (self._templates, self._heavy):
            pool.shutdown(wait=False, cancel_futures=True)
