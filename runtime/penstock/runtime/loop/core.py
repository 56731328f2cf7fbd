"""EngineCore: token ids in, token ids out. What callers ask of an engine, on any thread.

The path of one request: `submit` checks it and puts it in the queue; `Scheduler.schedule` makes a plan of it
and its neighbours; the runner computes the plan; `Scheduler.commit` takes in the tokens; `Delivery` hands
them to the request's sink. All but the first is done by the engine's thread, in `step_loop`.

Locking: the scheduler is touched only under the engine's lock (`guard`). Whatever a request is told, in
whichever thread it was decided, goes through `Delivery` and is handed over by the engine's thread, in order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from penstock.runtime.errors import Draining, EngineFailure
from penstock.runtime.loop.delivery import Delivery
from penstock.runtime.loop.guard import Guard
from penstock.runtime.loop.intake import Intake
from penstock.runtime.loop.interface import (
    AbortOutcome,
    InFlightPolicy,
    Observer,
    Pulse,
    Runner,
    Sink,
    WeightsVersion,
)
from penstock.runtime.loop.life import Life
from penstock.runtime.loop.live_requests import LiveRequests
from penstock.runtime.loop.step_loop import StepLoop
from penstock.runtime.loop.stepping import Steps
from penstock.runtime.loop.weight_updates import Update, WeightUpdates, refuse
from penstock.runtime.requests.request import Finish, PreparedPrompt, Request
from penstock.runtime.scheduling.pacing import Pacer
from penstock.runtime.scheduling.scheduler import Load, Scheduler


class EngineCore:
    """Runs one scheduler on one runner in one thread. All public methods may be called from any thread."""

    def __init__(
        self,
        runner: Runner[Any],
        scheduler: Scheduler,
        *,
        vocab_size: int,
        observer: Observer | None = None,
        overlap: bool = True,
        pacer: Pacer | None = None,
    ) -> None:
        """`overlap`: dispatch a step before the one before is read. Without a `pacer` there are no windows,
        and no limit to the prompt tokens of a step.
        """
        self._runner = runner
        self._scheduler = scheduler
        self.guard = Guard()
        """The lock under which the scheduler is touched."""
        self._life = Life()
        self._intake = Intake(scheduler, vocab_size)
        self._delivery = Delivery(self.guard.changed)
        self._requests = LiveRequests(scheduler, self._delivery, self.guard.changed)
        self._updates = WeightUpdates(self.guard, scheduler, self._requests)
        self._loop = StepLoop(
            runner,
            Steps(
                runner,
                pacer or Pacer(0.0, 1),
                observer,
                most_in_flight=2 if overlap else 1,
                fixed_windows=bool(scheduler.config.window_steps),
            ),
            scheduler,
            guard=self.guard,
            life=self._life,
            delivery=self._delivery,
            requests=self._requests,
            updates=self._updates,
        )

    # -- state --

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._life.is_ready

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine died, if it did."""
        return self._life.failure

    def check_running(self) -> None:
        """Raises EngineDead, Draining or NotReady unless the engine's thread runs and will go on."""
        self._life.check_running()

    def pulse(self) -> Pulse:
        """Whether the engine's thread moves. Takes no lock, so it answers even if somebody hangs with it."""
        thread = self._life.thread
        return Pulse(
            progress=self._loop.progress,
            has_work=self._loop.has_work and not self._life.is_dead,
            thread_id=None if thread is None else thread.ident,
        )

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call this once when the engine dies, before its requests are told; at once if it is dead. It may be
        called on any thread, and must not block.
        """
        with self.guard.lock:
            is_kept = self._life.watch(callback)
        if not is_kept:
            callback()

    @property
    def weights(self) -> WeightsVersion:
        """The weights that serve now."""
        return self._updates.serving

    def load(self) -> Load:
        """A consistent snapshot of how busy the engine is. A dead engine has nothing left to do."""
        with self.guard.lock:
            if self._life.is_dead:
                return Load(0, 0, 0, 0, pages_total=self._scheduler.config.num_pages)
            if self._requests.has_cancelled:
                with self.guard.changing():
                    self._requests.drop_cancelled()
            return self._scheduler.load()

    def active_requests(self) -> Sequence[str]:
        """The ids of the requests that wait or run, in order of arrival."""
        with self.guard.lock:
            return self._scheduler.active_requests()

    def limit_prefill_chunk(self, size: int | None) -> None:
        """From the next step on: most prompt tokens of one request in a step; None: as many as its budget
        allows.
        """
        with self.guard.lock:
            self._scheduler.limit_prefill_chunk(size)

    def check(self) -> None:
        """Audit for tests; AssertionError tells what is wrong with the scheduler's books."""
        with self.guard.lock:
            self._scheduler.check()

    # -- requests --

    def prepare(self, request: Request) -> PreparedPrompt:
        """What `submit` does with a prompt and its sampling that takes the longer the longer they are, for
        callers with something better to do meanwhile, or with several outputs to submit. Raises nothing.
        """
        return self._intake.prepare(request)

    def submit(self, request: Request, sink: Sink, prepared: PreparedPrompt | None = None) -> None:
        """Queue a request; its outputs go to `sink`. Raises what the request or the engine's state forbid, at
        once. `prepared` is what `prepare` made of this very prompt, or ValueError; None: it is done now.
        """
        seq = self._intake.admit(request, prepared)
        with self.guard.lock, self.guard.changing():
            self._life.check_takes_requests()
            self._requests.drop_cancelled()
            self._requests.queue(seq, sink)

    def cancel(self, *request_ids: str) -> None:
        """Their readers are gone: free slots and pages, tell nobody. Unknown ids are ignored.

        This waits for nothing: the engine's thread does it before its next step, or whoever asks the engine
        for something before that, so that nobody sees these requests again. Outputs that were lined up before
        may still reach their sinks.
        """
        # A lock is not to be waited for: the garbage collector may close an abandoned stream on the very
        # thread that holds it, and an event loop would stand still.
        if not self._life.is_dead:
            self._requests.cancel(request_ids)
            self.guard.doorbell.ring()

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason found outside, such as a stop string. Its sink gets a last output;
        unknown ids are ignored, and so are all after the engine died.
        """
        with self.guard.lock, self.guard.changing():
            if not self._life.is_dead:
                self._requests.drop_cancelled()
                self._requests.end(request_id, finish)

    def abort(
        self,
        request_ids: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all_requests: bool = False,
        message: str = "",
    ) -> list[tuple[str, AbortOutcome]]:
        """End requests, with all their outputs, by exact id, by a non-empty prefix, or all; exactly one
        target must be given (ValueError).

        Slot and pages are free when this returns. One result per id asked for, or per match. Raises
        EngineDead where the engine is dead: it has ended all of them with that, and knows no more.
        """
        if (request_ids is not None) + bool(prefix) + all_requests != 1:
            raise ValueError("abort needs exactly one of request_ids, a non-empty prefix, or all_requests")
        with self.guard.lock, self.guard.changing():
            self._life.check_alive()
            self._requests.drop_cancelled()
            if request_ids is None:
                request_ids = self._requests.matching(prefix or "")
            return self._requests.abort(request_ids, message)

    # -- weights --

    def update(
        self, install: Callable[[], None], label: str, policy: InFlightPolicy
    ) -> Future[WeightsVersion]:
        """Run `install` (which swaps the runner's weights, or raises and leaves them) between two steps.

        The future holds the new version, or what `install` raised, or Draining or EngineFailure if the engine
        ended first; then nothing has changed. Cancelling it before its turn takes the update back.
        """
        update = Update(install, label, policy)
        with self.guard.lock:
            self._life.check_running()
            self._updates.add(update)
            self.guard.doorbell.ring()
        return update.done

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Forget all cached prefixes: (pages that became free, pages that running requests still hold).
        Raises EngineDead where the engine is dead.
        """
        with self.guard.lock, self.guard.changing():
            self._life.check_alive()
            self._requests.drop_cancelled()
            return self._scheduler.flush_prefix_cache()

    # -- life --

    def start(self) -> None:
        """Start stepping; the runner must be compiled. Once only: RuntimeError after that."""
        if self._life.thread is not None:
            raise RuntimeError("the engine was started before")
        thread = threading.Thread(target=self._loop.run, name="penstock-engine", daemon=True)
        thread.start()
        self._life.thread = thread  # not before: one that does not run yet would look as if it had died

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to end; false if some are left after `timeout_s`
        seconds. In an engine that dies all end.
        """

        def is_drained() -> bool:
            has_work = not self._life.is_dead and self._scheduler.has_work
            return self._delivery.is_done and not has_work

        with self.guard.lock:
            self._life.is_draining = True
            return self.guard.changed.wait_for(is_drained, timeout_s)

    def shutdown(self) -> None:
        """End what still runs (ABORTED), stop the thread and free the device's memory. May be called
        twice.
        """
        with self.guard.lock:
            self._life.is_draining = self._life.is_stopping = True
            updates = self._updates.take_all()
            # What the scheduler raises is for the engine's thread, which then tells everybody.
            with contextlib.suppress(BaseException), self.guard.changing():
                if not self._life.is_dead:
                    self._requests.drop_cancelled()
                    self._requests.end_all(self._scheduler.active_ids(), "the server is shutting down")
        refuse(updates, Draining())
        thread = self._life.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._runner.shutdown()
