"""Knows which requests run, and whether the front is about to end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Life:
    """The life of one worker. Used on the event loop only."""

    def __init__(self) -> None:
        self.is_draining = False
        """Whether new requests are refused, because the front is about to end."""
        self.is_over = False
        """Whether the running requests have had their time, and are being ended."""
        self._running: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """How many requests run."""
        return len(self._running)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the current task as a running request."""
        task = asyncio.current_task()
        assert task is not None, "requests run in tasks"
        self._running.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and wait until those that run have ended, for at most `grace_s` seconds. Then
        end them.
        """
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self.is_over = True
            for task in list(self._running):
                task.cancel()
