"""What the front counts: the requests that run, the bytes of the bodies that are on their way in, and what
Prometheus reads.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.openai.failures import ApiError


class Incoming:
    """Bounds the bytes of bodies that are on their way in. Used on the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        """How many bytes are counted now."""

    @contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """Give a function that counts bytes which have come, until the end of the block. It raises ApiError
        if there are too many.
        """
        held = 0

        def take(count: int) -> None:
            nonlocal held
            if self.held + count > self._most:
                raise ApiError(
                    503, "too many bodies are on their way in", "server_error", None, "busy", retry_after=1.0
                )
            self.held += count
            held += count

        try:
            yield take
        finally:
            self.held -= held


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


FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Where workers keep their values in files, so that each can add up those of all. prometheus_client reads it
when it is imported; a front of one process does without.
"""
_MOST_CODES: Final = 100
"""How many codes of errors are told apart. They are the front's own, and reasons of the server."""
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Meters:
    """The metrics of one worker."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._codes: set[str] = set()
        self._requests: Final = Counter(
            "penstock_openai_requests",
            "Requests that have ended, by endpoint, HTTP status and code of the error; 499: the client left.",
            ("endpoint", "status", "code"),
            registry=self._registry,
        )
        self.seconds: Final = Histogram(
            "penstock_openai_request_seconds",
            "Time from a request's headers to the end of its reply.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_byte_seconds: Final = Histogram(
            "penstock_openai_first_byte_seconds",
            "Time from a request's headers to the first byte of the body of its reply.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.running: Final = Gauge(
            "penstock_openai_running_requests",
            "Requests that are being served.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.connections: Final = Gauge(
            "penstock_openai_connections",
            "Open connections.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.closed_connections: Final = Counter(
            "penstock_openai_closed_connections",
            "Connections that the front closed, by reason.",
            ("reason",),
            registry=self._registry,
        )

    def count(self, endpoint: str, status: int, code: str | None) -> None:
        """Count a request that has ended. `code` is that of its error, and None without one."""
        code = code or ""
        if code not in self._codes and len(self._codes) >= _MOST_CODES:
            code = "other"
        self._codes.add(code)
        self._requests.labels(endpoint, str(status), code).inc()

    def page(self) -> bytes:
        """Write the values of all workers in Prometheus' text format."""
        if FOLDER_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # ships no hints for it
        return generate_latest(registry)
