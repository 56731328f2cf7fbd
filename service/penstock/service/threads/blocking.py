"""Runs blocking work in threads beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")


def on_this_loop(call: Callable[[], None]) -> Callable[[], None]:
    """Make a function that has `call` called on the running event loop. Any thread may call it."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            loop.call_soon_threadsafe(call)

    return tell


def in_thread(work: Callable[[], T]) -> Awaitable[T]:
    """Run blocking work in a daemon thread. Unlike asyncio's own pool it does not keep the process from
    ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001 -- handed to whoever awaits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"penstock-{getattr(work, '__name__', 'work')}", daemon=True).start()
    return future
