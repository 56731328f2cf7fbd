"""EngineCore: token ids in, token ids out. What callers can ask of an engine, on any thread.

The path of one request: `submit` checks it and queues it; `Scheduler.schedule` puts it into plans together
with others; the runner computes the plans; `Scheduler.commit` takes in the tokens; `Delivery` hands them to
the request's sink. The engine's thread does all of this but the first, in `step_loop`.

Locking: the scheduler is touched only under the engine's lock (`guard`). Everything that a request is told,
whichever thread decided it, goes through `Delivery` and is handed over by the engine's thread, in order.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from penstock.runtime.errors import Draining, EngineFailure, WeightsTooOld
from penstock.runtime.loop.changes import BetweenSteps, Changes, refuse
from penstock.runtime.loop.guard import Annotate, Guard, Life, StepWatch, unannotated
from penstock.runtime.loop.interface import (
    AbortOutcome,
    InFlightPolicy,
    Observer,
    Paused,
    Pulse,
    Runner,
    Sink,
    WeightsVersion,
)
from penstock.runtime.loop.journal import Journal, Recording
from penstock.runtime.loop.requests import Delivery, Intake, LiveRequests
from penstock.runtime.loop.step_loop import StepLoop
from penstock.runtime.loop.stepping import Pacer, Steps
from penstock.runtime.requests.request import Finish, PreparedPrompt, Request
from penstock.runtime.scheduling.load import Load, Totals
from penstock.runtime.scheduling.pages import FlushedPages
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.status import OutputStatus


class EngineCore:
    """Runs one scheduler on one runner in one thread. All public methods may be called from any thread."""

    def __init__(
        self,
        runner: Runner[Any],
        scheduler: Scheduler,
        *,
        vocab_size: int,
        journal: Journal | None = None,
        observer: Observer | None = None,
        overlap: bool = True,
        pacer: Pacer | None = None,
        annotate: Annotate = unannotated,
    ) -> None:
        """`journal` gets an entry of everything that happens, and `observer` sees every step. `overlap`:
        whether a step is dispatched before the tokens of the step before it are read. Without a `pacer`
        there are no windows, and no limit to the prompt tokens of a step. `annotate` names the parts of a
        step to a profiler.
        """
        self._runner = runner
        self._scheduler = scheduler
        self.guard = Guard()
        """The lock under which the scheduler is touched."""
        self._life = Life()
        self._intake = Intake(scheduler, vocab_size)
        recording = Recording(journal or Journal(), observer, self.guard.changed)
        self._delivery = Delivery(self.guard.changed, recording)
        self._requests = LiveRequests(scheduler, self._delivery, self.guard.changed)
        between = BetweenSteps(
            runner,
            scheduler,
            guard=self.guard,
            life=self._life,
            requests=self._requests,
            recording=recording,
        )
        self.changes = Changes(between, guard=self.guard, life=self._life, requests=self._requests)
        """Weight updates, pauses and resumes."""
        self._loop = StepLoop(
            runner,
            Steps(
                runner,
                pacer or Pacer(0.0, 1),
                # One in each stage of a pipeline, and one that the first stage begins when the last one has
                # chosen tokens. Otherwise it would wait while the host reads those and makes a plan.
                most_in_flight=1 + scheduler.config.num_turns if overlap else 1,
                fixed_windows=bool(scheduler.config.window_steps),
                annotate=annotate,
            ),
            scheduler,
            guard=self.guard,
            life=self._life,
            delivery=self._delivery,
            requests=self._requests,
            changes=between,
            recording=recording,
            annotate=annotate,
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
        """Raise EngineDead, Draining or NotReady unless the engine's thread runs and will go on."""
        self._life.check_running()

    def pulse(self) -> Pulse:
        """Say whether the engine's thread moves. Takes no lock, so it answers even if another thread hangs
        while it holds one.
        """
        thread = self._life.thread
        return Pulse(
            progress=self._loop.progress,
            has_work=self._loop.has_work and not self._life.is_dead,
            thread_id=None if thread is None else thread.ident,
        )

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the engine dies, before its requests are told; at once if it is dead.
        The callback may run on any thread, and must not block.
        """
        with self.guard.lock:
            is_kept = self._life.watch(callback)
        if not is_kept:
            callback()

    def give_up(self, failure: EngineFailure) -> None:
        """End the engine because of something that its own thread cannot notice, and tell every request. The
        callbacks of `on_failure` come before that. Does nothing if the engine is dead.
        """
        self._loop.give_up(failure)

    def on_ready_changed(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the weights break, so that the engine is not ready, and whenever they are
        whole again; it asks `ready` which of these. It may be called on any thread, and must not block. A
        start, a drain and a death are not told here.
        """
        self._life.watch_ready(callback)

    @property
    def weights(self) -> WeightsVersion:
        """The weights that serve now."""
        return self.changes.weights

    @property
    def weights_since(self) -> dt.datetime:
        """When they went live, in UTC."""
        return self.changes.weights_since

    def version_of(self, generation: int) -> WeightsVersion:
        """Return the version of a generation of weights; the label of one long gone is empty."""
        return self.changes.version_of(generation)

    def load(self) -> Load:
        """Take a consistent snapshot of how busy the engine is. A dead engine has no load."""
        with self.guard.lock:
            return self._load()

    def load_within(self, timeout_s: float) -> Load | None:
        """Do the same as `load`; return None if another thread holds the engine's lock for so long."""
        if not self.guard.lock.acquire(timeout=timeout_s):
            return None
        try:
            return self._load()
        finally:
            self.guard.lock.release()

    def _load(self) -> Load:
        if self._life.is_dead:
            return Load.idle(self._scheduler.config.total_pages)
        self._drop_cancelled()
        return self._scheduler.load()

    def _drop_cancelled(self) -> None:
        """Drop cancelled requests before the scheduler is looked at; with the lock held."""
        if self._requests.has_cancelled:
            with self.guard.changing():
                self._requests.drop_cancelled()

    def totals(self) -> Totals:
        """Return what the scheduler has counted since the start. Also of a dead engine. Takes no lock,
        because the journal's readers ask for it: whoever waits for them must not wait for a thread that hangs
        with the engine's lock.
        """
        return self._scheduler.totals()

    def active_requests(self) -> Sequence[str]:
        """List the ids of the requests that wait or run, in order of arrival."""
        with self.guard.lock:
            return self._scheduler.active_requests()

    def oldest_outputs(self, most: int) -> Sequence[OutputStatus]:
        """Tell where the outputs stand that arrived first, at most so many; takes time for those, and not for
        all that there are. A dead engine has none.
        """
        with self.guard.lock:
            if self._life.is_dead:
                return ()
            self._drop_cancelled()
            return self._scheduler.oldest(most)

    def limit_prefill_chunk(self, size: int | None) -> None:
        """Set the most prompt tokens of one request in a step, from the next step on; None: the token budget
        is the only bound. ConfigError for a model that reads each prompt in one step.
        """
        with self.guard.lock:
            self._scheduler.limit_prefill_chunk(size)

    def watch_steps(self, watch: StepWatch | None) -> None:
        """Tell `watch` of the end of every step from now on; None: nobody."""
        self._loop.watch = watch

    def check(self) -> None:
        """Check the scheduler's invariants, for tests; the AssertionError says what is wrong."""
        with self.guard.lock:
            self._scheduler.check()

    # -- requests --

    def prepare(self, request: Request) -> PreparedPrompt:
        """Do the part of `submit` that takes longer for longer prompts and more sampling parameters. For
        callers that have something better to do meanwhile, or that submit several outputs of one prompt.
        Raises nothing.
        """
        return self._intake.prepare(request)

    def submit(self, request: Request, sink: Sink, prepared: PreparedPrompt | None = None) -> None:
        """Queue a request, whose outputs go to `sink`. Raises at once if the request or the engine's state
        forbids it, see `Engine.submit`. `prepared` must be what `prepare` made of the same prompt, else
        ValueError; None: it is prepared now.
        """
        seq = self._intake.admit(request, prepared)
        with self.guard.lock, self.guard.changing():
            self._life.check_takes_requests()
            if request.min_generation > self.weights.generation:
                raise WeightsTooOld(request.min_generation, self.weights.generation)
            self._requests.drop_cancelled()
            self._requests.queue(seq, sink)

    def name_adapters(self, named: frozenset[str], pinned: frozenset[str]) -> None:
        """Set which adapters a name means, and which of them keep their slots, all by their digests."""
        with self.guard.lock, self.guard.changing():
            self._scheduler.name_adapters(named, pinned)

    def cancel(self, *request_ids: str) -> None:
        """Free the slots and pages of requests that nobody reads any more, and tell nobody. Unknown ids are
        ignored.

        This does not wait. The engine's thread does it before its next step, or any call that looks at the
        scheduler before that, so these requests are never seen again. Outputs that were posted before may
        still reach their sinks.
        """
        # This must not wait for a lock: the garbage collector may close an abandoned stream on the very
        # thread that holds it, and an event loop would stand still.
        if not self._life.is_dead:
            self._requests.cancel(request_ids)
            self.guard.doorbell.ring()

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason found outside the engine, such as a stop string. Its sink gets a last
        output. Unknown ids are ignored, and so is every id after the engine died.
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
        """End requests, with all their outputs: by exact ids, by a non-empty prefix, or all. ValueError
        unless exactly one of these is given.

        Their slots and pages are free when this returns. The result has one entry for each id asked for, or
        for each match. Raises EngineDead if the engine is dead: it has told all its requests, and knows
        nothing more.
        """
        if (request_ids is not None) + bool(prefix) + all_requests != 1:
            raise ValueError("abort needs exactly one of request_ids, a non-empty prefix, or all_requests")
        with self.guard.lock, self.guard.changing():
            self._life.check_alive()
            self._requests.drop_cancelled()
            if request_ids is None:
                request_ids = self._requests.matching(prefix or "")
            return self._requests.abort(request_ids, message)

    def flush_prefix_cache(self) -> FlushedPages:
        """Forget all cached prefixes. Raises EngineDead where the engine is dead."""
        with self.guard.lock, self.guard.changing():
            self._life.check_alive()
            self._requests.drop_cancelled()
            return self._scheduler.flush_prefix_cache()

    # -- pauses --

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused; waits for nothing."""
        return self.changes.is_paused

    def pause(
        self,
        in_flight: InFlightPolicy = InFlightPolicy.WAIT,
        *,
        drain_timeout_s: float | None = None,
        free_kv_cache: bool = False,
        offload_weights: bool = False,
    ) -> Future[Paused]:
        """Stop making tokens until `resume`, and free memory of the device if asked to; see `Changes.pause`
        for the errors that the future may hold. New requests queue up, and weights can be updated meanwhile.
        """
        return self.changes.pause(
            in_flight,
            drain_timeout_s=drain_timeout_s,
            free_kv_cache=free_kv_cache,
            offload_weights=offload_weights,
        )

    def resume(self) -> Future[None]:
        """Go on after a pause, with what it has freed restored; see `Changes.resume`."""
        return self.changes.resume()

    # -- life --

    def start(self) -> None:
        """Start the engine's thread; the runner must be compiled. RuntimeError if it was started before."""
        if self._life.thread is not None:
            raise RuntimeError("the engine was started before")
        thread = threading.Thread(target=self._loop.run, name="penstock-engine", daemon=True)
        thread.start()
        self._life.thread = thread  # not before: a thread that does not run yet would look like a dead one

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to end; return false if some are left after `timeout_s`
        seconds. If the engine dies, all have ended.
        """

        def is_drained() -> bool:
            has_work = not self._life.is_dead and self._scheduler.has_work
            return self._delivery.is_done and not has_work

        with self.guard.lock:
            self._life.is_draining = True
            return self.guard.changed.wait_for(is_drained, timeout_s)

    def shutdown(self) -> None:
        """End all requests (ABORTED), stop the thread and free the device's memory. May be called
        twice.
        """
        with self.guard.lock:
            self._life.is_draining = self._life.is_stopping = True
            changes = self.changes.take_all()
            # If the scheduler raises, the engine's thread finds out (`guard`) and tells every request.
            with contextlib.suppress(BaseException), self.guard.changing():
                if not self._life.is_dead:
                    self._requests.drop_cancelled()
                    self._requests.end_all(self._scheduler.active_ids(), "the server is shutting down")
        refuse(changes, Draining())
        thread = self._life.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._runner.shutdown()
