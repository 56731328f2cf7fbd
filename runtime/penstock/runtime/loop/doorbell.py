"""Wakes a thread that has nothing to do. No jax."""

from __future__ import annotations

import contextlib
import queue


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
        """Wakes the thread that sleeps; costs nothing while it is awake. Any thread may call this, also in a
        destructor.
        """
        if self._listening:
            self._rings.put(None)

    def listen(self) -> None:
        """Makes rings count from now on."""
        self._listening = True

    def sleep(self, timeout_s: float) -> None:
        """Sleeps until a ring since `listen`, or for `timeout_s` seconds."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)

    def answer(self) -> None:
        """Makes rings not count until the next `listen`."""
        self._listening = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._rings.get_nowait()
