"""Engine: one model, ready to generate. The service stands on it, and it can be embedded without a server.

>>> engine = Engine.from_pretrained("demo", EngineConfig(max_num_seqs=4))
>>> engine.start()
>>> engine.generate("Once upon a time", stopping=StoppingParams(max_tokens=40)).text

Token-level work is `EngineCore`'s; this class loads, sizes, compiles, and puts text around the tokens.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import queue
import traceback
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime import host_memory
from penstock.runtime.assemble import Assembler, Delta
from penstock.runtime.buckets import CPU_ROW_GROWTH, NATIVE_TOKEN_GROWTH, ROW_GROWTH, TOKEN_GROWTH, Buckets
from penstock.runtime.compilation import use_compilation_cache
from penstock.runtime.config import DEFAULT_TARGET_ITL_S, EngineConfig, ResolvedConfig, resolve
from penstock.runtime.core import EngineCore
from penstock.runtime.cpu_threads import check_pool, start_backends
from penstock.runtime.defaults import GenerationDefaults
from penstock.runtime.errors import ConfigError, EngineFailure, InvalidRequest, Violation
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.interface import AbortOutcome, InFlightPolicy, Observer, Pulse, Sink, WeightsVersion
from penstock.runtime.memory import device_kv_bytes, plan_kv
from penstock.runtime.native import library
from penstock.runtime.pacing import Pacer
from penstock.runtime.processors import available_processors
from penstock.runtime.request import (
    Finish,
    Output,
    PreparedPrompt,
    Request,
    RequestTiming,
    SamplingParams,
    StoppingParams,
    TokenLogprobs,
)
from penstock.runtime.runner import ModelRunner, single_device_mesh
from penstock.runtime.runner_config import RunnerConfig
from penstock.runtime.scheduler import Load, Scheduler, SchedulerConfig
from penstock.runtime.served import ServedModel, load_model
from penstock.runtime.switch_interval import SwitchInterval
from penstock.runtime.text import TextCodec
from penstock.runtime.word_table import WordTable

log = logging.getLogger(__name__)

SamplingCallback = Callable[[Request], SamplingParams]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served, as resolved."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    num_pages: int
    page_size: int
    devices: tuple[str, ...]
    batch_invariant: bool = False
    """Whether a token's logits depend on its own request alone, bit for bit: so where native kernels compute
    the whole model (on CPU, in bfloat16, with or without int8); of what XLA computes it is not promised."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One whole output: what the deltas of `Engine.stream` come to."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, if asked for."""
    finish: Finish
    timing: RequestTiming


class Engine:
    """A served model with its runner, scheduler and thread."""

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig,
        *,
        observer: Observer | None = None,
        sampling_params_callback: SamplingCallback | None = None,
    ) -> None:
        """Size the KV cache and build scheduler and runner; nothing is compiled before `start`. ConfigError
        if it cannot fit.

        `sampling_params_callback` sees every request before it is queued, in the caller's thread, and returns
        the sampling it is to have; it must be quick. What it returns is checked as a caller's own would be,
        and an error that it raises is the caller's answer.
        """
        self._callback = sampling_params_callback
        device = next(iter(jax.tree.leaves(model.weights)[0].devices()))
        mesh = single_device_mesh(device)
        threads = config.threads or available_processors()
        native = library.wanted(config.native, config.native_folder, device.platform, np.dtype(model.dtype))
        if native:
            library.limit_threads(threads)
        if device.platform == "cpu":
            check_pool(threads)
        stats = (device.memory_stats() or {}) if device.platform != "cpu" else {}
        config = resolve(config, device.platform, stats.get("bytes_limit"), defaults=model.defaults)
        if model.defaults.sampling().has_penalties:
            log.info(
                "requests have penalties unless they say otherwise: %d feature slots for them, %.0f MB",
                config.feature_slots,
                config.feature_slots * model.vocab_size * 8 / 1e6,
            )
        buckets = Buckets.default(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            token_growth=NATIVE_TOKEN_GROWTH if model.skips_padding else TOKEN_GROWTH,
            row_growth=CPU_ROW_GROWTH if device.platform == "cpu" else ROW_GROWTH,
            max_window=None if device.platform == "cpu" else config.max_decode_steps,
        )
        runner_config = RunnerConfig(
            buckets=buckets,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len or model.max_model_len,
            page_size=config.page_size,
            dtype=model.dtype,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            feature_slots=config.feature_slots,
            max_logprobs=config.max_logprobs,
            native=native,
            threads=threads,
            max_decode_steps=config.max_decode_steps,
            show_progress=config.show_progress,
        )
        use_compilation_cache(config.compilation_cache)
        page_bytes = model.kv_spec.bytes_per_token(np.dtype(model.dtype).itemsize) * config.page_size
        device_bytes = None
        if device.platform != "cpu" and config.kv_cache_bytes is None:
            probe = ModelRunner(model.graphdef, model.weights, model.kv_spec, runner_config, mesh)
            device_bytes = device_kv_bytes(device, config.hbm_utilization, probe.peak_temp_bytes())
            del probe  # with what it keeps for sampling, which the runner makes again
        kv = plan_kv(
            config,
            model_max_len=model.max_model_len,
            page_bytes=page_bytes,
            device_bytes=device_bytes,
            sliding_window=model.sliding_window,
        )
        runner_config = dataclasses.replace(runner_config, max_model_len=kv.max_model_len)
        self._runner = ModelRunner(model.graphdef, model.weights, model.kv_spec, runner_config, mesh)
        batch_invariant = model.is_native and self._runner.attends_natively
        if config.native == "require" and not batch_invariant:
            raise ConfigError(
                "native: the kernels are required, but cannot compute all of this model: they take a "
                "page_size in multiples of 16, heads of 32, inputs of products of 64 and outputs of 16"
            )
        self._runner.initialize_kv_cache(kv.num_pages)
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=kv.max_model_len,
                page_size=config.page_size,
                num_pages=kv.num_pages,
                eos_token_ids=frozenset(model.eos_token_ids),
                feature_slots=config.feature_slots,
                max_queued_requests=config.max_queued_requests,
                max_prefill_chunk=config.max_prefill_chunk,
                step_sizes=() if model.skips_padding else buckets.token_buckets,
                scheduling_policy=config.scheduling_policy,
                prefix_cache_pages=config.prefix_cache_pages,
                sliding_window=model.sliding_window,
                window_steps=() if buckets.window_steps == (0,) else buckets.window_steps,
            )
        )
        target_itl_s = config.target_itl_s
        if target_itl_s is None:
            target_itl_s = DEFAULT_TARGET_ITL_S if batch_invariant else 0.0
        self._core = EngineCore(
            self._runner,
            scheduler,
            vocab_size=model.vocab_size,
            observer=observer,
            overlap=config.overlap,
            pacer=Pacer(config.decode_window_s, config.max_decode_steps, target_itl_s),
        )
        self._switch_interval = SwitchInterval(config.switch_interval_s)
        # Without its weights: the runner holds those that serve, and an update must be able to free the old.
        self._model = dataclasses.replace(model, weights=None)
        self.config: ResolvedConfig = dataclasses.replace(
            config,
            served_model_name=model.name,
            max_model_len=kv.max_model_len,
            kv_cache_bytes=kv.num_pages * page_bytes,
            dtype=np.dtype(model.dtype).name,
            threads=threads,
            target_itl_s=target_itl_s,
        )
        self.info = ModelInfo(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=kv.max_model_len,
            eos_token_ids=model.eos_token_ids,
            defaults=model.defaults,
            num_pages=kv.num_pages,
            page_size=config.page_size,
            devices=(f"{device.platform}:{device.id} {device.device_kind}",),
            batch_invariant=batch_invariant,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        sampling_params_callback: SamplingCallback | None = None,
    ) -> Engine:
        """Load "demo", a checkpoint directory or a Hugging Face hub id. Raises ConfigError."""
        config = config or EngineConfig()
        devices = start_backends(config.threads or available_processors())
        return cls(
            load_model(model, config, single_device_mesh(devices[0])),
            config,
            observer=observer,
            sampling_params_callback=sampling_params_callback,
        )

    # -- life --

    def start(self) -> None:
        """Compile every program (with a progress bar) and start the engine thread; blocks until ready."""
        self._runner.compile()
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the server: no collection need walk it again
        self._switch_interval.apply()
        self._core.start()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._core.ready

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine died, if it did."""
        return self._core.failure

    def pulse(self) -> Pulse:
        """Whether the engine's thread moves; any thread may ask at any time, and waits for nothing."""
        return self._core.pulse()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call this once when the engine dies, before its requests are told; at once if it is dead. It may be
        called on any thread, and must not block.
        """
        self._core.on_failure(callback)

    @property
    def text(self) -> TextCodec | None:
        """The model's tokenizer; None for a model without one."""
        return self._model.text

    @cached_property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles grammars for the model's tokenizer; None for a model without one, or with one that cannot
        have them. Made when it is first asked for, in up to a second.
        """
        backend = None if self._model.text is None else self._model.text.backend
        if backend is None:
            return None
        try:
            return GrammarCompiler.from_tokenizer(
                backend,
                vocab_size=self.info.vocab_size,
                eos_token_ids=self.info.eos_token_ids,
                config=CompilerConfig(time_limit_s=self.config.grammar_time_limit_s),
            )
        except ConfigError as error:
            log.warning("no structured output: %s", error)
            return None

    @property
    def weights(self) -> WeightsVersion:
        """Which weights serve."""
        return self._core.weights

    @property
    def compiles_after_warmup(self) -> int:
        """XLA compilations by the engine thread since `start`; anything but 0 is a bug."""
        return self._runner.compiles_after_warmup.count

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(checkpoint name, dtype, shape) of every weight, as `update_weights` takes them."""
        return [(spec.hf_name, np.dtype(spec.dtype).name, tuple(spec.shape)) for spec in self._model.tensors]

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the others; false if some are left after `timeout_s` seconds."""
        return self._core.drain(timeout_s)

    def shutdown(self) -> None:
        """End what runs (ABORTED) and free the device's memory. May be called twice."""
        self._core.shutdown()
        self._switch_interval.restore()
        compiler: GrammarCompiler | None = self.__dict__.get("grammars")  # if anybody asked for it
        if compiler is not None:
            compiler.close()
        host_memory.let_go()

    # -- tokens --

    def prepare(self, request: Request) -> PreparedPrompt:
        """The part of `submit` that takes the longer the longer prompt and sampling are; see
        `EngineCore.prepare`.
        """
        prepared = self._core.prepare(request)
        words = _long_words(request.sampling)
        if not words or prepared.sampling is None:
            return prepared
        return dataclasses.replace(prepared, words=WordTable(words, self.info.vocab_size))

    def submit(self, request: Request, sink: Sink, prepared: PreparedPrompt | None = None) -> None:
        """Queue a request; see `EngineCore.submit`. What `sampling_params_callback` makes of its sampling is
        what counts."""
        if self._callback is not None:
            request = dataclasses.replace(request, sampling=self._rewritten(request))
        most = self.config.max_logprobs
        bad = [
            Violation(f"output.{name}", f"must be at most {most}, not {value}")
            for name, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs))
            if value is not None and value > most
        ]
        if bad:
            raise InvalidRequest(bad)
        words: Sequence[Sequence[int]] | WordTable = _long_words(request.sampling)
        if words:
            if prepared is not None and prepared.words is not None and prepared.covers(request.sampling):
                words = prepared.words
            constraint = BadWords(words, request.constraint, self.info.vocab_size)
            request = dataclasses.replace(request, constraint=constraint)
        self._core.submit(request, sink, prepared)

    def _rewritten(self, request: Request) -> SamplingParams:
        assert self._callback is not None
        sampling = self._callback(request)
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling_params_callback must return SamplingParams, not {type(sampling)}")
        return sampling

    def cancel(self, *request_ids: str) -> None:
        """Free requests whose reader is gone; waits for nothing."""
        self._core.cancel(*request_ids)

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason found in its text."""
        self._core.finish(request_id, finish)

    def abort(
        self,
        request_ids: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all_requests: bool = False,
        message: str = "",
    ) -> list[tuple[str, AbortOutcome]]:
        """End requests by exact ids, prefix, or all; slot and pages are free when this returns."""
        return self._core.abort(request_ids, prefix=prefix, all_requests=all_requests, message=message)

    def load(self) -> Load:
        """How busy the engine is."""
        return self._core.load()

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Forget all cached prefixes: (pages that became free, pages that running requests still hold)."""
        return self._core.flush_prefix_cache()

    def update_weights(
        self,
        tensors: Mapping[str, NDArray[Any]],
        *,
        label: str,
        in_flight: InFlightPolicy = InFlightPolicy.WAIT,
        partial: bool = False,
    ) -> Future[WeightsVersion]:
        """Stage named tensors now, while serving, and swap them in between two steps.

        Until then the new weights lie beside those that serve, made leaf by leaf, which takes as much memory
        again as what is new. `tensors` may be lazy: each is asked for twice, to be checked and to be taken,
        and not held on to.
        Raises CheckpointError naming every missing, extra or wrongly shaped tensor; then nothing has changed.
        """
        self._core.check_running()
        try:
            staged = [self._model.staged(self._runner.weights, tensors, partial)]
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was made until then
            host_memory.let_go()
            raise

        def install() -> None:
            # Taken out of the list: of what it holds, nothing must be left but the weights that serve.
            self._runner.replace_weights(staged.pop()(self._runner.weights))
            host_memory.let_go()

        def settled(_: Future[WeightsVersion]) -> None:
            staged.clear()  # if its turn never came
            host_memory.let_go()

        done = self._core.update(install, label, in_flight)
        done.add_done_callback(settled)
        return done

    # -- text --

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        stopping: StoppingParams | None = None,
        logprobs: int | None = None,
        request_id: str | None = None,
    ) -> Generator[Delta, None, None]:
        """Generate from text or token ids, yielding what each step adds; the last value has `finish` and
        `timing`. Closing the iterator early frees the request.

        Unset sampling means the model's defaults. Raises RequestError or UnavailableError before the first
        value.
        """
        return self._stream(self._request(prompt, sampling, stopping, logprobs, request_id))

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        stopping: StoppingParams | None = None,
        logprobs: int | None = None,
        request_id: str | None = None,
    ) -> Generation:
        """`stream`, joined."""
        request = self._request(prompt, sampling, stopping, logprobs, request_id)
        deltas = list(self._stream(request))
        finish, timing = deltas[-1].finish, deltas[-1].timing
        assert finish is not None, "a stream that raises nothing has an end"
        assert timing is not None, "an end has its timing"
        return Generation(
            request.request_id,
            "".join(delta.text for delta in deltas),
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
            finish,
            timing,
        )

    def _request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None,
        stopping: StoppingParams | None,
        logprobs: int | None,
        request_id: str | None,
    ) -> Request:
        stopping = stopping or StoppingParams()
        if isinstance(prompt, str):
            if self.text is None:
                raise InvalidRequest([Violation("input", "this model has no tokenizer; pass token ids")])
            prompt = self.text.encode(prompt)
        elif stopping.stop and self.text is None:
            raise InvalidRequest(
                [Violation("stopping.stop", "this model has no tokenizer to find stop strings with")]
            )
        if sampling is None:
            sampling = self._model.defaults.sampling()
        return Request(request_id or uuid.uuid4().hex, tuple(prompt), sampling, stopping, logprobs)

    def _stream(self, request: Request) -> Generator[Delta, None, None]:
        inbox: queue.SimpleQueue[Sequence[Output]] = queue.SimpleQueue()
        self.submit(request, inbox.put)
        follow = self._follow(request, inbox)
        next(follow)  # into its `try`: closing a generator that was never started runs nothing
        return follow

    def _follow(
        self, request: Request, inbox: queue.SimpleQueue[Sequence[Output]]
    ) -> Generator[Delta, None, None]:
        """A delta that says nothing, then those of the outputs that `inbox` is given."""
        assembler = Assembler(request.stopping, self.text)
        told_stop = False
        active = True
        try:
            yield Delta()  # taken by `_stream`
            while True:
                for output in inbox.get():
                    active = not output.last
                    delta = assembler.add(output)
                    if assembler.stop is not None and active and not told_stop:
                        told_stop = True
                        self.finish(request.request_id, assembler.stop)
                    if delta.text or delta.token_ids or delta.finish is not None:
                        yield delta
                    if output.last:
                        return
        finally:
            if active:  # else the id may be another request's by now
                self.cancel(request.request_id)


def _long_words(sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Bad words that are no matter of the logits' bias."""
    return [word for word in sampling.bad_words if len(word) > 1]
