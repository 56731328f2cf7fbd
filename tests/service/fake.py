"""An engine whose tokens are known beforehand: the real core, scheduler, journal and meters, on a runner that
counts bytes upwards (`tests/support/scheduler/byte_runner.py`). It takes milliseconds, and no jax.

With `hold=True` the engine makes tokens only when it is told to. Then a request that comes is let in at once,
if there is room, and waits for its first token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock.runtime.adapters.interface import AdapterTensors
from penstock.runtime.adapters.registry import AdapterRegistry
from penstock.runtime.chat.parser import ChatForms, choose_forms
from penstock.runtime.config import CPU_SIZES, EngineConfig, ResolvedConfig, resolve
from penstock.runtime.errors import (
    AdapterFormatError,
    ConfigError,
    EngineFailure,
    UnknownUpdate,
    UnsupportedFeature,
)
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.loading.dtypes import DTYPES
from penstock.runtime.loop.changes import Change
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import InFlightPolicy, Sink
from penstock.runtime.loop.journal import Journal
from penstock.runtime.loop.stepping import Pacer
from penstock.runtime.measuring.engine_meters import EngineMeters
from penstock.runtime.measuring.engine_metrics import EngineMetrics
from penstock.runtime.measuring.engine_state import Sources
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.requests.adapter import AdapterBlock, AdapterValues, AdapterWeights
from penstock.runtime.requests.request import Finish, PreparedPrompt, Request, StepOutput, StoppingParams
from penstock.runtime.requests.sampling import GenerationDefaults
from penstock.runtime.scheduling.plan import Plan
from penstock.runtime.scheduling.proposals import Proposer
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.text.interface import Text
from penstock.service.backend import Profiler
from tests.support.meters import BUILD
from tests.support.models.byte_text import EOS, VOCAB
from tests.support.scheduler.byte_runner import HIDDEN_SIZE, ByteProposer, ByteRunner

TENSORS = {
    "model.embed_tokens.weight": SentTensor("model.embed_tokens.weight", "BF16", (VOCAB, 8)),
    "model.norm.weight": SentTensor("model.norm.weight", "F32", (8,)),
}
"""The weights that the engine says it has. `tests/service/updatable.py` has some."""


@lru_cache(maxsize=8)
def compiler_of(backend: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarCompiler:
    """Make a compiler of grammars, or return the tokenizer's own. Each starts a process, which on a busy
    machine takes longer than the usual limit.
    """
    config = CompilerConfig(time_limit_s=60.0)
    return GrammarCompiler.from_tokenizer(
        backend, vocab_size=vocab_size, eos_token_ids=eos_token_ids, config=config
    )


class HeldScheduler(Scheduler):
    """A scheduler that plans as many steps as a test allows. Between them it lets requests in that come: the
    token of their first step is put off until the test allows one.
    """

    def __init__(self, config: SchedulerConfig, proposer: Proposer | None, *, hold: bool) -> None:
        super().__init__(config, proposer)
        self.budget: int | None = 0 if hold else None
        """How many steps may be planned; None: any number."""
        self.put_off_steps: set[int] = set()
        """The steps whose tokens are put off."""
        self.num_steps = 0
        """How many steps have made tokens, or read prompts."""
        self.tell: Callable[[], None] = lambda: None
        """Called with the engine's lock held when requests that came were let in, or could not be."""
        self._seen: object = None

    @property
    def has_newcomers(self) -> bool:
        """Whether something waits that no plan has tried to let in. What only reads its prompt would end
        with its first step, so it waits as long as the engine is held.
        """
        waiting = self.roster.waiting
        if self.budget != 0 or self._commits or any(seq.request.reading is not None for seq in waiting):
            return False
        return bool(waiting) and self._seen != self._state()

    def _state(self) -> object:
        return len(self.roster.running), [seq.request_id for seq in self.roster.waiting]

    def schedule(self, now_ns: int, *, admit: bool = True, max_steps: int = 1, **limits: Any) -> Plan | None:
        if self.budget is None:
            return super().schedule(now_ns, admit=admit, max_steps=max_steps, **limits)
        if self.budget:
            plan = super().schedule(now_ns, admit=admit, max_steps=max_steps, **limits)
            self.budget -= plan is not None
            self._seen = None
            return plan
        if not (admit and self.has_newcomers):
            return None
        plan = super().schedule(now_ns, **limits)
        self._seen = self._state()
        self.tell()
        if plan is not None:
            self.put_off_steps.add(plan.step_id)
        return plan

    def commit(self, plan: Plan, *result: Any) -> list[StepOutput]:
        outputs = super().commit(plan, *result)
        self.num_steps += plan.step_id not in self.put_off_steps
        return outputs

    def put_off(self, plan: Plan, rows: Any, late: Any) -> None:
        super().put_off(plan, rows, late)
        for seq in self.roster.running:
            seq.sits_out = 0  # the next step is of all


class FixedPacer(Pacer):
    """Makes every window as long as it may be."""

    def __init__(self, max_steps: int) -> None:
        super().__init__(0.0, max_steps)
        self._most = max_steps

    def max_steps(self, ns_to_deadline: int, steps_ahead: int) -> int:
        return self._most


class ContentReader:
    """Reads adapters that are bytes: a directory holds them in a file `content`, and what is pushed is its
    config and its values.
    """

    def __init__(self) -> None:
        self.read_from: list[Path | AdapterTensors] = []
        """What each adapter was read from, in order."""

    def read(self, source: Path | AdapterTensors) -> AdapterWeights:
        rank = 8
        if isinstance(source, Path):
            try:
                content = (source / "content").read_bytes()
            except OSError as error:
                raise AdapterFormatError(f"{source} holds no adapter_config.json") from error
        else:
            source = AdapterTensors(source.config, [*source.tensors])
            content = json.dumps(source.config).encode() + b"".join(a.tobytes() for _, a in source.tensors)
            rank = source.config["r"]
        self.read_from.append(source)
        block = AdapterBlock(0, 0, len(content), np.frombuffer(content, np.uint8)[None])
        values = AdapterValues(1, len(content), np.dtype(np.uint8), (block,))
        return AdapterWeights(values, hashlib.sha256(content).hexdigest(), rank, 2.0, ("k_proj", "q_proj"))

    def check(self, config: Mapping[str, Any], tensors: Iterable[SentTensor]) -> None:
        if not isinstance(config.get("r"), int):
            raise AdapterFormatError("must be a whole number", field="r")


class NoUpdates:
    """The updater of an engine that takes no weights."""

    digest = b""
    staged_update_id = ""

    def already_committed(self, update_id: str) -> None:
        return None

    def commit_staged(self, update_id: str, **_: Any) -> Any:
        raise UnknownUpdate(update_id)

    def discard(self, update_id: str) -> bool:
        return False

    def begin(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedFeature(["UpdateWeights"])

    open_uri = validate = validate_uri = begin

    def close(self) -> None:
        pass


class FakeEngine(EngineCore):
    """See the module's docstring. `scripts` has what follows a prompt, or one output of it, in place of
    letters; `tokens_per_step` is the length of windows. `guesses`: how many tokens are proposed for each
    output, and how many of these are the right ones. `cached`: prompts that are in the prefix cache from the
    start on.
    """

    def __init__(
        self,
        *,
        hold: bool = False,
        tokens_per_step: int = 1,
        scripts: Mapping[str | tuple[str, int], Sequence[int]] | None = None,
        vocab_size: int = VOCAB,
        codec: Text | None = None,
        max_model_len: int = 64,
        num_pages: int | None = None,
        defaults: GenerationDefaults | None = None,
        eos_token_ids: tuple[int, ...] = (EOS,),
        answer_token_ids: tuple[int, int] | None = None,
        start: Callable[[], None] = lambda: None,
        guesses: tuple[int, int] | None = None,
        cached: Sequence[str] = (),
        **config: Any,
    ) -> None:
        options = EngineConfig(served_model_name="fake", max_model_len=max_model_len, **config)
        self.config = resolve(options, CPU_SIZES)
        self.text: Text | None = codec
        limits = _limits(self.config, max_model_len, num_pages, frozenset(eos_token_ids), guesses)
        proposer = None if guesses is None else ByteProposer(*guesses)
        self.scheduler = HeldScheduler(limits, proposer, hold=hold)
        self.runner = ByteRunner(limits, {}, vocab_size)
        self.runner.scripts = {self._script_key(key): [*tokens] for key, tokens in (scripts or {}).items()}
        self.runner.is_put_off = lambda plan: plan.step_id in self.scheduler.put_off_steps
        if proposer is not None:
            proposer.following = self.runner.following
        self.journal = Journal()
        super().__init__(
            self.runner,
            self.scheduler,
            vocab_size=vocab_size,
            journal=self.journal,
            pacer=FixedPacer(tokens_per_step),
        )
        self.scheduler.tell = self.guard.changed.notify_all
        self.info = ModelInfo(
            name="fake",
            architecture="FakeForCausalLM",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            defaults=defaults or GenerationDefaults(),
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            devices=("fake:0",),
            hidden_size=HIDDEN_SIZE,
            answer_token_ids=answer_token_ids,
        )
        self.adapter_reader = ContentReader() if self.config.max_adapters else None
        self.adapters = AdapterRegistry(
            self.config, self.adapter_reader, self.scheduler.roster.adapters, self.name_adapters
        )
        self.updater: Any = NoUpdates()
        """In its place, `tests/service/updatable.py` has the real one."""
        self.registry = Registry()
        self._meters = self._measure() if self.config.metrics else None
        self.seen: list[Request] = []
        """The requests that were taken."""
        self.cancelled: list[str] = []
        self.told: list[tuple[str, Finish]] = []
        """What callers have ended, and how."""
        self._on_start = start
        self._cached = cached

    def _measure(self) -> EngineMeters:
        sources = Sources(
            load=self.load,
            totals=self.totals,
            weights_generation=lambda: self.weights.generation,
            are_weights_broken=lambda: self.changes.weights_problem is not None,
            is_paused=lambda: self.is_paused,
            compiles_after_warmup=lambda: 0,
            dropped_entries=lambda: self.journal.dropped,
            memory=dict,
        )
        return EngineMeters(self.registry, self.journal, sources, replace(BUILD, model="fake"))

    # -- control by tests --

    @property
    def num_steps(self) -> int:
        """How many steps have made tokens, or read prompts."""
        return self.scheduler.num_steps

    def step(self, count: int = 1) -> None:
        """Allow `count` steps to an engine made with hold=True."""
        with self.guard.lock, self.guard.changing():
            assert self.scheduler.budget is not None
            self.scheduler.budget += count

    def release(self) -> None:
        """Step freely from now on."""
        with self.guard.lock, self.guard.changing():
            self.scheduler.budget = None

    def pass_time_limits(self) -> None:
        """Have all time limits passed of the requests that wait or run."""
        with self.guard.lock, self.guard.changing():
            for seq in self.scheduler.roster.active():
                seq.rules = replace(seq.rules, deadline_ns=0)
            self.scheduler._endings.next_deadline_ns = 0

    def preempt(self) -> None:
        """Take the pages of all that run, which compute their prompts and tokens again."""
        with self.guard.lock, self.guard.changing():
            self.scheduler.preempt_all()
            self._delivery._recording.preempted(self.scheduler.take_preempted())

    def die(self, message: str = "the device is gone") -> None:
        """Die as when the engine's thread fails."""
        self.give_up(EngineFailure(message))

    def fail(self, request_id: str, error: Exception) -> None:
        """Let one output fail with an error."""
        with self.guard.lock, self.guard.changing():
            self._delivery.post([self.scheduler.fail(request_id, error, time.monotonic_ns())])

    def go_live(self, label: str) -> None:
        """Serve the next generation of weights."""
        self.changes.update(lambda: None, label, InFlightPolicy.KEEP).result(60)

    @property
    def is_draining(self) -> bool:
        return self._life.is_draining

    @property
    def waiting_changes(self) -> list[Change]:
        """The updates and pauses that wait for their turn."""
        return self.changes._between._queue

    # -- the interface --

    images: ImageReader | None = None
    """The model of this engine reads no images."""

    @cached_property
    def profiler(self) -> Profiler:
        from penstock.runtime.profiling import profiler  # noqa: PLC0415  # imports JAX

        return profiler.Profiler(self)

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
        return compiler_of(self.text.backend, self.info.vocab_size, self.info.eos_token_ids)

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, DTYPES[sent.dtype].name, sent.shape) for name, sent in TENSORS.items()]

    def metrics(self, *, flush: bool = True) -> EngineMetrics:
        if self._meters is None:
            raise ConfigError("metrics: the engine was made without them")
        return self._meters.metrics(flush=flush)

    def start(self) -> None:
        self._on_start()
        for number, prompt in enumerate(self._cached):
            self._compute(f"cached{number}", self._script_key(prompt)[0])
        self.journal.start()
        super().start()

    def _compute(self, name: str, prompt: tuple[int, ...]) -> None:
        """Compute a prompt, unseen, as a request that ends with its first token does."""
        self.scheduler.add(Request(name, prompt, stopping=StoppingParams(max_tokens=1)), 0)
        while (plan := Scheduler.schedule(self.scheduler, 0)) is not None:
            Scheduler.commit(self.scheduler, plan, self.runner.execute(plan), 1)

    def shutdown(self) -> None:
        super().shutdown()
        self.journal.close()
        self.updater.close()

    def submit(self, request: Request, sink: Sink, prepared: PreparedPrompt | None = None) -> None:
        """Do what the core does. While the engine is held, return when it has tried to let the request in."""
        self.seen.append(request)
        try:
            if request.adapter is not None and request.adapter_weights is None:
                request = replace(request, adapter_weights=self.adapters.weights_of(request.adapter))
                prepared = None
            super().submit(request, sink, prepared)
        except BaseException:
            self.seen.pop()
            raise
        with self.guard.changed:
            self.guard.changed.wait_for(self._is_let_in, 10)

    def _is_let_in(self) -> bool:
        between = self.changes._between
        return not self.scheduler.has_newcomers or between.stands_still or not (between.admits and self.ready)

    def cancel(self, *request_ids: str) -> None:
        self.cancelled += request_ids
        super().cancel(*request_ids)

    def finish(self, request_id: str, finish: Finish) -> None:
        self.told.append((request_id, finish))
        super().finish(request_id, finish)

    def _script_key(self, key: str | tuple[str, int]) -> tuple[tuple[int, ...], int | None]:
        prompt, index = key if isinstance(key, tuple) else (key, None)
        ids = prompt.encode() if self.text is None else self.text.encode(prompt, add_special_tokens=False)
        return tuple(ids), index


def _limits(
    config: ResolvedConfig,
    max_model_len: int,
    num_pages: int | None,
    eos_token_ids: frozenset[int],
    guesses: tuple[int, int] | None,
) -> SchedulerConfig:
    """Return the scheduler's limits. There are pages for as many long requests as may run."""
    proposed = 0 if guesses is None else guesses[0]
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs * (1 + proposed)),
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=num_pages or config.max_num_seqs * -(-max_model_len // config.page_size),
        eos_token_ids=eos_token_ids,
        max_queued_requests=config.max_queued_requests,
        feature_slots=config.feature_slots,
        scheduling_policy=config.scheduling_policy,
        prefix_cache_pages=config.prefix_cache_pages,
        max_adapters=config.max_adapters,
        image_blocks=64,
        max_proposed_tokens=proposed,
        max_rows=config.max_num_seqs * (1 + proposed),
    )
