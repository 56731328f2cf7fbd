"""A thread that fills masks. If one takes long, the thread can be left behind with it."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from penstock.runtime.requests.constraint import Mask, TokenConstraint

Rows = Mapping[int, TokenConstraint]


class Ahead(NamedTuple):
    """The tokens that are proposed for a row, and the rows of the masks behind each of them."""

    rows: range
    token_ids: tuple[int, ...]


RowsAhead = Mapping[int, Ahead]
NOTHING_AHEAD: RowsAhead = {}
FillRows = Callable[[Rows, Mask, RowsAhead], Mapping[int, Exception]]
_NICE = 10
"""Priority of a thread that was left behind: it gets about a tenth of a processor that others want too."""


class Job:
    """Batches of rows whose masks are to be filled, one batch after the other."""

    def __init__(self, batches: Sequence[Rows], masks: Mask, ahead: RowsAhead = NOTHING_AHEAD) -> None:
        self.batches = batches
        self.masks = masks
        self.ahead = ahead
        self.done: set[int] = set()
        """Rows that were filled, or that have an error."""
        self.errors: dict[int, Exception] = {}
        self.failure: BaseException | None = None
        """An error that no row caused: a bug."""
        self._lock = threading.Lock()
        self._left = False
        self._current: Rows = {}
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self, seconds: float) -> bool:
        """Wait for the job's end. Returns whether it came within that time."""
        if not self._ended.acquire(timeout=seconds):
            return False
        self._ended.release()
        return True

    def leave(self) -> tuple[Rows, Job]:
        """Stop the job after its current batch, because nobody waits any longer. Returns the rows of that
        batch, and a job with what was done until now, which does not change any more.
        """
        with self._lock:
            self._left = True
            until_now = Job((), self.masks)
            until_now.done, until_now.errors = set(self.done), dict(self.errors)
            return self._current, until_now

    def run(self, fill: FillRows) -> None:
        """Fill the batches, on the thread that does so."""
        try:
            for batch in self.batches:
                with self._lock:
                    if self._left:
                        return
                    self._current = batch
                errors = fill(batch, self.masks, self.ahead)
                with self._lock:
                    self.errors.update(errors)
                    self.done.update(batch)
                    self._current = {}
        except BaseException as error:  # noqa: BLE001  the caller, which waits, raises it again
            self.failure = error
        finally:
            self._ended.release()


class MaskThread:
    """One thread. It ends with `close`, or after what it does when it is left behind."""

    def __init__(self, fill: FillRows) -> None:
        self._fill = fill
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # As a daemon, a thread whose mask does not end cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="penstock-masks", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def cpu_s(self) -> float:
        """Return the processor time that the thread has used, in seconds. It does not grow while other
        threads have the processor.
        """
        ident = self._thread.ident
        try:
            return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))
        except OSError:  # it has ended
            return math.inf

    def slow_down(self) -> None:
        """Leave the thread behind: it does what it has at a low priority, and ends."""
        with contextlib.suppress(OSError, TypeError):  # it has ended, or not begun
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _NICE)  # type: ignore[arg-type]
        self.close()

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self._fill)
