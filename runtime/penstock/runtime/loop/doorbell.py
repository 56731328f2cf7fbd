"""What wakes a thread that has nothing to do. No jax."""

from __future__ import annotations

import contextlib
import queue


class Doorbell:
    """One thread sleeps, any may ring, and no ring is lost.

    To ring a condition takes a lock, and who rings may be a destructor that the garbage collector runs on the
    very thread that holds it. `SimpleQueue.put` is made for that: it takes no lock that it could meet again.

    The sleeper, who looks for work at things that others change:

        bell.listen()
        if there is no work:
            bell.sleep(timeout_s)
        bell.answer()

    Others change something first and ring then. So either the sleeper sees the change, or the ring wakes it.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._listening = False

    def ring(self) -> None:
        """Wake the sleeper; costs nothing while it is awake. From any thread, also within a destructor."""
        if self._listening:
            self._rings.put(None)

    def listen(self) -> None:
        """From now on rings count."""
        self._listening = True

    def sleep(self, timeout_s: float) -> None:
        """Until a ring since `listen`, or for `timeout_s` seconds."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)

    def answer(self) -> None:
        """Awake: rings do not count until the next `listen`."""
        self._listening = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._rings.get_nowait()
