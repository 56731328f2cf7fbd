"""EngineCore: the engine's thread, which schedules, runs and hands out steps. Token ids in, token ids out.

One Generate, eight hops: 1. a client calls the stub. 2. The servicer method runs inside the interceptors
(trace start, error mapping). 3. `convert` and `text` make a validated frozen `Request`; refusals happen here
or in hop 4, never later. 4. `submit(request, sink)` puts it in the queue. 5. `Scheduler.schedule` makes a
`Plan`. 6. `ModelRunner.execute_async` pads it to a bucket and packs one host-to-device buffer. 7. The
bucket's compiled program runs model, sampler and state update. 8. `ModelRunner.wait` -> `Scheduler.commit` ->
sink -> the service's stream -> reply.

Locking: the scheduler is touched only under `_lock`, which is never held while the device works, so a caller
waits for a plan or a commit at most (tens of microseconds). Everything a request is told, in whatever thread
it was decided, goes through `Delivery` and is handed over by the engine thread, in order. Freeing pages while
a dispatched step may still write them is safe: the device runs steps in order, so whoever gets the pages next
writes after.

Overlap: a step is dispatched before the tokens of the one before are read, so the device works while the host
commits, delivers and schedules. Weights are swapped only when nothing is in flight. Where rows have
constraints, the model of a step is dispatched first, and the choice of its tokens once those of the step
before are committed: masks are made while the model runs.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.runtime.delivery import Delivery
from penstock.runtime.errors import Draining, EngineFailure, InvalidRequest, NotReady, Violation
from penstock.runtime.interface import (
    AbortOutcome,
    InFlightPolicy,
    Observer,
    Sink,
    StepRecord,
    WeightsVersion,
)
from penstock.runtime.outputs import request_id_of
from penstock.runtime.pacing import DecodePacer
from penstock.runtime.plan import Plan
from penstock.runtime.request import MAX_STOP_TOKEN_IDS, Finish, FinishReason, Request
from penstock.runtime.runner import ModelRunner, PendingStep
from penstock.runtime.scheduler import Load, Scheduler
from penstock.runtime.updates import Update, UpdateQueue, refuse

log = logging.getLogger(__name__)

_ABORTED = FinishReason.ABORTED
_LONGEST_WAIT_S = 3600.0
_CANCEL_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class _Dispatched:
    plan: Plan
    pending: PendingStep
    started_ns: int
    scheduled_ns: int
    dispatched_ns: int


class EngineCore:
    """Runs one scheduler on one runner in one thread. All public methods may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        observer: Observer | None = None,
        overlap: bool = True,
        pacer: DecodePacer | None = None,
    ) -> None:
        """`overlap`: dispatch a step before the one before is read; `pacer`: None makes no windows."""
        self._runner = runner
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._observer = observer
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._delivery = Delivery(self._changed)
        self._cancelled: deque[str] = deque()
        self._updates = UpdateQueue()
        self._pacer = pacer or DecodePacer(0.0, 1)
        self._most_in_flight = 2 if overlap else 1
        self._in_flight: deque[_Dispatched] = deque()  # the engine thread's own
        self._waited_ns = 0
        self._weights = WeightsVersion("initial", 1)
        scheduler.use_weights(self._weights.generation)
        self._draining = False
        self._stopping = False
        self._failure: EngineFailure | None = None
        self._thread: threading.Thread | None = None

    # -- state --

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread is not None and self._failure is None and not self._draining

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine died, if it did."""
        return self._failure

    @property
    def weights(self) -> WeightsVersion:
        """The weights that serve now."""
        return self._weights

    def load(self) -> Load:
        """A consistent snapshot of how busy the engine is."""
        with self._lock:
            return self._scheduler.load()

    # -- requests --

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its outputs go to `sink`. Raises what the request or the engine's state forbid, at
        once.
        """
        self._check(request)
        if request.sampling.seed is None:
            sampling = dataclasses.replace(request.sampling, seed=secrets.randbits(64))
            request = dataclasses.replace(request, sampling=sampling)
        with self._lock:
            self.check_running()
            if self._draining:
                raise Draining
            self._scheduler.add(request, time.monotonic_ns())
            self._delivery.attach(request.request_id, sink)
            self._changed.notify_all()

    def check_running(self) -> None:
        """Raises EngineFailure, Draining or NotReady unless the engine's thread runs and will go on."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise Draining
        if self._thread is None:
            raise NotReady

    def _check(self, request: Request) -> None:
        vocab, sampling = self._vocab_size, request.sampling
        fields: list[tuple[str, Iterable[int]]] = [
            ("prompt_token_ids.ids", request.prompt_token_ids),
            ("stopping.stop_token_ids", request.stopping.stop_token_ids),
            ("sampling.allowed_token_ids", sampling.allowed_token_ids),
            ("sampling.logit_bias", [token for token, _ in sampling.logit_bias]),
            ("sampling.bad_words", [token for word in sampling.bad_words for token in word]),
        ]
        bad = [
            Violation(f"{name}[{i}]", f"must be from 0 to {vocab - 1}, not {token}")
            for name, ids in fields
            if ids and (min(ids) < 0 or max(ids) >= vocab)
            for i, token in enumerate(ids)
            if not 0 <= token < vocab
        ]
        num_stops = len(request.stopping.stop_token_ids) + len(self._scheduler.config.eos_token_ids)
        if num_stops > MAX_STOP_TOKEN_IDS:
            most = MAX_STOP_TOKEN_IDS - len(self._scheduler.config.eos_token_ids)
            bad.append(Violation("stopping.stop_token_ids", f"at most {most} ids with this model"))
        if bad:
            raise InvalidRequest(bad)

    def cancel(self, request_id: str) -> None:
        """Its reader is gone: free slot and pages, tell nobody. Unknown ids are ignored.

        Outputs that were lined up before may still reach its sink.
        """
        # The garbage collector may close an abandoned stream on the very thread that holds the lock; waiting
        # for it would be for ever. Then the engine thread does it before its next step.
        if not self._lock.acquire(timeout=_CANCEL_WAIT_S):
            self._cancelled.append(request_id)
            return
        try:
            self._drop(request_id)
            self._changed.notify_all()
        finally:
            self._lock.release()

    def _drop(self, request_id: str) -> None:
        self._delivery.detach(request_id)
        self._scheduler.abort(request_id, "", time.monotonic_ns())

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason found outside, such as a stop string. Its sink gets a last output;
        unknown ids are ignored.
        """
        with self._lock:
            self._end(request_id, finish)
            self._changed.notify_all()

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

        Slot and pages are free when this returns. One result per id asked for, or per match.
        """
        if (request_ids is not None) + bool(prefix) + all_requests != 1:
            raise ValueError("abort needs exactly one of request_ids, a non-empty prefix, or all_requests")
        with self._lock:
            outputs: dict[str, list[str]] = {}
            for active in self._scheduler.active_ids():
                outputs.setdefault(request_id_of(active), []).append(active)
            if request_ids is None:
                request_ids = [i for i in outputs if all_requests or i.startswith(prefix or "")]
            results = []
            for request_id in dict.fromkeys(request_ids):
                ended = [
                    self._end(output, Finish(reason=_ABORTED, message=message))
                    for output in outputs.get(request_id, ())
                ]
                if any(ended):
                    outcome = AbortOutcome.ABORTED
                elif self._scheduler.finished(request_id):
                    outcome = AbortOutcome.ALREADY_FINISHED
                else:
                    outcome = AbortOutcome.NOT_FOUND
                results.append((request_id, outcome))
            self._changed.notify_all()
        return results

    def _end(self, request_id: str, finish: Finish) -> bool:
        output = self._scheduler.abort(
            request_id, finish.message, time.monotonic_ns(), reason=finish.reason, stop=finish.stop
        )
        if output is None:
            return False
        self._delivery.post([output])
        return True

    # -- weights --

    def update(
        self, install: Callable[[], None], label: str, policy: InFlightPolicy
    ) -> Future[WeightsVersion]:
        """Run `install` (which swaps the runner's weights, or raises and leaves them) between two steps.

        The future holds the new version, or what `install` raised, or Draining or EngineFailure if the engine
        ended first; then nothing has changed. Cancelling it before its turn takes the update back.
        """
        update = Update(install, label, policy)
        with self._lock:
            self.check_running()
            self._updates.add(update)
            self._changed.notify_all()
        return update.done

    def _apply_updates(self) -> None:
        """On the engine thread, with no step in flight: apply what updates the running requests allow."""
        while True:
            with self._lock:
                if not self._updates.is_due(self._scheduler.has_started):
                    return
                update = self._updates.take()
            if not update.done.set_running_or_notify_cancel():
                continue  # the caller took it back
            try:
                update.install()  # without the lock: callers need not wait while it copies
            except Exception as error:  # noqa: BLE001  # whatever it was, the old weights serve on and the caller hears
                update.done.set_exception(error)
                continue
            with self._lock:
                if update.policy is InFlightPolicy.ABORT:
                    for request_id in self._scheduler.started_ids():
                        self._end(
                            request_id, Finish(_ABORTED, message=f"weights were updated to {update.label!r}")
                        )
                elif update.policy is InFlightPolicy.RECOMPUTE:
                    self._scheduler.preempt_all()
                self._weights = WeightsVersion(update.label, self._weights.generation + 1)
                self._scheduler.use_weights(self._weights.generation)
            update.done.set_result(self._weights)

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Forget all cached prefixes: (pages that became free, pages that running requests still hold)."""
        with self._lock:
            return self._scheduler.flush_prefix_cache()

    # -- the thread --

    def start(self) -> None:
        """Start stepping; the runner must be compiled. Once only: RuntimeError after that."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to end; false if some are left after `timeout_s`."""
        with self._lock:
            self._draining = True
            return self._changed.wait_for(
                lambda: self._delivery.is_done and not self._scheduler.has_work, timeout_s
            )

    def shutdown(self) -> None:
        """End what still runs (ABORTED), stop the thread and free the device's memory. May be called
        twice.
        """
        with self._lock:
            self._draining = self._stopping = True
            for request_id in self._scheduler.active_ids():
                self._end(request_id, Finish(_ABORTED, message="the server is shutting down"))
            updates = self._updates.take_all()
            self._changed.notify_all()
        refuse(updates, Draining())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._runner.shutdown()

    def _run(self) -> None:
        self._runner.compiles_after_warmup.start()
        try:
            while True:
                planned = self._next_plan()
                if planned is not None:
                    self._in_flight.append(self._dispatch(*planned))
                self._choose()
                if self._in_flight and (planned is None or len(self._in_flight) == self._most_in_flight):
                    self._collect(self._in_flight.popleft())
                    self._choose()
                self._delivery.deliver()
                if planned is None and not self._in_flight and self._is_over():
                    return
        except Exception as error:
            log.exception("the engine failed")
            self._fail(error)

    def _is_over(self) -> bool:
        with self._lock:  # `shutdown` may have lined up last outputs since the plan was asked for
            return self._stopping and not self._delivery.is_pending

    def _next_plan(self) -> tuple[Plan, int, int] | None:
        """Wait until there is something to do. The plan, when it was begun and when it was made; None if
        there is something else to do than to run a step.
        """
        while True:
            if not self._in_flight:
                self._apply_updates()
            with self._lock:
                while self._cancelled:
                    self._drop(self._cancelled.popleft())
                started_ns = time.monotonic_ns()
                self._delivery.post(self._scheduler.expire(started_ns))
                plan = None
                # An update that is due lets what is in flight run out; one that waits holds admission:
                # nothing new may enter, what runs goes on.
                is_due = self._updates.is_due(self._scheduler.has_started)
                if not is_due:
                    steps_ahead = sum(step.plan.num_steps for step in self._in_flight)
                    ns_to_deadline = self._scheduler.next_deadline_ns - started_ns
                    plan = self._scheduler.schedule(
                        started_ns,
                        admit=not self._updates,
                        max_steps=self._pacer.max_steps(ns_to_deadline, steps_ahead),
                    )
                if plan is not None:
                    return plan, started_ns, time.monotonic_ns()
                if self._in_flight or self._delivery.is_pending or self._stopping:
                    return None
                if is_due:
                    continue  # it came after `_apply_updates`, so its notification found nobody waiting
                wait_ns = self._scheduler.next_deadline_ns - time.monotonic_ns()
                self._changed.wait(min(max(wait_ns, 0) / 1e9, _LONGEST_WAIT_S))

    def _dispatch(self, plan: Plan, started_ns: int, scheduled_ns: int) -> _Dispatched:
        pending = self._runner.execute_async(plan)
        return _Dispatched(plan, pending, started_ns, scheduled_ns, time.monotonic_ns())

    def _choose(self) -> None:
        """Have the tokens of the oldest step chosen, if that is yet to do: constraints saw all before."""
        if self._in_flight and self._in_flight[0].pending.unchosen is not None:
            step = self._in_flight.popleft()
            step = dataclasses.replace(step, pending=self._runner.choose(step.pending))
            self._in_flight.appendleft(step)

    def _collect(self, step: _Dispatched) -> None:
        """Wait for the oldest step in flight and take in its tokens."""
        plan = step.plan
        result = self._runner.wait(step.pending)
        waited_ns = time.monotonic_ns()
        with self._lock:
            self._delivery.post(self._scheduler.commit(plan, result, waited_ns))
        if plan.decode_only:  # the device began it when it was dispatched, or when the one before was done
            num_steps = max(map(len, result.token_ids), default=1)
            self._pacer.measured(num_steps, waited_ns - max(step.dispatched_ns, self._waited_ns))
        self._waited_ns = waited_ns
        if self._observer is None:
            return
        load = self.load()
        record = StepRecord(
            step_id=plan.step_id,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            decode_only=plan.decode_only,
            request_ids=tuple(row.request_id for row in plan.rows),
            num_waiting=load.num_waiting,
            pages_used=load.pages_used,
            started_ns=step.started_ns,
            scheduled_ns=step.scheduled_ns,
            dispatched_ns=step.dispatched_ns,
            waited_ns=waited_ns,
            committed_ns=time.monotonic_ns(),
            num_steps=plan.num_steps,
        )
        try:
            self._observer.on_step(record)
        except Exception:  # who only watches must not end the requests
            log.exception("the observer failed; it will see no more steps")
            self._observer = None

    def _fail(self, error: Exception) -> None:
        failure = EngineFailure(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._lock:
            self._failure = failure
            for request_id in self._scheduler.active_ids():
                self._scheduler.abort(request_id, str(failure), time.monotonic_ns())
            self._delivery.fail(failure)
            updates = self._updates.take_all()
        self._delivery.deliver()
        refuse(updates, failure)
