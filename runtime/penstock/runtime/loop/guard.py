"""The lock under which the scheduler is touched, and how a change reaches those who wait for it. No jax."""

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
    for one plan or commit at most: tens of microseconds, or milliseconds when dozens of requests enter at
    once.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Told of what `EngineCore.drain` waits for."""
        self.doorbell = Doorbell()
        """What the engine's thread sleeps at when it has nothing to do."""
        self.broken: str | None = None
        """What the scheduler raised on a caller's thread, in words: the engine's thread is to end of it. The
        error itself is the caller's, and so are the frames of its traceback: they may be going on."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """To be entered with the lock held, around what a caller's thread changes in the scheduler.

        A scheduler that raised halfway through a change can be trusted no more, so the engine ends of what it
        raised. Refusals, which are PenstockErrors, change nothing.
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
