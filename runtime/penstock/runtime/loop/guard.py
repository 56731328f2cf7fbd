"""The lock under which the scheduler is touched, and how a change made on one thread reaches those that wait
for it. No jax.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from penstock.runtime.errors import PenstockError
from penstock.runtime.failing import describe
from penstock.runtime.loop.doorbell import Doorbell

log = logging.getLogger(__name__)


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
        """Surrounds whatever a caller's thread changes in the scheduler; to be entered with the lock held.

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
