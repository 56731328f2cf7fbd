"""Follows a server's load on a thread, and connects again when it is lost."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Self

from penstock.cli.calling.explain import explain
from penstock.client import (
    Client,
    Forbidden,
    LoadReport,
    PenstockClientError,
    RefusedError,
    ServedElsewhere,
    ServerStream,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
MOST_WAITING = 64
"""How many events wait for whoever takes them, such as a terminal that was stopped. While there are so many,
no more is read, and the server leaves out what is not taken.
"""
_LOOK_S = 0.5
"""Seconds after which the thread notices that nobody takes events any more."""


@dataclass(frozen=True, slots=True)
class Found:
    """The server answers; `model` is what it serves."""

    model: str


@dataclass(frozen=True, slots=True)
class NoRequests:
    """The server tells this caller of no requests."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The server does not answer now. It is asked again after a pause."""

    why: str
    error: PenstockClientError | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The server refuses, and would do so again; or there is a bug here. Nothing follows."""

    error: Exception


Event = Found | NoRequests | LoadReport | Lost | Refused


class Following:
    """A watch that goes on until it is closed. Use it in a `with` block."""

    def __init__(self, client: Client, addr: str, *, interval: float, max_requests: int) -> None:
        self._client, self._addr = client, addr
        self._interval, self._max_requests = interval, max_requests
        # Ctrl-C may end the wait for an event anywhere. A SimpleQueue's cannot be left in the middle.
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._room = threading.Semaphore(MOST_WAITING)
        self._closed = threading.Event()
        self._stream: ServerStream[LoadReport] | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-top", daemon=True)

    def next(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None if there is none for so long. Without a timeout it waits as long as it
        takes.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._room.release()
        return event

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._stream is not None:
            self._stream.close()

    def _put(self, event: Event) -> None:
        """Wait until there is room for the event, or until the watch is closed."""
        while not self._closed.is_set():
            if self._room.acquire(timeout=_LOOK_S):
                self._events.put(event)
                return

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 -- whoever waits for the next event must be told
            self._put(Refused(error))

    def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                self._put(Found(self._client.model_info().model))
                for report in self._watch():
                    self._put(report)
                    pause_s = _FIRST_PAUSE_S
                self._put(Lost(f"the server at {self._addr} ended the watch"))
            except (Forbidden, ServedElsewhere) as error:
                if not self._max_requests:
                    raise
                self._max_requests = 0
                self._put(NoRequests(explain(error, self._addr)))
                continue
            except RefusedError:
                raise
            except PenstockClientError as error:
                self._put(Lost(explain(error, self._addr), error))
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _watch(self) -> ServerStream[LoadReport]:
        self._stream = self._client.watch_load(interval=self._interval, max_requests=self._max_requests)
        if self._closed.is_set():  # it was closed before there was a stream to close
            self._stream.close()
        return self._stream
