"""EngineCore: the engine's thread, which schedules, runs and hands out steps. Token ids in, token ids out.

One Generate, eight hops: 1. a client calls the stub. 2. The servicer method runs inside the interceptors
(trace start, error mapping). 3. `convert` and `text` make a validated frozen `Request`; refusals happen here
or in hop 4, never later (a grammar can also fail midway). 4. `submit(request, sink)` puts it in the queue.
5. `Scheduler.schedule` makes a `Plan`. 6. `ModelRunner.execute_async` pads it to a bucket and packs one
host-to-device buffer. 7. The bucket's compiled programs run: one for a window of decode steps, else one for
the model and one for sampler and state update. 8. `ModelRunner.wait` -> `Scheduler.commit` -> sink -> the
service's stream -> reply.

Locking: the scheduler is touched only under `_lock`, which is never held while the device works or a
constraint is asked, so a caller waits for a plan or a commit at most (tens of microseconds; milliseconds when
dozens enter at once). Everything a request is told, in whatever thread it was decided, goes through
`Delivery` and is handed over by the engine thread, in order. Freeing pages while a dispatched step may still
write them is safe: the device runs steps in order, so whoever gets the pages next writes after.

Overlap: a step is dispatched before the tokens of the one before are read, so the device works while the host
commits, delivers and schedules. Weights are swapped only when nothing is in flight. Where rows have
constraints, the model of a step is dispatched first, and the choice of its tokens once those of the step
before are committed: masks are made while the model runs.

Failure: whatever is raised on the engine's thread, or in the scheduler on anybody's, ends the engine. Its
last act is to tell every request and every weight update that waits; the scheduler, which may be what broke,
is not touched again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from penstock.runtime.checks import check_token_ids, in_vocabulary, knows_tokens
from penstock.runtime.delivery import Delivery
from penstock.runtime.doorbell import Doorbell
from penstock.runtime.errors import Draining, EngineDead, EngineFailure, NotReady, PenstockError
from penstock.runtime.failing import as_exception, describe, engine_failure
from penstock.runtime.interface import AbortOutcome, InFlightPolicy, Observer, Pulse, Sink, WeightsVersion
from penstock.runtime.pacing import Pacer
from penstock.runtime.plan import Plan
from penstock.runtime.request import Finish, FinishReason, PreparedPrompt, Request
from penstock.runtime.runner import ModelRunner
from penstock.runtime.scheduler import Load, Scheduler
from penstock.runtime.stepping import Steps
from penstock.runtime.token_bias import bias_row
from penstock.runtime.updates import Update, UpdateQueue, refuse, settle

log = logging.getLogger(__name__)

_ABORTED = FinishReason.ABORTED
_LONGEST_WAIT_S = 3600.0
_MANY_BIASES = 1_000
"""For so many the array of them all is made beforehand, once for all outputs; of fewer it would take more
memory while the request waits than it saves time."""


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
        pacer: Pacer | None = None,
    ) -> None:
        """`overlap`: dispatch a step before the one before is read; `pacer`: None makes no windows,
        and sets no limit to the prompt tokens of a step.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._doorbell = Doorbell()
        self._delivery = Delivery(self._changed)
        self._cancelled: deque[tuple[str, ...]] = deque()
        """What nobody wants any more; whoever takes the lock next to look at the scheduler drops it first."""
        self._updates = UpdateQueue()
        pacer = pacer or Pacer(0.0, 1)
        # The engine thread's own:
        self._steps = Steps(
            runner,
            pacer,
            observer,
            most_in_flight=2 if overlap else 1,
            fixed_windows=bool(scheduler.config.window_steps),
        )
        self._applying: Update | None = None
        self._progress = 0
        self._weights = WeightsVersion("initial", 1)
        scheduler.use_weights(self._weights.generation)
        self._draining = False
        self._stopping = False
        self._failure: EngineFailure | None = None
        self._broken: str | None = None
        """What the scheduler raised on a caller's thread, in words: the engine's thread is to end of it. The
        error itself is the caller's, and so are the frames of its traceback: they may be going on."""
        self._death_watches: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None

    # -- state --

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        thread = self._thread
        return thread is not None and thread.is_alive() and self._failure is None and not self._draining

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine died, if it did."""
        thread = self._thread
        if self._failure is None and thread is not None and not (thread.is_alive() or self._stopping):
            return EngineFailure("the engine's thread is gone, as after a fork")
        return self._failure

    def pulse(self) -> Pulse:
        """Whether the engine's thread moves. Takes no lock, so it answers whoever hangs with one."""
        has_work = bool(self._steps) or self._scheduler.has_work or not self._delivery.is_done
        thread = self._thread
        return Pulse(
            self._progress, has_work and self._failure is None, None if thread is None else thread.ident
        )

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call this once when the engine dies, before its requests are told; at once if it is dead. It may be
        called on any thread, and must not block.
        """
        with self._lock:
            if self._failure is None:
                self._death_watches.append(callback)
                return
        callback()

    @property
    def weights(self) -> WeightsVersion:
        """The weights that serve now."""
        return self._weights

    def load(self) -> Load:
        """A consistent snapshot of how busy the engine is; nothing is left to do in one that is dead."""
        with self._lock:
            if self._failure is not None:
                return Load(0, 0, 0, 0, pages_total=self._scheduler.config.num_pages)
            if self._cancelled:
                with self._changing():
                    self._drop_cancelled()
            return self._scheduler.load()

    # -- requests --

    def prepare(self, request: Request) -> PreparedPrompt:
        """What `submit` does with a prompt and its sampling, and takes longer the longer they are (about
        10 ms for 100,000 tokens, or as many biases), for callers with something better to do, or with several
        outputs to submit: any thread may, at any time. Raises nothing.
        """
        token_ids, cache, sampling = request.prompt_token_ids, request.cache, request.sampling
        is_known = in_vocabulary(token_ids, self._vocab_size)
        keys = self._scheduler.page_keys(request) if is_known else ()
        if not knows_tokens(sampling, self._vocab_size):
            return PreparedPrompt(token_ids, cache, tuple(keys), is_known)
        row = None
        if len(sampling.logit_bias) + len(sampling.allowed_token_ids) >= _MANY_BIASES:
            row = bias_row(sampling, self._vocab_size)
        return PreparedPrompt(token_ids, cache, tuple(keys), is_known, sampling, row)

    def submit(self, request: Request, sink: Sink, prepared: PreparedPrompt | None = None) -> None:
        """Queue a request; its outputs go to `sink`. Raises what the request or the engine's state forbid, at
        once. `prepared` is what `prepare` made of this very prompt, or ValueError; None: it is done now.
        """
        if prepared is None:
            prepared = self.prepare(request)
        elif prepared.token_ids is not request.prompt_token_ids or prepared.cache != request.cache:
            raise ValueError("another prompt was prepared than is submitted")
        is_covered = prepared.covers(request.sampling)
        check_token_ids(
            request,
            self._vocab_size,
            len(self._scheduler.config.eos_token_ids),
            prompt_is_known=prepared.in_vocabulary,
            sampling_is_known=is_covered,
        )
        row = prepared.bias_row if is_covered else None
        if request.sampling.seed is None:
            sampling = request.sampling.seeded(secrets.randbits(64))
            request = dataclasses.replace(request, sampling=sampling, bias_row=row)
        elif row is not None:
            request = dataclasses.replace(request, bias_row=row)
        seq = self._scheduler.prepare(request, time.monotonic_ns(), prepared.page_keys)
        with self._lock, self._changing():
            self.check_running()
            if self._draining:
                raise Draining
            self._drop_cancelled()
            self._scheduler.queue(seq)
            self._delivery.attach(request.request_id, sink)

    def check_running(self) -> None:
        """Raises EngineDead, Draining or NotReady unless the engine's thread runs and will go on."""
        self._check_alive()
        if self._stopping:
            raise Draining
        if self._thread is None:
            raise NotReady

    def _check_alive(self) -> None:
        failure = self.failure
        if failure is not None:
            raise EngineDead(f"the engine is dead: {failure}") from failure

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Inside the lock, around what a caller's thread changes in the scheduler: one that breaks halfway
        through a change can be trusted no more, so the engine ends of what it raised. Refusals change
        nothing.
        """
        try:
            yield
        except PenstockError:
            raise
        except BaseException as error:
            self._broken = self._broken or describe(error)
            log.exception("the scheduler broke on a caller's thread")
            raise
        finally:
            self._changed.notify_all()
            self._doorbell.ring()

    def cancel(self, *request_ids: str) -> None:
        """Their readers are gone: free slots and pages, tell nobody. Unknown ids are ignored.

        This waits for nothing: the engine's thread does it before its next step, or who asks the engine for
        something before that, so that nobody sees them again. Outputs that were lined up before may still
        reach their sinks.
        """
        # A lock is not to be waited for: the garbage collector may close an abandoned stream on the very
        # thread that holds it, and an event loop would stand still.
        if self._failure is None:
            self._cancelled.append(request_ids)
            self._doorbell.ring()

    def _drop_cancelled(self) -> None:
        """With the lock held."""
        while self._cancelled:
            for request_id in self._cancelled.popleft():
                self._delivery.detach(request_id)
                self._scheduler.abort(request_id, "", time.monotonic_ns())
            self._changed.notify_all()  # drain waits for this

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason found outside, such as a stop string. Its sink gets a last output;
        unknown ids are ignored, and so are all after the engine died.
        """
        with self._lock, self._changing():
            if self._failure is None:
                self._drop_cancelled()
                self._end(request_id, finish)

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
        with self._lock, self._changing():
            self._check_alive()
            self._drop_cancelled()
            if request_ids is None:
                active = self._scheduler.active_requests()
                request_ids = [i for i in active if all_requests or i.startswith(prefix or "")]
            results = []
            for request_id in dict.fromkeys(request_ids):
                ended = [
                    self._end(output, Finish(reason=_ABORTED, message=message))
                    for output in self._scheduler.outputs_of(request_id)
                ]
                if any(ended):
                    outcome = AbortOutcome.ABORTED
                elif self._scheduler.finished(request_id):
                    outcome = AbortOutcome.ALREADY_FINISHED
                else:
                    outcome = AbortOutcome.NOT_FOUND
                results.append((request_id, outcome))
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
            self._doorbell.ring()
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
            self._applying = update
            settle(update, self._apply(update))
            self._applying = None

    def _apply(self, update: Update) -> WeightsVersion | Exception:
        """The weights that serve now, or why the old ones still do."""
        try:
            update.install()  # without the lock: callers need not wait while it copies
        except BaseException as error:  # noqa: BLE001  whatever it was, the old weights serve on
            return as_exception(error)
        with self._lock:
            if update.policy is InFlightPolicy.ABORT:
                for request_id in self._scheduler.started_ids():
                    finish = Finish(_ABORTED, message=f"weights were updated to {update.label!r}")
                    self._end(request_id, finish)
            elif update.policy is InFlightPolicy.RECOMPUTE:
                self._scheduler.preempt_all()
            self._weights = WeightsVersion(update.label, self._weights.generation + 1)
            self._scheduler.use_weights(self._weights.generation)
        return self._weights

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Forget all cached prefixes: (pages that became free, pages that running requests still hold).
        Raises EngineDead where the engine is dead.
        """
        with self._lock, self._changing():
            self._check_alive()
            self._drop_cancelled()
            return self._scheduler.flush_prefix_cache()

    # -- the thread --

    def start(self) -> None:
        """Start stepping; the runner must be compiled. Once only: RuntimeError after that."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        thread.start()
        self._thread = thread  # not before: one that does not run yet would look as if it had died

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to end; false if some are left after `timeout_s`. In an
        engine that dies all end.
        """

        def is_drained() -> bool:
            has_work = self._failure is None and self._scheduler.has_work
            return self._delivery.is_done and not has_work

        with self._lock:
            self._draining = True
            return self._changed.wait_for(is_drained, timeout_s)

    def shutdown(self) -> None:
        """End what still runs (ABORTED), stop the thread and free the device's memory. May be called
        twice.
        """
        with self._lock:
            self._draining = self._stopping = True
            # What the scheduler raises is for the engine's thread, which then tells everybody.
            with contextlib.suppress(BaseException), self._changing():
                if self._failure is None:
                    self._drop_cancelled()
                    for request_id in self._scheduler.active_ids():
                        self._end(request_id, Finish(_ABORTED, message="the server is shutting down"))
            updates = self._updates.take_all()
        refuse(updates, Draining())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._runner.shutdown()

    def _run(self) -> None:
        try:
            self._runner.compiles_after_warmup.start()
            self._loop()
        except BaseException as error:  # noqa: BLE001  a panic in Rust is no Exception; see `failing`
            self._fail(error)

    def _loop(self) -> None:
        steps = self._steps
        while True:
            planned = self._next_plan()
            if planned is not None:
                steps.dispatch(*planned)
                self._progress += 1
            self._choose()
            if steps and (planned is None or steps.is_full):
                self._commit()
                self._progress += 1
                self._choose()
            self._delivery.deliver()
            if planned is None and not steps and self._is_over():
                return

    def _choose(self) -> None:
        """Have the tokens of a step under constraints chosen. Rows whose masks take too long get none."""
        put_off = self._steps.choose()
        if put_off is not None:
            with self._lock:
                self._scheduler.put_off(*put_off)

    def _is_over(self) -> bool:
        with self._lock:  # `shutdown` may have lined up last outputs since the plan was asked for
            return self._stopping and not self._delivery.is_pending

    def _next_plan(self) -> tuple[Plan, int, int] | None:
        """Wait until there is something to do. The plan, when it was begun and when it was made; None if
        there is something else to do than to run a step.
        """
        while True:
            self._doorbell.answer()
            if not self._steps:
                self._apply_updates()
            with self._lock:
                if self._broken is not None:
                    raise RuntimeError(f"the scheduler broke on a caller's thread: {self._broken}")
                self._drop_cancelled()
                started_ns = time.monotonic_ns()
                self._delivery.post(self._scheduler.expire(started_ns))
                plan = None
                # An update that is due lets what is in flight run out; one that waits holds admission:
                # nothing new may enter, what runs goes on.
                is_due = self._updates.is_due(self._scheduler.has_started)
                if not is_due:
                    plan = self._scheduler.schedule(
                        started_ns,
                        admit=not self._updates,
                        max_steps=self._steps.max_steps(self._scheduler.next_deadline_ns - started_ns),
                        prefill_budget=self._steps.prefill_budget,
                        apart_steps=self._steps.apart_steps,
                    )
                if plan is not None:
                    return plan, started_ns, time.monotonic_ns()
                if self._steps or self._delivery.is_pending or self._stopping:
                    return None
                if is_due:
                    continue  # it came after `_apply_updates`, so its notification found nobody waiting
                wait_ns = self._scheduler.next_deadline_ns - time.monotonic_ns()
                self._doorbell.listen()
            if not self._cancelled:  # for which nobody needs the lock
                self._doorbell.sleep(min(max(wait_ns, 0) / 1e9, _LONGEST_WAIT_S))

    def _commit(self) -> None:
        """Wait for the oldest step in flight and take in its tokens."""
        done = self._steps.wait()
        step = (done.step.plan, done.result, done.waited_ns)
        # Without the lock, which nobody else needs to wait for while a grammar thinks.
        verdicts = self._scheduler.accept(*step)
        with self._lock:
            self._drop_cancelled()
            self._delivery.post(self._scheduler.commit(*step, verdicts))
        if self._steps.is_observed:
            self._steps.observe(done, self.load())

    def _fail(self, error: BaseException) -> None:
        """The last act of the engine's thread: all who wait for something are told, each on its own."""
        log.error("the engine failed", exc_info=error)
        failure = engine_failure(error)
        with self._lock:
            self._failure = failure
            last = self._delivery.fail(failure)
            self._cancelled.clear()
            updates = list(self._updates.take_all())
            watches, self._death_watches = self._death_watches, []
        if self._applying is not None:
            updates.append(self._applying)
        self._steps.forget()
        for watch in watches:
            try:
                watch()
            except BaseException:  # the requests are yet to be told
                log.exception("a watch of the engine's life failed")
        self._delivery.hand_over(last)
        refuse(updates, failure)
