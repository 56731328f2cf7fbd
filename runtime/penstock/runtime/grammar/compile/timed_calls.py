"""Calls that may take too long, each on a thread of its own, with a deep stack and a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from penstock.runtime.errors import UnavailableError
from penstock.runtime.failing import as_exception

T = TypeVar("T")

STACK_BYTES = 256 * 1024 * 1024
"""llguidance recurses once for each link of a chain of rules or references, with a few KB each: on the usual
8 MiB a chain of some 2,000 would end the process. This is address space only; what is not touched costs no
memory."""

_stack_size = threading.Lock()
"""Held while `threading.stack_size`, which is one for the whole process, is changed."""


class TimedCalls:
    """Runs calls on at most `max_threads` threads at once, and stops waiting for one that takes too long.

    Such a call cannot be stopped: its thread runs on, still counted in `max_threads`, and its result is
    dropped. Safe to use from many threads.
    """

    def __init__(self, *, time_limit_s: float, max_threads: int) -> None:
        if time_limit_s <= 0 or max_threads < 1:
            raise ValueError("time_limit_s must be above 0 and max_threads at least 1")
        self.time_limit_s = time_limit_s
        self._slots = threading.BoundedSemaphore(max_threads)

    def run(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, and raise what it raises.

        Raises TimeoutError if it takes more than `time_limit_s`, and UnavailableError if no thread comes free
        in that time.
        """
        if not self._slots.acquire(timeout=self.time_limit_s):
            raise UnavailableError("every thread that compiles grammars is busy; try again later")
        future: Future[T] = Future()
        try:
            _start(lambda: self._work(call, future))
        except BaseException:  # no thread was started to release it; raised on
            self._slots.release()
            raise
        return future.result(self.time_limit_s)

    def _work(self, call: Callable[[], T], future: Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  the caller gets it; see `failing`
            self._slots.release()
            future.set_exception(as_exception(error))
        else:
            self._slots.release()
            future.set_result(result)


def _start(target: Callable[[], None]) -> None:
    # As a daemon, a thread whose compile does not end cannot keep the process from ending.
    thread = threading.Thread(target=target, name="penstock-grammar", daemon=True)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
