"""What a flush waits for, and what not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.runtime.loop import journal as journal_module
from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.loop.journal import Entry, Journal, Recording
from penstock.runtime.loop.stepping import Done, Planned
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.plan import Plan, StepResult

WAIT_S = 60


def step(number: int) -> Done:
    result = StepResult((), ())
    planned = Planned(Plan(number, ()), started_ns=1, scheduled_ns=2)
    times: dict[str, Any] = {"packed_ns": 3, "dispatched_ns": 4, "waiting_ns": 5, "waited_ns": 6}
    return Done(planned=planned, result=result, shape=None, **times)


class SlowCondition(threading.Condition):
    """A condition whose waiters get the lock only after the engine has committed another step."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()
        self.may_wake = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        self.release()
        self.may_wake.wait(timeout)
        self.acquire()
        return True


def test_a_flush_does_not_wait_for_the_steps_that_are_committed_after_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "_LONGEST_WAIT_S", 10 * WAIT_S)
    journal, changed = Journal(), SlowCondition()
    steps = Recording(journal, None, changed)
    seen: list[int] = []

    def read(entries: Sequence[Entry]) -> None:
        seen.extend(entry.step_id for entry in entries if isinstance(entry, StepRecord))

    journal.read_by(read)
    with changed:
        steps.committed(step(0), (), Load.idle(1))
    flushing = threading.Thread(target=journal.flush, daemon=True)
    flushing.start()
    assert changed.waits.wait(WAIT_S)
    steps.delivered()
    with changed:
        steps.committed(step(1), (), Load.idle(1))
    changed.may_wake.set()
    flushing.join(WAIT_S)
    assert not flushing.is_alive()
    assert seen == [0]


def test_a_flush_waits_for_a_record_that_is_being_written() -> None:
    """The lock is held meanwhile, and a flush that sees nothing to wait for does not take it."""
    changed = threading.Condition()
    flushed = threading.Event()

    def flush() -> None:
        steps.wait_until_written()
        flushed.set()

    class SlowJournal(Journal):
        def write(self, entry: Entry) -> None:
            threading.Thread(target=flush, daemon=True).start()
            assert not flushed.wait(0.2)
            super().write(entry)

    journal = SlowJournal()
    steps = Recording(journal, None, changed)
    journal.read_by(lambda entries: None)
    with changed:
        steps.committed(step(0), (), Load.idle(1))
    steps.delivered()
    assert flushed.wait(WAIT_S)
