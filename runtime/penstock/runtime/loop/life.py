"""Whether an engine takes requests, and why not if it does not. No jax."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from penstock.runtime.errors import Draining, EngineDead, EngineFailure, NotReady, WeightsIncomplete

log = logging.getLogger(__name__)


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
        """Raises EngineDead if the engine is dead."""
        failure = self.failure
        if failure is not None:
            raise EngineDead(f"the engine is dead: {failure}") from failure

    def check_running(self) -> None:
        """Raises EngineDead, Draining or NotReady unless the engine's thread runs and will go on."""
        self.check_alive()
        if self.is_stopping:
            raise Draining
        if self.thread is None:
            raise NotReady

    def check_takes_requests(self) -> None:
        """Raises EngineDead, Draining, NotReady or WeightsIncomplete unless requests are taken."""
        self.check_running()
        if self.is_draining:
            raise Draining
        if self.weights_problem is not None:
            raise WeightsIncomplete(self.weights_problem)

    def watch(self, callback: Callable[[], None]) -> bool:
        """Keeps a callback for `die`. False if the engine is dead, so that it would never be called."""
        if self.is_dead:
            return False
        self._watches.append(callback)
        return True

    def die(self, failure: EngineFailure) -> Sequence[Callable[[], None]]:
        """Makes the engine dead. Returns the callbacks, which are to be called without the lock."""
        self._died_of = failure
        watches, self._watches = self._watches, []
        return watches

    def watch_ready(self, callback: Callable[[], None]) -> None:
        """Keeps a callback for `tell_ready`."""
        self._ready_watches.append(callback)

    def tell_ready(self) -> None:
        """Tells those who watch that `is_ready` may have changed. To be called without the lock."""
        for watch in self._ready_watches:
            try:
                watch()
            except BaseException:  # the others are yet to be told
                log.exception("a watch of the engine's readiness failed")
