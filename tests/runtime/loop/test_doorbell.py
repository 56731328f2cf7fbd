"""The bell that wakes the engine's thread."""

from __future__ import annotations

import threading

from penstock.runtime.loop.guard import Doorbell

LONG_S = 60.0


def slept(bell: Doorbell) -> threading.Thread:
    """Start a thread that is in `sleep`, or about to be."""
    thread = threading.Thread(target=bell.sleep, args=(LONG_S,))
    thread.start()
    return thread


def test_a_ring_wakes_the_sleeper() -> None:
    bell = Doorbell()
    bell.listen()
    thread = slept(bell)
    bell.ring()
    thread.join(LONG_S / 2)
    assert not thread.is_alive()


def test_a_ring_between_listening_and_sleeping_is_not_lost() -> None:
    bell = Doorbell()
    bell.listen()
    bell.ring()
    thread = slept(bell)
    thread.join(LONG_S / 2)
    assert not thread.is_alive()


def test_rings_while_awake_leave_nothing_behind() -> None:
    """Otherwise every request of a busy hour would wake the idle engine once later."""
    bell = Doorbell()
    bell.listen()
    for _ in range(3):
        bell.ring()
    bell.answer()
    bell.ring()
    bell.listen()
    thread = slept(bell)
    thread.join(0.05)
    assert thread.is_alive(), "no ring came after `listen`, so the thread must sleep"
    bell.ring()
    thread.join(LONG_S / 2)
    assert not thread.is_alive()
