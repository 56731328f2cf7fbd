"""An engine with the interface of the real one, whose tokens are known beforehand: it counts bytes upwards.

Token b is the byte b. After "a" comes "b", after "b" comes "c", after "z" the end token. StepOutput i of a
request begins i letters later: of "a", output 2 is "def...". A script may replace this for a prompt, or for
one output of it. Under a constraint the token is the lowest allowed one that is not below the expected one,
or else the lowest allowed one.

Each running output holds one page as long as it runs. With `hold=True` the engine steps only when it is told
to. It has no prefix cache, but reports what it is told to: each prompt found `cached_prompt_tokens`, and
`cached_pages` can be flushed. Nor does it propose tokens: each output has so many `proposed_tokens`, of which
so many are `accepted_tokens`.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any

from penstock.runtime.chat.parser import ChatForms, choose_forms
from penstock.runtime.config import CPU_SIZES, EngineConfig, resolve
from penstock.runtime.errors import (
    ConfigError,
    Draining,
    DuplicateRequestId,
    EngineDead,
    EngineFailure,
    ExceedsKVCapacity,
    InvalidRequest,
    NotReady,
    PausedWithRequests,
    PromptTooLong,
    QueueFull,
    Violation,
    WeightsIncomplete,
    WeightsTooOld,
)
from penstock.runtime.grammar.compile.compiler import GrammarCompiler
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.loop.interface import (
    AbortOutcome,
    Applied,
    InFlightPolicy,
    InFlightReport,
    Paused,
    Pulse,
    Resumed,
    WeightsBroken,
    WeightsVersion,
)
from penstock.runtime.loop.journal import Journal
from penstock.runtime.measuring.engine_meters import EngineMeters
from penstock.runtime.measuring.engine_metrics import EngineMetrics
from penstock.runtime.measuring.engine_state import Sources
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    PreparedPrompt,
    Request,
    RequestTiming,
    StepOutput,
)
from penstock.runtime.requests.sampling import GenerationDefaults
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.pages import FlushedPages
from penstock.runtime.scheduling.status import OutputStatus
from penstock.runtime.text.interface import Text
from tests.service.fake_adapters import FakeAdapters
from tests.service.fake_changes import FakeChanges, Make
from tests.service.fake_outputs import HIDDEN_SIZE, Running, Sink
from tests.service.fake_steps import FakeSteps
from tests.service.fake_updater import TENSORS, FakeUpdater
from tests.support.fake_profiler import FakeProfiler
from tests.support.meters import BUILD, NO_TOTALS
from tests.support.models.byte_text import EOS, VOCAB


class FakeEngine:
    """The fake engine; see the module's docstring."""

    def __init__(
        self,
        *,
        hold: bool = False,
        tokens_per_step: int = 1,
        scripts: Mapping[str | tuple[str, int], Sequence[int]] | None = None,
        vocab_size: int = VOCAB,
        codec: Text | None = None,
        max_model_len: int = 64,
        kv_tokens: int = 1 << 30,
        defaults: GenerationDefaults | None = None,
        eos_token_ids: tuple[int, ...] = (EOS,),
        answer_token_ids: tuple[int, int] | None = None,
        start: Callable[[], None] = lambda: None,
        cached_prompt_tokens: int = 0,
        cached_pages: int = 0,
        proposed_tokens: int = 0,
        accepted_tokens: int = 0,
        **config: Any,
    ) -> None:
        options = EngineConfig(served_model_name="fake", max_model_len=max_model_len, **config)
        self.config = resolve(options, CPU_SIZES)
        self.info = ModelInfo(
            name="fake",
            architecture="FakeForCausalLM",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            defaults=defaults or GenerationDefaults(),
            num_pages=self.config.max_num_seqs,
            page_size=16,
            devices=("fake:0",),
            hidden_size=HIDDEN_SIZE,
            answer_token_ids=answer_token_ids,
        )
        self.text: Text | None = codec
        self.changes = FakeChanges()
        self.updater = FakeUpdater(self)
        self.adapters = FakeAdapters(
            self.config.max_adapters,
            self._outputs_on,
            self.config.max_cached_adapters,
            self.config.adapter_dir,
        )
        self.registry = Registry()
        self.profiler = FakeProfiler()
        self.weights_problem: str | None = None
        self.is_held = False
        """Whether an update in place keeps the engine from stepping."""
        self.failure: Exception | None = None
        self.seen: list[Request] = []
        self.cancelled: list[str] = []
        self.told: list[tuple[str, Finish]] = []
        self.num_steps = 0
        self.longest_step_sinks = 0
        self._tokens_per_step = tokens_per_step
        self._scripts = {self._script_key(key): list(tokens) for key, tokens in (scripts or {}).items()}
        self._kv_tokens = kv_tokens
        self._cached_prompt_tokens = cached_prompt_tokens
        self._cached_pages = cached_pages
        self._speculated = {"proposed_tokens": proposed_tokens, "accepted_tokens": accepted_tokens}
        self._budget = 0 if hold else None
        self._on_start = start
        self._running: dict[str, Running] = {}
        self._waiting: dict[str, Running] = {}
        self._finished: set[str] = set()
        self._outbox: list[tuple[Sink, StepOutput]] = []
        self._changed = threading.Condition()
        self.journal = Journal()
        self._recorded = FakeSteps(self.journal, self._changed)
        self._meters = self._measure() if self.config.metrics else None
        self.is_draining = False
        self._stopping = False
        self.clock: Callable[[], float] = time.monotonic
        """Seconds, by which time limits are measured."""
        self._watches: list[Callable[[], None]] = []
        self._ready_watches: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None

    def _measure(self) -> EngineMeters:
        sources = Sources(
            load=self.load,
            totals=lambda: NO_TOTALS,
            weights_generation=lambda: self.weights.generation,
            are_weights_broken=lambda: self.weights_problem is not None,
            is_paused=lambda: self.is_paused,
            compiles_after_warmup=lambda: 0,
            dropped_entries=lambda: self.journal.dropped,
            memory=dict,
        )
        return EngineMeters(self.registry, self.journal, sources, replace(BUILD, model="fake"))

    # -- control by tests --

    def step(self, count: int = 1) -> None:
        """Allow `count` steps to an engine made with hold=True."""
        with self._changed:
            assert self._budget is not None
            self._budget += count
            self._changed.notify_all()

    def release(self) -> None:
        """Step freely from now on."""
        with self._changed:
            self._budget = None
            self._changed.notify_all()

    def die(self, message: str = "the device is gone") -> None:
        """Die as the real engine does when its thread fails."""
        self.give_up(EngineFailure(message))

    def give_up(self, failure: EngineFailure) -> None:
        with self._changed:
            self.failure = failure
            for watch in self._watches:
                watch()
            self._fail_all(failure)

    def _fail_all(self, error: Exception) -> None:
        for running in [*self._running.values(), *self._waiting.values()]:
            self._tell(running, running.failed(error))
        self._running.clear()
        self._waiting.clear()
        self._changed.notify_all()

    def _tell(self, running: Running, output: StepOutput) -> None:
        self._outbox.append((running.sink, output))
        if output.last:
            self._recorded.ended(running, output)

    def fail(self, request_id: str, error: Exception) -> None:
        """Let one output fail with an error."""
        with self._changed:
            running = self._running.pop(request_id)
            self._finished.add(request_id)
            self._tell(running, running.failed(error))
            self._changed.notify_all()

    def change(self, policy: InFlightPolicy, make: Make, timeout_s: float | None = None) -> Future[Any]:
        """Have a change made when its turn comes."""
        with self._changed:
            done = self.changes.add(policy, len(self._running), make, timeout_s)
            self._changed.notify_all()
            return done

    def go_live(self, label: str) -> None:
        """Serve the next generation of weights, whatever they are."""
        with self._changed:
            previous = self.weights
            version = self.changes.go_live(label)
            self._recorded.recording.changed(
                Applied(version, previous, InFlightReport(), paused_ns=0, applied_at=self.changes.since)
            )

    def break_weights(self, why: str) -> None:
        """Have no whole weights, as after an update in place that failed."""
        with self._changed:
            self.weights_problem, self.is_held = why, False
            self._recorded.recording.changed(WeightsBroken(why))
            self._fail_all(WeightsIncomplete(why))
        for watch in self._ready_watches:
            watch()

    def mend(self) -> None:
        """Have whole weights again."""
        was_broken, self.weights_problem, self.is_held = self.weights_problem is not None, None, False
        for watch in self._ready_watches if was_broken else ():
            watch()

    # -- the interface --

    @property
    def weights(self) -> WeightsVersion:
        return self.changes.weights

    @property
    def weights_since(self) -> dt.datetime:
        return self.changes.since

    def version_of(self, generation: int) -> WeightsVersion:
        return self.changes.versions.get(generation) or WeightsVersion("", generation)

    @property
    def is_paused(self) -> bool:
        return self.changes.is_paused

    def pause(
        self,
        in_flight: InFlightPolicy = InFlightPolicy.WAIT,
        *,
        drain_timeout_s: float | None = None,
        free_kv_cache: bool = False,
        offload_weights: bool = False,
    ) -> Future[Paused]:
        if free_kv_cache and in_flight is InFlightPolicy.KEEP:
            raise InvalidRequest([Violation("free_kv_cache", "the requests that are kept need the cache")])
        if in_flight is InFlightPolicy.WAIT and self.is_paused and self._running:
            raise PausedWithRequests(len(self._running))

        def make(report: InFlightReport) -> Paused:
            self.changes.is_paused = True
            paused = Paused(report, 1000 * free_kv_cache + 100 * offload_weights)
            self._recorded.recording.changed(paused)
            return paused

        return self.change(in_flight, make, drain_timeout_s)

    def resume(self) -> Future[None]:
        def make(report: InFlightReport) -> None:
            if self.changes.is_paused:
                self._recorded.recording.changed(Resumed())
            self.changes.is_paused = False

        return self.change(InFlightPolicy.KEEP, make)

    def on_ready_changed(self, callback: Callable[[], None]) -> None:
        self._ready_watches.append(callback)

    images: ImageReader | None = None
    """The model of this engine reads no pictures."""

    @cached_property
    def forms(self) -> ChatForms:
        if self.text is None:
            return ChatForms()
        options = {"tools": self.config.tool_call_parser, "reasoning": self.config.reasoning_parser}
        return choose_forms(self.text.chat_template, self.text.added_tokens, **options)

    @property
    def has_grammars(self) -> bool:
        return self.text is not None and self.text.backend is not None

    @cached_property
    def grammars(self) -> GrammarCompiler | None:
        if self.text is None or self.text.backend is None:
            return None
        return GrammarCompiler.from_tokenizer(
            self.text.backend, vocab_size=self.info.vocab_size, eos_token_ids=self.info.eos_token_ids
        )

    @property
    def ready(self) -> bool:
        is_whole = self.weights_problem is None
        return self._thread is not None and self.failure is None and not self.is_draining and is_whole

    def pulse(self) -> Pulse:
        has_work = bool(self._running or self._waiting) and self.failure is None
        return Pulse(self.num_steps, has_work, None if self._thread is None else self._thread.ident)

    def on_failure(self, callback: Callable[[], None]) -> None:
        with self._changed:
            self._watches.append(callback)
            if self.failure is not None:
                callback()

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        dtypes = {"BF16": "bfloat16", "F32": "float32"}
        return [(name, dtypes[tensor.dtype], tensor.shape) for name, tensor in TENSORS.items()]

    def start(self) -> None:
        self._on_start()
        self.journal.start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def prepare(self, request: Request) -> PreparedPrompt:
        return PreparedPrompt(request.prompt_token_ids, request.cache, (), in_vocabulary=True)

    def submit(self, request: Request, sink: Sink, prepared: PreparedPrompt | None = None) -> None:
        with self._changed:
            self._refuse(request)
            self.seen.append(request)
            now_ns = time.monotonic_ns()
            timing = RequestTiming(received_ns=request.received_ns or now_ns, arrived_ns=now_ns)
            self._waiting[request.request_id] = Running(request, sink, timing)
            self._recorded.recording.queued(request)
            self._admit()
            self._changed.notify_all()

    def _outputs_on(self, adapter: str) -> int:
        active = [*self._running.values(), *self._waiting.values()]
        return sum(one.request.adapter == adapter for one in active)

    def _refuse(self, request: Request) -> None:
        num = len(request.prompt_token_ids)
        if self.failure is not None:
            raise EngineDead(f"the engine is dead: {self.failure}") from self.failure
        if self.is_draining:
            raise Draining
        if self._thread is None:
            raise NotReady
        if self.weights_problem is not None:
            raise WeightsIncomplete(self.weights_problem)
        if request.min_generation > self.weights.generation:
            raise WeightsTooOld(request.min_generation, self.weights.generation)
        if request.adapter is not None and request.adapter_weights is None:
            self.adapters.get(request.adapter)
        if num >= self.info.max_model_len:
            raise PromptTooLong(num, self.info.max_model_len - 1)
        if num >= self._kv_tokens:
            raise ExceedsKVCapacity(num + 1, self._kv_tokens)
        active = [*self._running.values(), *self._waiting.values()]
        if any(request.request_id in (one.base_id, one.request.request_id) for one in active):
            raise DuplicateRequestId(request.request_id)
        if len(self._waiting) >= self.config.max_queued_requests:
            raise QueueFull(self.config.max_queued_requests)

    def cancel(self, *request_ids: str) -> None:
        with self._changed:
            for request_id in request_ids:
                self.cancelled.append(request_id)
                running = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
                if running is not None:
                    timing = replace(running.timing, finished_ns=time.monotonic_ns())
                    self._recorded.recording.cancelled(running.request, timing, len(running.made))
            self._admit()

    def finish(self, request_id: str, finish: Finish) -> None:
        with self._changed:
            self.told.append((request_id, finish))
            self._end(request_id, finish)

    def abort(
        self,
        request_ids: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all_requests: bool = False,
        message: str = "",
    ) -> list[tuple[str, AbortOutcome]]:
        assert (request_ids is not None) + bool(prefix) + all_requests == 1
        with self._changed:
            active = [*self._running.values(), *self._waiting.values()]
            if request_ids is None:
                ids = dict.fromkeys(one.base_id for one in active)
                request_ids = [i for i in ids if all_requests or i.startswith(prefix or "")]
            results = []
            for request_id in request_ids:
                outputs = [one.request.request_id for one in active if one.base_id == request_id]
                finish = Finish(FinishReason.ABORTED, message=message)
                if outputs and all(self._end(output, finish) for output in outputs):
                    results.append((request_id, AbortOutcome.ABORTED))
                elif request_id in self._finished:
                    results.append((request_id, AbortOutcome.ALREADY_FINISHED))
                else:
                    results.append((request_id, AbortOutcome.NOT_FOUND))
            return results

    def metrics(self, *, flush: bool = True) -> EngineMetrics:
        if self._meters is None:
            raise ConfigError("metrics: the engine was made without them")
        return self._meters.metrics(flush=flush)

    def oldest_outputs(self, most: int) -> list[OutputStatus]:
        with self._changed:
            active = sorted(
                [*self._running.values(), *self._waiting.values()], key=lambda one: one.timing.arrived_ns
            )
            return [one.status(runs=one.request.request_id in self._running) for one in active[:most]]

    def load(self) -> Load:
        with self._changed:
            return self._load()

    def _load(self) -> Load:
        prompt_tokens = sum(len(w.request.prompt_token_ids) for w in self._waiting.values())
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            waiting_prompt_tokens=prompt_tokens,
            pages_used=len(self._running),
            pages_cached=0,
            pages_total=self.info.num_pages,
        )

    def flush_prefix_cache(self) -> FlushedPages:
        with self._changed:
            freed, self._cached_pages = self._cached_pages, 0
            return FlushedPages(freed, in_use=len(self._running))

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            self.is_draining = True
            return self._changed.wait_for(
                lambda: not (self._running or self._waiting or self._outbox), timeout_s
            )

    def shutdown(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.journal.close()

    # -- the thread --

    def _admit(self) -> None:
        if self.is_paused or self.changes.holds_admission:
            return
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            request_id = next(iter(self._waiting))
            running = self._waiting.pop(request_id)
            cached = min(self._cached_prompt_tokens, len(running.request.prompt_token_ids) - 1)
            running.timing = replace(
                running.timing,
                scheduled_ns=time.monotonic_ns(),
                cached_prompt_tokens=cached,
                **self._speculated,
            )
            self._running[request_id] = running

    def _end(self, request_id: str, finish: Finish, token_ids: Sequence[int] = ()) -> bool:
        running = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        if running is None:
            return False
        timing = replace(running.timing, finished_ns=time.monotonic_ns())
        self._finished.add(request_id)
        self._tell(running, running.output(token_ids, finish, timing, self.weights.generation))
        self._admit()
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                while self._idle():
                    self._changed.wait(0.005)  # short, so that time limits are noticed
                    self._expire()
                    self._make_changes()
                if self._may_step():
                    if self._budget is not None:
                        self._budget -= 1
                    self.num_steps += 1
                    self._recorded.begin(self.num_steps, list(self._running.values()), self._tokens_per_step)
                    num_before = len(self._outbox)
                    for request_id in list(self._running):
                        self._advance(request_id)
                    self._recorded.commit([output for _, output in self._outbox[num_before:]], self._load())
                self._make_changes()
                outbox, self._outbox = self._outbox, []
                self._changed.notify_all()
            self.changes.settle()
            by_sink: dict[int, tuple[Sink, list[StepOutput]]] = {}
            for sink, output in outbox:
                by_sink.setdefault(id(sink), (sink, []))[1].append(output)
            for sink, outputs in by_sink.values():
                sink(outputs)
            self._recorded.recording.delivered()

    def _make_changes(self) -> None:
        if not self.changes.queue:
            return

        def end_all() -> None:
            for request_id in list(self._running):
                self._end(request_id, Finish(FinishReason.ABORTED, message="for a change"))

        self.changes.make_due(len(self._running), end_all)
        self._admit()

    def _idle(self) -> bool:
        return not (self._stopping or self._outbox or self._may_step() or self.changes.has_settled)

    def _may_step(self) -> bool:
        stands = self.is_paused or self.is_held
        return bool(self._running) and not stands and (self._budget is None or self._budget > 0)

    def _expire(self) -> None:
        now = self.clock()
        for request_id, running in [*self._running.items(), *self._waiting.items()]:
            if now >= running.deadline:
                self._end(request_id, Finish(FinishReason.TIME_LIMIT))

    def _advance(self, request_id: str) -> None:
        running = self._running[request_id]
        if running.request.reading is not None:
            self._end(request_id, Finish(FinishReason.PROMPT_READ))
            return
        new: list[int] = []
        for _ in range(self._tokens_per_step):
            try:
                new.append(running.make(self._script_of(running), self.info))
            except InvalidRequest as error:  # of its grammar
                self.fail(request_id, error)
                return
            finish = running.finish(self.info, self.clock())
            if finish is not None:
                break
        if not running.timing.first_token_ns:
            running.timing = replace(running.timing, first_token_ns=time.monotonic_ns())
        if finish is not None:
            self._end(request_id, finish, new)
        else:
            self._tell(running, running.output(new, None, None, self.weights.generation))

    def _script_key(self, key: str | tuple[str, int]) -> tuple[tuple[int, ...], int | None]:
        prompt, index = key if isinstance(key, tuple) else (key, None)
        ids = prompt.encode() if self.text is None else self.text.encode(prompt, add_special_tokens=False)
        return tuple(ids), index

    def _script_of(self, running: Running) -> Sequence[int] | None:
        prompt = running.request.prompt_token_ids
        return self._scripts.get((prompt, running.index), self._scripts.get((prompt, None)))
