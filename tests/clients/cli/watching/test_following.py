"""What `penstock top` keeps of a server that says more than is shown."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from penstock.cli.watching.following import MOST_WAITING, Following, Found, Refused
from penstock.cli.watching.history import MOST_POINTS, History
from penstock.client import LoadReport
from tests.clients.watching import REPORT

WAIT_S = 20.0


class Flood(Iterator[LoadReport]):
    """A stream without an end, which counts what was read of it."""

    def __init__(self) -> None:
        self.num_read = 0
        self.enough = threading.Event()
        self.closed = threading.Event()

    def __next__(self) -> LoadReport:
        if self.closed.is_set():
            raise StopIteration
        self.num_read += 1
        if self.num_read == MOST_WAITING:
            self.enough.set()
        assert self.num_read < 10 * MOST_WAITING, "more is read than anybody takes"
        return REPORT

    def close(self) -> None:
        self.closed.set()


class FakeClient:
    def __init__(self, stream: Flood) -> None:
        self._stream = stream

    def model_info(self) -> Any:
        return type("Info", (), {"model": "m"})()

    def watch_load(self, **_: Any) -> Flood:
        return self._stream


def ended(condition: Callable[[], bool]) -> bool:
    return any(condition() or threading.Event().wait(0.05) for _ in range(int(WAIT_S / 0.05)))


def test_what_nobody_takes_is_not_read() -> None:
    """As on a terminal that was stopped by Ctrl-S."""
    stream = Flood()
    client: Any = FakeClient(stream)
    with Following(client, "addr", interval=0.1, max_requests=0) as following:
        assert stream.enough.wait(WAIT_S)
        assert following.next(WAIT_S) == Found("m")
        events = [following.next(WAIT_S) for _ in range(5 * MOST_WAITING)]
        assert not any(isinstance(event, Refused) for event in events)
        assert stream.num_read <= 7 * MOST_WAITING
        thread = following._thread
    assert ended(lambda: not thread.is_alive())


def test_the_history_is_bounded_although_the_servers_clock_stands_still() -> None:
    history = History()
    for number in range(MOST_POINTS + 10):
        history.add(dataclasses.replace(REPORT, max_running_requests=number))
    assert len(history._points) == MOST_POINTS
