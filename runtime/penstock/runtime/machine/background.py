"""Work that should not slow down what serves: a thread of low priority, on which others have things done."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_NICE = 19


def lower_priority() -> None:
    """Let all other threads go before the calling one. Only on Linux has each thread a priority of its own;
    elsewhere this does nothing.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class BackgroundThread:
    """One thread of low priority, which starts with the first work. Any thread may give it work, which is
    done in order.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name, initializer=self._begin)
        self._thread: int | None = None

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function on the thread, and wait for what it returns or raises. What the function had
        in its local variables when it raised is let go.
        """
        try:
            return self._submit(function, *args, **kwargs).result()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise

    def start(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the thread call the function, and do not wait for it."""
        self._submit(function, *args, **kwargs)

    def close(self) -> None:
        """End the thread when it has done what it was given. May be called twice."""
        self._pool.shutdown()

    def _submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Submit the function, or call it at once if the thread is closed, or is itself the caller."""
        if threading.get_ident() != self._thread:
            with contextlib.suppress(RuntimeError):  # the thread is closed
                return self._pool.submit(function, *args, **kwargs)
        future: Future[R] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
            future.set_exception(error)
        return future

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        lower_priority()
