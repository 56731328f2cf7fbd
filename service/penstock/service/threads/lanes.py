"""Threads for work that blocks: one lane for each kind of work, each with a bound on how much work it
accepts.

Work on what callers write may take seconds, up to its limit: templates, grammars, long lists of words,
megabytes of text. If it ran on the threads that tokenize everybody's prompts, a handful of such requests
would keep all others waiting. A lane refuses work above its bound at once (Busy), instead of keeping it for
long.

`in_thread` runs work that no lane bounds, and `on_this_loop` leads from a thread back to an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, cast

from penstock.runtime.machine.processors import available_processors
from penstock.service.errors import Busy
from penstock.service.limits.admission import Pace

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


MIB = 1024 * 1024
INLINE_BYTES = 4096
"""Work on at most this many bytes of a message is done on the event loop: it takes well under a
millisecond.
"""
LONG_CHARS = 500_000
"""Texts longer than this have a lane of their own: they take seconds, and most only come to be cut.
`Lanes.fit` raises the limit for a long context.
"""
MOST_TOKEN_CHARS = 8
"""Characters that a token has on average in an honest text."""
MOST_TEMPLATES = 8
"""How many callers' own templates may be rendered, or wait for that, at once."""
IMAGE_BYTES = MIB
"""What reading one image counts for, in bytes, beside the message that brought it: its pixels are many more
than its bytes.
"""
MOST_WEIGHTS = 64
"""How many pieces of work on weight updates, of all callers, may run or wait at once."""
MESSAGE_BYTES: ContextVar[int] = ContextVar("message_bytes", default=0)
"""The size of the request message of the RPC that this task serves."""


class LaneMeters(Protocol):
    """Counts what lanes do. Any thread may call it."""

    def has_lanes(self, names: Iterable[str]) -> None:
        """Note that these are all lanes."""

    def lane_refused(self, lane: str) -> None:
        """Note that a piece of work was refused."""

    def lane_done(self, lane: str, seconds: float) -> None:
        """Note that a piece of work was done, in this time since it was given to the lane."""


class Lane:
    """The threads for one kind of work. Used on the event loop. Threads are started when they are needed."""

    def __init__(self, name: str, num_threads: int, most: int, meters: LaneMeters | None = None) -> None:
        """`most` bounds the work that runs or waits, in the unit of `run`'s weights."""
        self.name, self.most = name, most
        self._meters = meters
        self._pool = ThreadPoolExecutor(num_threads, f"penstock-{name}")
        self._pace = Pace()

    async def run(self, work: Callable[[], T], weight: int = 1) -> T:
        """Return `work()`, called on one of the threads. Raises Busy if the lane would have too much work;
        one piece of work alone is never too much.

        Work whose caller gives up before it has begun is dropped. Work that has begun runs to its end, and
        counts until then.
        """
        return await self.begin(work, weight)

    def begin(self, work: Callable[[], T], weight: int = 1) -> asyncio.Future[T]:
        """Do the same as `run`, but do not wait for it. A weight of 0 is for work that must not be
        refused.
        """
        held = self._pace.active
        if held and weight and held + weight > self.most:
            if self._meters is not None:
                self._meters.lane_refused(self.name)
            raise Busy(self.name, self.most, self._pace.retry_after_s(weight))
        return self._begun(work, weight)

    def _begun(self, work: Callable[[], T], weight: int) -> asyncio.Future[T]:
        """Start the work and return its future, which no frame of ours keeps. An error of the work refers to
        the frames that it went through, and the future to the error; such a cycle would keep the request in
        memory until a garbage collection.
        """
        loop = asyncio.get_running_loop()
        future = self._pool.submit(_without_stop_iteration, work)
        self._pace.entered(weight)
        began_s = time.monotonic()

        def release(done: Future[Any]) -> None:
            if self._meters is not None and not done.cancelled():
                self._meters.lane_done(self.name, time.monotonic() - began_s)
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody uses lanes any more
                loop.call_soon_threadsafe(self._pace.left, weight)

        future.add_done_callback(release)
        return asyncio.wrap_future(future)

    @property
    def held(self) -> int:
        """How much work runs or waits."""
        return self._pace.active

    def close(self) -> None:
        """Accept no more work, and drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _without_stop_iteration(work: Callable[[], T]) -> T:
    """Do work, and make a RuntimeError of a StopIteration, as generators do. asyncio cannot hand on a
    StopIteration: whoever awaits the work would wait for ever.
    """
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("work in a lane raised StopIteration") from error


def _image_threads() -> int:
    """Choose few threads: each may need a gigabyte for the pixels of one image, and takes a processor from
    the model on a CPU.
    """
    return max(2, min(8, available_processors() // 4))


class Lanes:
    """The lanes of one server."""

    def __init__(self, meters: LaneMeters | None = None, max_message_bytes: int = 8 * MIB) -> None:
        """`max_message_bytes` is the size of the largest message, of which several may wait."""

        def lane(name: str, num_threads: int, most: int) -> Lane:
            return Lane(name, num_threads, most, meters)

        quick = min(32, available_processors() + 4)
        # Templates are rendered one after the other, each in at most a second (`chat.template_sandbox`). The
        # bound is therefore the longest time that an honest caller waits behind hostile ones.
        self._templates = lane("templates", 4, MOST_TEMPLATES)
        self._heavy = lane("heavy", 64, 1024)  # most of them wait: the compiler of grammars has few threads
        self._convert = lane("convert", 4, max(64 * MIB, 8 * max_message_bytes))
        self._texts = lane("texts", quick, 64 * MIB)
        self._long_texts = lane("long-texts", 4, 32 * MIB)
        self._images = lane("images", _image_threads(), max(256 * MIB, 8 * max_message_bytes))
        self._weights = lane("weights", 4, MOST_WEIGHTS)
        self._long_chars = LONG_CHARS

        texts = (self._texts, self._long_texts)
        lanes = (self._templates, self._heavy, self._convert, *texts, self._images, self._weights)
        self.by_name = {lane.name: lane for lane in lanes}
        """All lanes, by the name that a refusal has as its `limit`."""
        if meters is not None:
            meters.has_lanes(self.by_name)

    def fit(self, max_model_len: int) -> None:
        """Treat texts that may fill a context of `max_model_len` tokens as ordinary ones."""
        self._long_chars = max(LONG_CHARS, max_model_len * MOST_TOKEN_CHARS)

    async def template(self, work: Callable[[], T]) -> T:
        """Run work on a caller's own template."""
        return await self._templates.run(work)

    async def heavy(self, work: Callable[[], T]) -> T:
        """Run other work that may take seconds."""
        return await self._heavy.run(work)

    async def convert(self, work: Callable[[], T], num_bytes: int) -> T:
        """Run work whose time grows with the size of a message, or of a part of one. Small work is done at
        once, on the event loop.
        """
        return work() if num_bytes <= INLINE_BYTES else await self._convert.run(work, num_bytes)

    async def text(self, work: Callable[[], T], num_chars: int) -> T:
        """Run work on a text of `num_chars` characters, or work that takes as long."""
        lane = self._texts if num_chars <= self._long_chars else self._long_texts
        return await lane.run(work, num_chars)

    async def images(self, work: Callable[[], T], num_images: int, num_bytes: int) -> T:
        """Run work on a prompt with images, which came in a message of `num_bytes` bytes."""
        return await self._images.run(work, num_bytes + IMAGE_BYTES * num_images)

    def weights(self, work: Callable[[], T], weight: int = 1) -> asyncio.Future[T]:
        """Begin work on a weight update, such as the decoding and writing of a chunk. A weight of 0 is for
        work that must not be refused.
        """
        return self._weights.begin(work, weight)

    def close(self) -> None:
        """Accept no more work, and drop what has not begun."""
        for lane in self.by_name.values():
            lane.close()
