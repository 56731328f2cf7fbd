"""What the threads of an engine share: the lock under which the scheduler is touched, how a change made on
one thread reaches those that wait for it, and whether requests are taken. No jax.

Callers and the engine's thread take the lock of a `Guard`. `Doorbell` wakes the engine's thread, which sleeps
when it has nothing to do. `Life` says whether the engine runs and takes requests.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from penstock.runtime.errors import (
    Draining,
    EngineDead,
    EngineFailure,
    NotReady,
    PenstockError,
    WeightsIncomplete,
)
from penstock.runtime.failing import describe

log = logging.getLogger(__name__)

Annotate = Callable[..., AbstractContextManager[object]]
"""Makes a context whose block a profiler shows under this name, with these facts as keyword arguments."""

StepWatch = Callable[[int, int], None]
"""Is told of the end of a step, on the engine's thread: when its plan was begun, in monotonic ns, and how
many steps it held, which is 1 but for windows. It must not block, nor raise."""


def unannotated(_name: str, **_facts: int) -> AbstractContextManager[object]:
    """Return an `Annotate` for a loop that no profiler looks at."""
    return contextlib.nullcontext()


class Doorbell:
    """One thread sleeps, any thread may ring, and no ring is lost.

    A condition would need a lock to be notified, and the thread that rings may be in a destructor, which the
    garbage collector runs on the very thread that holds the lock. `SimpleQueue.put` is made for this: it
    takes no lock that it could meet again.

    The sleeping thread looks for work in values that other threads change:

            bell.listen()
            if there is no work:
                bell.sleep(timeout_s)
            bell.answer()

    The other threads first change something and then ring. So either the sleeping thread sees the change, or
    the ring wakes it.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._listening = False

    def ring(self) -> None:
        """Wake the thread that sleeps; that costs nothing while it is awake. Any thread may call this, also
        in a destructor.
        """
        if self._listening:
            self._rings.put(None)

    def listen(self) -> None:
        """Make rings count from now on."""
        self._listening = True

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a ring since `listen`, or for `timeout_s` seconds."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)

    def answer(self) -> None:
        """Make rings not count until the next `listen`."""
        self._listening = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._rings.get_nowait()


class Guard:
    """The engine's lock. It is never held while the device works or a constraint is asked, so a caller waits
    for at most one plan or commit: tens of microseconds, or milliseconds when dozens of requests enter at
    once.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified of everything that `EngineCore.drain` waits for."""
        self.doorbell = Doorbell()
        """Wakes the engine's thread, which sleeps when it has nothing to do."""
        self.broken: str | None = None
        """What the scheduler raised on a caller's thread, in words: the engine's thread must end because of
        it. The error itself belongs to the caller, and so do the frames of its traceback, which may still be
        running."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Surround whatever a caller's thread changes in the scheduler; to be entered with the lock held.

        A scheduler that raised halfway through a change cannot be trusted any more, so the engine ends.
        Refusals, which are PenstockErrors, change nothing.
        """
        try:
            yield
        except PenstockError:
            raise
        except BaseException as error:
            self.broken = self.broken or describe(error)
            log.exception("the scheduler broke on a caller's thread")
            raise
        finally:
            self.changed.notify_all()
            self.doorbell.ring()


class Life:
    """An engine is first new, then started, and in the end stopped or dead. Changes need the engine's lock;
    any thread may read this at any time.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        """The engine's thread, once it runs."""
        self.is_draining = False
        """Whether new requests are refused, while those that were taken go on."""
        self.is_stopping = False
        """Whether the engine's thread must end."""
        self.weights_problem: str | None = None
        """Why the weights cannot serve, if they cannot."""
        self._ready_watches: list[Callable[[], None]] = []
        self._died_of: EngineFailure | None = None
        self._watches: list[Callable[[], None]] = []

    @property
    def is_dead(self) -> bool:
        """Whether the engine's thread has failed. This is the first place where that can be seen."""
        return self._died_of is not None

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine is dead, if it is. This also covers a thread that is gone without a word, as after a
        fork.
        """
        thread = self.thread
        if self._died_of is None and thread is not None and not (thread.is_alive() or self.is_stopping):
            return EngineFailure("the engine's thread is gone, as after a fork")
        return self._died_of

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        thread = self.thread
        is_alive = thread is not None and thread.is_alive() and not self.is_dead
        return is_alive and not self.is_draining and self.weights_problem is None

    def check_alive(self) -> None:
        """Raise EngineDead if the engine is dead."""
        failure = self.failure
        if failure is not None:
            raise EngineDead(f"the engine is dead: {failure}") from failure

    def check_running(self) -> None:
        """Raise EngineDead, Draining or NotReady unless the engine's thread runs and will go on."""
        self.check_alive()
        if self.is_stopping:
            raise Draining
        if self.thread is None:
            raise NotReady

    def check_takes_requests(self) -> None:
        """Raise EngineDead, Draining, NotReady or WeightsIncomplete unless requests are taken."""
        self.check_running()
        if self.is_draining:
            raise Draining
        if self.weights_problem is not None:
            raise WeightsIncomplete(self.weights_problem)

    def watch(self, callback: Callable[[], None]) -> bool:
        """Keep a callback for `die`. False if the engine is dead, so that it would never be called."""
        if self.is_dead:
            return False
        self._watches.append(callback)
        return True

    def die(self, failure: EngineFailure) -> Sequence[Callable[[], None]]:
        """Make the engine dead. Returns the callbacks, which are to be called without the lock."""
        self._died_of = failure
        watches, self._watches = self._watches, []
        return watches

    def watch_ready(self, callback: Callable[[], None]) -> None:
        """Keep a callback for `tell_ready`."""
        self._ready_watches.append(callback)

    def tell_ready(self) -> None:
        """Tell those who watch that `is_ready` may have changed. To be called without the lock."""
        for watch in self._ready_watches:
            try:
                watch()
            except BaseException:  # the others are yet to be told
                log.exception("a watch of the engine's readiness failed")
