"""Writes into the journal what the loop does, and shows each step to an embedder's observer. No jax.

A step's record is complete only when the sinks have its outputs, because telling those who watch must not
delay those who wait for tokens. What else happens between the commit of a step and that, such as the end of
an output with this step's tokens, is held back until the record is written. So the entries of an output come
in their natural order: it is queued, makes tokens, and ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from penstock.runtime.loop.interface import Applied, Observer, Paused, Resumed, StepRecord, WeightsBroken
from penstock.runtime.loop.journal.entries import Cancelled, Changed, Ended, Entry, Preempted, Queued
from penstock.runtime.loop.journal.journal import Journal
from penstock.runtime.loop.stepping import Done
from penstock.runtime.requests.request import Request, RequestTiming, StepOutput
from penstock.runtime.scheduling.load import Load, LostPages

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 10.0
"""How long `wait_until_written` waits for sinks that block, which they must not."""


class Recording:
    """Tells one journal and one observer what happens. All methods but `delivered` and `wait_until_written`
    are called with the engine's lock held.
    """

    def __init__(self, journal: Journal, observer: Observer | None, changed: threading.Condition) -> None:
        """`changed` is a condition over the engine's lock; it is notified when a step's record is written."""
        self._journal = journal
        self._observer = observer
        self._changed = changed
        self._step: tuple[Done, Sequence[StepOutput], Load, int] | None = None
        """The step that is committed and whose record is not written yet."""
        self._held_back: list[Entry] = []
        """What happened since that step was committed."""
        self._thread = 0
        """The engine's thread, once it has committed a step."""
        journal.before_flush(self.wait_until_written)

    @property
    def is_on(self) -> bool:
        """Whether anybody sees the steps."""
        return self._journal.is_read or self._observer is not None

    # -- outputs and changes --

    def queued(self, request: Request) -> None:
        """An output was queued."""
        if self._journal.is_read:
            self._write(Queued(time.monotonic_ns(), request))

    def ended(self, request: Request, output: StepOutput, num_tokens: int) -> None:
        """The scheduler made the last output of a request, after it had generated so many tokens for it."""
        if self._journal.is_read:
            self._write(Ended(time.monotonic_ns(), request, output, num_tokens))

    def cancelled(self, request: Request, timing: RequestTiming, num_tokens: int) -> None:
        """A request was dropped because nobody reads it."""
        if self._journal.is_read:
            self._write(Cancelled(timing.finished_ns, request, timing, num_tokens))

    def preempted(self, lost: Sequence[LostPages]) -> None:
        """These sequences lost their pages; there may be none."""
        if lost and self._journal.is_read:
            ids = tuple(each.request_id for each in lost)
            computed = tuple(each.num_computed for each in lost)
            self._write(Preempted(time.monotonic_ns(), ids, computed))

    def changed(self, what: Applied | Paused | Resumed | WeightsBroken) -> None:
        """A change was made."""
        if self._journal.is_read:
            self._write(Changed(time.monotonic_ns(), what))

    def _write(self, entry: Entry) -> None:
        if self._step is None:
            self._journal.write(entry)
        else:
            self._held_back.append(entry)

    # -- steps --

    def committed(self, done: Done, outputs: Sequence[StepOutput], load: Load) -> None:
        """The scheduler took in the tokens of a step and made these outputs, after which it is as busy as
        `load` says. Called on the engine's thread, which calls `delivered` before its next step. Does nothing
        if nobody sees the steps.
        """
        if self.is_on:
            self._thread = threading.get_ident()
            self._step = done, outputs, load, time.monotonic_ns()

    def delivered(self) -> None:
        """The sinks have all outputs of the step that was committed last. Called on the engine's thread,
        without the lock.
        """
        if self._step is None:
            return
        record = _record(*self._step)
        if self._observer is not None:
            try:
                self._observer.on_step(record)
            except BaseException:  # an observer must not end the requests
                log.exception("the observer failed; it will see no more steps")
                self._observer = None
        with self._changed:
            held_back, self._held_back = self._held_back, []
            self._journal.write(record)
            for entry in held_back:
                self._journal.write(entry)
            self._step = None  # last, because `wait_until_written` looks at it without the lock
            self._changed.notify_all()

    def wait_until_written(self) -> None:
        """Waits until the record of the step that was committed last is written. Does not wait on the
        engine's own thread, which writes it.
        """
        step = self._step
        if step is None or threading.get_ident() == self._thread:
            return
        if self._changed.acquire(timeout=_LONGEST_WAIT_S):  # a thread may hang while it holds the lock
            try:
                # A busy engine may have committed the next step before this thread wakes up.
                self._changed.wait_for(lambda: self._step is not step, _LONGEST_WAIT_S)
            finally:
                self._changed.release()


def _record(done: Done, outputs: Sequence[StepOutput], load: Load, committed_ns: int) -> StepRecord:
    return StepRecord(
        done.planned.plan,
        outputs,
        load,
        done.shape,
        done.planned.started_ns,
        done.planned.scheduled_ns,
        done.packed_ns,
        done.dispatched_ns,
        done.waiting_ns,
        done.waited_ns,
        committed_ns,
        time.monotonic_ns(),
    )
