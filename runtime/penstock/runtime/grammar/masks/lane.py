"""A thread that fills masks, and may be left behind with one that takes long."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from penstock.runtime.requests.constraint import Mask, TokenConstraint

Rows = Mapping[int, TokenConstraint]
FillRows = Callable[[Rows, Mask], Mapping[int, Exception]]
_NICE = 10
"""A thread that was left behind gets about a tenth of a processor that others want."""


class Job:
    """Batches of rows to be filled, one batch after the other."""

    def __init__(self, batches: Sequence[Rows], masks: Mask) -> None:
        self.batches = batches
        self.masks = masks
        self.done: set[int] = set()
        """Rows that were filled, or have an error."""
        self.errors: dict[int, Exception] = {}
        self.failure: BaseException | None = None
        """A bug, which was no row's."""
        self._lock = threading.Lock()
        self._left = False
        self._current: Rows = {}
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self, seconds: float) -> bool:
        """Whether it came to its end within that time."""
        if not self._ended.acquire(timeout=seconds):
            return False
        self._ended.release()
        return True

    def leave(self) -> tuple[Rows, Job]:
        """Nobody waits any longer: begin no other batch. Returns the rows that are being filled now, and
        what was done until now, which does not change any more.
        """
        with self._lock:
            self._left = True
            until_now = Job((), self.masks)
            until_now.done, until_now.errors = set(self.done), dict(self.errors)
            return self._current, until_now

    def run(self, fill: FillRows) -> None:
        """On the thread of a lane."""
        try:
            for batch in self.batches:
                with self._lock:
                    if self._left:
                        return
                    self._current = batch
                errors = fill(batch, self.masks)
                with self._lock:
                    self.errors.update(errors)
                    self.done.update(batch)
                    self._current = {}
        except BaseException as error:  # noqa: BLE001  raised again by who waits
            self.failure = error
        finally:
            self._ended.release()


class Lane:
    """One thread. It ends with `close`, or after what it does when it is left behind."""

    def __init__(self, fill: FillRows) -> None:
        self._fill = fill
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # A daemon: a mask that will not end must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="penstock-masks", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def cpu_s(self) -> float:
        """Processor time that the thread has used; it does not grow while others have the processor."""
        ident = self._thread.ident
        try:
            return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))
        except OSError:  # it has ended
            return math.inf

    def slow_down(self) -> None:
        """It is left behind: do what it has, later than others, and end."""
        with contextlib.suppress(OSError, TypeError):  # it has ended, or not begun
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _NICE)  # type: ignore[arg-type]
        self.close()

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self._fill)
