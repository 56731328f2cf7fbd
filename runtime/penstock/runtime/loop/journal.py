"""The journal: what happens in the engine, told to its readers on a thread of its own. No jax.

`Recording` writes what the loop does. Writing costs an append, so that the engine's thread may do it at every
step. All that readers do with the entries, such as adding them up or making spans of them, is done on the
journal's thread.

Entries are named tuples because the engine's thread makes them. They hold what the engine has anyway, and
copy nothing. Their `at_ns` are monotonic ns. Ids are the engine's ids of outputs: see `output_id`.

An output that is queued has one `Queued`, then the `StepRecord`s in which it has rows, and last one `Ended`
or one `Cancelled`. The tokens of its outputs in the records are those that `num_tokens` of the last entry
counts. A record that comes after its last entry may still have a row of it, of a step that was dispatched
before its end was known; such a row made nothing.

The record of a step is complete only when the sinks have its outputs, because telling those who watch must
not delay those who wait for tokens. What else happens between the commit of a step and that, such as the end
of an output with this step's tokens, is held back by `Recording` until the record is written. So the entries
of an output come in their natural order: it is queued, makes tokens, and ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.runtime.loop.interface import Applied, Observer, Paused, Resumed, StepRecord, WeightsBroken
from penstock.runtime.loop.stepping import Done
from penstock.runtime.requests.request import Request, RequestTiming, StepOutput
from penstock.runtime.scheduling.load import Load, LostPages
from penstock.runtime.scheduling.plan import Plan, Speculated, guesses_of
from penstock.runtime.scheduling.text_windows import TextWindows

__all__ = ["Cancelled", "Changed", "Ended", "Entry", "Noted", "Preempted", "Queued", "StepRecord"]

log = logging.getLogger(__name__)


class Queued(NamedTuple):
    """An output was queued."""

    at_ns: int
    request: Request


class Ended(NamedTuple):
    """An output ended, in any way but a cancellation: it finished, was aborted, or failed."""

    at_ns: int
    request: Request
    output: StepOutput
    """The last one that its sink gets, with `finish` or `error`, and with `timing`."""
    num_tokens: int
    """How many tokens were generated for it."""


class Cancelled(NamedTuple):
    """Nobody reads an output any more, so it was dropped without a last output."""

    at_ns: int
    request: Request
    timing: RequestTiming
    num_tokens: int
    """How many tokens were generated for it."""


class Preempted(NamedTuple):
    """Running outputs lost their pages and went back to the queue, because of a plan or of a change with the
    policy RECOMPUTE.
    """

    at_ns: int
    request_ids: tuple[str, ...]
    num_computed: tuple[int, ...]
    """For each of them, how many of its positions were computed, or were being computed."""


class Changed(NamedTuple):
    """A change was made between two steps, or an update in place failed halfway."""

    at_ns: int
    what: Applied | Paused | Resumed | WeightsBroken


class Noted(NamedTuple):
    """A note that is not the engine's: whoever reads the journal may write into it what it wants to find in
    order among the entries. Other readers pass over it.
    """

    at_ns: int
    what: object


Entry = StepRecord | Queued | Ended | Cancelled | Preempted | Changed | Noted

Reader = Callable[[Sequence[Entry]], None]
"""Takes the next entries, in the order in which they were written. Its calls never overlap."""

INTERVAL_S = 0.1
"""How long an entry waits at most before the journal's thread reads it, if that thread is not busy."""
BATCH = 1_000
"""So many entries are read at once, and from so many on they are read at once without waiting."""


class Journal:
    """Takes entries from any thread, and hands them to its readers. While there is no reader it keeps
    nothing.
    """

    def __init__(self, most: int = 16_384) -> None:
        """At most `most` entries wait to be read; more are dropped, and counted."""
        self.is_read = False
        """Whether there is a reader. Who writes should look here first, and then need not make an entry."""
        self.dropped = 0
        """How many entries were dropped because too many waited to be read."""
        self._most = most
        self._entries: deque[Entry] = deque()
        self._dropping = threading.Lock()  # of `dropped` alone
        self._readers: list[Reader] = []
        self._reading = threading.RLock()
        self._is_reading = False
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._before_flush: Callable[[], None] = lambda: None

    # -- writing --

    def write(self, entry: Entry) -> None:
        """Add an entry. It never waits. Without a reader, nothing is kept."""
        if not self.is_read:
            return
        num_waiting = len(self._entries)
        if num_waiting >= self._most:
            with self._dropping:
                self.dropped += 1
            return
        self._entries.append(entry)
        if num_waiting >= BATCH and not self._wake.is_set():
            self._wake.set()

    def before_flush(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the beginning of each `flush`: it waits until the writer has written what it
        holds back.
        """
        self._before_flush = callback

    # -- reading --

    def read_by(self, reader: Reader) -> Callable[[], None]:
        """Add a reader, which gets the entries that are written from now on. It is called on the journal's
        thread, every INTERVAL_S or when BATCH entries wait, and by whoever flushes. If it raises, that is
        logged, and it gets no more entries.

        Returns a function that ends it, after it has got what was written before. This may be called twice,
        and by the reader itself.
        """
        with self._reading:
            if self._is_closed:
                raise RuntimeError("the journal is closed")
            if not self._is_reading:
                self._read()  # by the readers that are there already
            self._readers.append(reader)
            self.is_read = True
        self._wake.set()

        def end() -> None:
            with self._reading:
                if not self._is_reading:
                    self._read()
                self._drop(reader)

        return end

    def flush(self) -> None:
        """Block until the readers have got all entries that were written before, whether the journal's thread
        runs or not. A reader must not call this: RuntimeError.
        """
        self._before_flush()
        with self._reading:
            if self._is_reading:
                raise RuntimeError("a reader of the journal must not flush it")
            self._read()

    def _read(self) -> None:
        """Hand the entries that wait now to the readers; with the lock of reading held."""
        entries = self._entries
        self._is_reading = True
        try:
            left = len(entries)
            while left > 0 and entries:  # there are none any more where the last reader ended
                batch = [entries.popleft() for _ in range(min(left, len(entries), BATCH))]
                left -= len(batch)
                for reader in tuple(self._readers):
                    try:
                        reader(batch)
                    except BaseException:  # the other readers, and the engine, go on
                        log.exception("a reader of the journal failed; it gets no more entries")
                        self._drop(reader)
        finally:
            self._is_reading = False

    def _drop(self, reader: Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        if not self._readers:
            self.is_read = False
            self._entries.clear()

    # -- life --

    def start(self) -> None:
        """Start the thread that reads. RuntimeError if it was started before."""
        if self._thread is not None:
            raise RuntimeError("the journal was started before")
        self._thread = threading.Thread(target=self._run, name="penstock-journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Have everything read that was written, and end the thread and the readers. May be called twice."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._reading:
            self._read()
            for reader in tuple(self._readers):
                self._drop(reader)

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(INTERVAL_S if self.is_read else None)
            self._wake.clear()
            with self._reading:
                self._read()


_LONGEST_WAIT_S = 10.0
"""How long `wait_until_written` waits for sinks that block, which they must not."""


class Recording:
    """Tells one journal and one observer what happens. All methods but `delivered` and `wait_until_written`
    are called with the engine's lock held.
    """

    def __init__(self, journal: Journal, observer: Observer | None, changed: threading.Condition) -> None:
        """Take as `changed` a condition over the engine's lock; it is notified when a step's record is
        written.
        """
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
        """Note that an output was queued."""
        if self._journal.is_read:
            self._write(Queued(time.monotonic_ns(), request))

    def ended(self, request: Request, output: StepOutput, num_tokens: int) -> None:
        """Note that the scheduler made the last output of a request, after it had generated so many tokens
        for it.
        """
        if self._journal.is_read:
            self._write(Ended(time.monotonic_ns(), request, output, num_tokens))

    def cancelled(self, request: Request, timing: RequestTiming, num_tokens: int) -> None:
        """Note that a request was dropped because nobody reads it."""
        if self._journal.is_read:
            self._write(Cancelled(timing.finished_ns, request, timing, num_tokens))

    def preempted(self, lost: Sequence[LostPages]) -> None:
        """Note that these sequences lost their pages; there may be none."""
        if lost and self._journal.is_read:
            ids = tuple(each.request_id for each in lost)
            computed = tuple(each.num_computed for each in lost)
            self._write(Preempted(time.monotonic_ns(), ids, computed))

    def changed(self, what: Applied | Paused | Resumed | WeightsBroken) -> None:
        """Note that a change was made."""
        if self._journal.is_read:
            self._write(Changed(time.monotonic_ns(), what))

    def _write(self, entry: Entry) -> None:
        if self._step is None:
            self._journal.write(entry)
        else:
            self._held_back.append(entry)

    # -- steps --

    def committed(self, done: Done, outputs: Sequence[StepOutput], load: Load) -> None:
        """Note that the scheduler took in the tokens of a step and made these outputs, after which it is as
        busy as `load` says. Called on the engine's thread, which calls `delivered` before its next step. Does
        nothing if nobody sees the steps.
        """
        if self.is_on:
            self._thread = threading.get_ident()
            self._step = done, outputs, load, time.monotonic_ns()

    def delivered(self) -> None:
        """Note that the sinks have all outputs of the step that was committed last. Called on the engine's
        thread, without the lock.
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
        """Wait until the record of the step that was committed last is written. Does not wait on the
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


def _speculated(plan: Plan, token_ids: Sequence[Sequence[int]], outputs: Sequence[StepOutput]) -> Speculated:
    """Count what was proposed in a step with these samples, and accepted, for the outputs that had not
    ended.
    """
    counted = {output.request_id: len(output.token_ids) for output in outputs}
    most = max(len(row.proposed) for row in plan.rows)
    proposed, accepted = [0] * most, [0] * most
    for row, sampled in zip(plan.rows, token_ids, strict=True):
        if row.proposed and row.request_id in counted:
            num_accepted = min(counted[row.request_id], len(sampled) - 1)
            for place in range(len(row.proposed)):
                proposed[place] += 1
                accepted[place] += place < num_accepted
    return Speculated(plan.proposer, tuple(proposed), tuple(accepted))


def _guessed(
    plan: Plan, guessed: Sequence[Sequence[int]], outputs: Sequence[StepOutput]
) -> tuple[Speculated, ...]:
    """Count what was guessed in a window (`StepResult.guessed`), and accepted, for the outputs that had not
    ended.
    """
    counted = {output.request_id: len(output.token_ids) for output in outputs}
    steps = [
        step
        for row, of_row in zip(plan.rows, guessed, strict=True)
        for step in guesses_of(of_row[: counted.get(row.request_id, 0)])
    ]
    most = max((step.proposed for step in steps), default=0)
    if not most:
        return ()
    return (
        Speculated(
            TextWindows.name,
            tuple(sum(place < step.proposed for step in steps) for place in range(most)),
            tuple(sum(place < step.accepted for step in steps) for place in range(most)),
        ),
    )


def _record(done: Done, outputs: Sequence[StepOutput], load: Load, committed_ns: int) -> StepRecord:
    plan = done.planned.plan
    return StepRecord(
        plan,
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
        (_speculated(plan, done.result.token_ids, outputs),)
        if plan.proposer
        else _guessed(plan, done.result.guessed, outputs)
        if done.result.guessed
        else (),
    )
