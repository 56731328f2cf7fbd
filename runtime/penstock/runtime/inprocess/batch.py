"""Many prompts at once: as many of them in the engine as keep it busy, the others after them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from tqdm import tqdm

from penstock.runtime.errors import QueueFull
from penstock.runtime.inprocess.active_ids import EmbeddedEngine
from penstock.runtime.inprocess.streams import RunningRequest, SinkOf
from penstock.runtime.prompting.jobs import Job, PreparedJob, prepare_job
from penstock.runtime.prompting.results import Generation
from penstock.runtime.requests.request import StepOutput

Item = tuple[int, int, Sequence[StepOutput]]
"""(number of a job, index of its output, what a step made of it)."""


class Batch:
    """The jobs of a list, some of which run. It knows nothing of threads: who drives it calls `fill` until
    that says that nothing more fits, then `take` with the next item of its inbox, and so on until `is_done`.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        jobs: Sequence[Job],
        sinks_of: Callable[[int], SinkOf],
        bar: tqdm[NoReturn],
    ) -> None:
        """`sinks_of` makes the sinks of the job of a number, which bring items to whoever drives the batch.
        `bar` is moved on by one for each job that ended.
        """
        self._engine = engine
        self._jobs = jobs
        self._sinks_of = sinks_of
        self._bar = bar
        self._most = 2 * engine.config.max_num_seqs
        """Outputs in the engine at once: those that run, and as many that take their places at once."""
        self._prepared: PreparedJob | None = None
        self._next = 0
        self._lock = threading.Lock()
        self._closed = False
        self._running: dict[int, RunningRequest] = {}
        self._ended: dict[int, Generation] = {}

    @property
    def is_done(self) -> bool:
        """Whether every job has ended."""
        return len(self._ended) == len(self._jobs)

    def fill(self) -> None:
        """Start as many jobs as may run. Raises what is refused; a queue that others have filled is waited
        for, as long as something of this list runs.
        """
        while self._next < len(self._jobs) and self._num_outputs() < self._most:
            job = self._jobs[self._next]
            if self._prepared is None:
                self._prepared = prepare_job(self._engine, job)
            try:
                if not self._start(self._prepared):
                    return
            except QueueFull:
                if not self._running:
                    raise
                return
            self._prepared = None
            self._next += 1

    def _start(self, prepared: PreparedJob) -> bool:
        """Submit the next job; false where the batch was closed meanwhile."""
        with self._lock:
            if self._closed:
                return False
            sinks = self._sinks_of(self._next)
            self._running[self._next] = RunningRequest(self._engine, prepared, sinks)
            return True

    def _num_outputs(self) -> int:
        return sum(request.num_unread for request in self._running.values())

    def take(self, number: int, index: int, output: StepOutput) -> None:
        """Take in what a step made of an output of the job of that number. Raises the error that it ended
        with.
        """
        request = self._running[number]
        request.take(index, output)
        if not request.num_unread:
            self._ended[number] = self._running.pop(number).generation()
            self._bar.update()

    def results(self) -> list[Generation]:
        """Return one result for each job, in their order."""
        return [self._ended[number] for number in range(len(self._jobs))]

    def close(self) -> None:
        """Cancel what still runs. `fill` may be at work on another thread: then it starts nothing more."""
        with self._lock:
            self._closed = True
            for request in self._running.values():
                request.leave()
        self._bar.close()


def generate_all(engine: EmbeddedEngine, jobs: Sequence[Job], show_progress: bool | None) -> list[Generation]:
    """Run every job to its end; the results are in the order of the jobs. The first error ends all of them
    and is raised.
    """
    inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
    batch = Batch(engine, jobs, _sinks(inbox), progress_bar(engine, len(jobs), show_progress))
    try:
        while not batch.is_done:
            batch.fill()
            number, index, outputs = inbox.get()
            for output in outputs:
                batch.take(number, index, output)
        return batch.results()
    finally:
        batch.close()


def _sinks(inbox: queue.SimpleQueue[Item]) -> Callable[[int], SinkOf]:
    return lambda number: lambda index: lambda outputs: inbox.put((number, index, outputs))


def progress_bar(engine: EmbeddedEngine, num_prompts: int, show_progress: bool | None) -> tqdm[NoReturn]:
    """Make a bar of the prompts that ended, on a terminal. None: if the engine's options say so."""
    if show_progress is None:
        show_progress = engine.config.show_progress
    return tqdm(
        total=num_prompts,
        desc="Generating",
        unit="prompt",
        disable=not show_progress or None,  # None: hidden where stderr is not a terminal
    )
