"""What an RPC begins in a thread and must end, however the RPC itself ends: an upload, or a change that it
asks the engine for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from penstock.service.backend import Upload
from penstock.service.threads.lanes import Lanes

T = TypeVar("T")
UploadT = TypeVar("UploadT", bound=Upload)


class Ended(Generic[T]):
    """Something that one thread makes, and another one ends: as soon as it is made, if that is later."""

    def __init__(self, make: Callable[[], T], end: Callable[[T], object]) -> None:
        self._make, self._end = make, end
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._is_wanted = True

    def make(self) -> T:
        """Make it, once. Blocks."""
        made = self._make()
        with self._lock:
            self._made.append(made)
            is_wanted = self._is_wanted
        if not is_wanted:
            self._end(made)
        return made

    def end(self) -> None:
        """End it. Blocks, but does not wait for `make`."""
        with self._lock:
            self._is_wanted = False
            made = list(self._made)
        for one in made:
            self._end(one)


class OpenUpload(Generic[UploadT]):
    """An upload, as an async context. Leaving the context closes the upload. Unless it was committed before,
    nothing has changed then, and its memory is free.

    The RPC may end at any time, also while a thread opens the upload or works on it.
    """

    def __init__(self, lanes: Lanes, open_it: Callable[[], UploadT]) -> None:
        """`open_it` makes the upload, in a thread."""
        self._lanes = lanes
        self._opened: Ended[UploadT] = Ended(open_it, lambda upload: upload.close())
        self._last: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Self:
        """Open the upload. Raises what the updater refuses."""
        try:
            self.upload = await self._lanes.weights(self._opened.make)
        except asyncio.CancelledError:
            await _in_lane(self._lanes, self._opened.end)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the upload. This waits until it is closed, so that the next one is not refused."""
        self._last = None
        await _in_lane(self._lanes, self._opened.end)

    def start(self, work: Callable[[], object]) -> None:
        """Begin work on the upload in a thread. `last` must have been awaited since the work before."""
        assert self._last is None, "one thing is done after the other"
        self._last = self._lanes.weights(work)
        self._last.add_done_callback(_notice)

    async def last(self) -> Any:
        """Wait for the work that was begun last. Returns what it returned, and None if there is none. Raises
        what it raised.
        """
        if self._last is None:
            return None
        try:
            return await self._last
        finally:
            self._last = None


async def outcome_of(lanes: Lanes, ask: Callable[[], Future[T]]) -> T:
    """Ask the engine for a change, in a thread, and wait until it was made. If the RPC ends before that, the
    change is taken back, unless it is being made already.
    """
    asked: Ended[Future[T]] = Ended(ask, lambda future: future.cancel())
    try:
        # Shielded, because cancelling frees memory, which is not done on the event loop.
        return await asyncio.shield(asyncio.wrap_future(await lanes.weights(asked.make)))
    except asyncio.CancelledError:
        await _in_lane(lanes, asked.end)
        raise
    finally:
        del asked  # an error refers to this frame, and this variable to the error


async def _in_lane(lanes: Lanes, end: Callable[[], None]) -> None:
    """Have something ended in a thread, also if this task is cancelled meanwhile."""
    try:
        ending = lanes.weights(end, weight=0)
    except RuntimeError:  # the server has ended, and with it its threads
        end()
    else:
        await asyncio.shield(ending)


def _notice(work: asyncio.Future[Any]) -> None:
    """Look at the error of work that maybe nobody waits for any more; asyncio would log it."""
    if not work.cancelled():
        work.exception()
