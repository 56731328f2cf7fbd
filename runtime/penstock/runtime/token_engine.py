"""TokenEngine: one model, ready to go on with token ids. `Engine` adds text.

`building` sizes and makes the parts, and `EngineCore` works on requests; this class holds them together.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

import jax
import numpy as np

from penstock.runtime.building import build, grammar_compiler, measure
from penstock.runtime.config import EngineConfig, ResolvedConfig
from penstock.runtime.errors import ConfigError, EngineFailure
from penstock.runtime.execution.backend import Backend, choose_backend
from penstock.runtime.execution.cpu_threads import start_backends
from penstock.runtime.grammar.compile.compiler import GrammarCompiler
from penstock.runtime.host import host_memory
from penstock.runtime.host.processors import available_processors
from penstock.runtime.host.switch_interval import SwitchInterval
from penstock.runtime.loading.served_model import ServedModel, load_model
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import (
    AbortOutcome,
    InFlightPolicy,
    Observer,
    Paused,
    Pulse,
    Sink,
    WeightsVersion,
)
from penstock.runtime.loop.journal import Journal
from penstock.runtime.measuring.engine_metrics import EngineMetrics
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.update_meters import UpdateMeters
from penstock.runtime.media.reader import ImageReader
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.profiling.profiler import Profiler
from penstock.runtime.request_rules import RequestRules, SamplingCallback
from penstock.runtime.requests.fanout import PreparedPrompt
from penstock.runtime.requests.request import Finish, Request
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.pages import FlushedPages
from penstock.runtime.scheduling.status import OutputStatus
from penstock.runtime.text.codec import TextCodec
from penstock.runtime.updating.interface import UpdateOptions, UpdateReport
from penstock.runtime.updating.updater import Updater
from penstock.runtime.updating.upload import Arrays


class TokenEngine:
    """A served model with its runner, scheduler and thread."""

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig,
        *,
        backend: Backend | None = None,
        observer: Observer | None = None,
        sampling_params_callback: SamplingCallback | None = None,
    ) -> None:
        """Makes all parts of the engine; programs are compiled by `start`. ConfigError where the options
        cannot be met.

        `backend` is the one that the model was loaded for; None: that of the device on which its weights are.
        `observer` sees every step. `sampling_params_callback` sees every request before it is queued, in the
        caller's thread, and returns the sampling it is to have; it must be quick. What it returns is checked
        as a caller's own would be, and an error that it raises is the caller's answer.
        """
        parts = build(model, config, backend)
        self.config: ResolvedConfig = parts.config
        self.info: ModelInfo = parts.info
        self.images: ImageReader | None = parts.images
        """Reads the pictures of prompts; None for a model that takes none."""
        self.runner = parts.runner
        """What computes the steps. Only the engine's thread may call it once the engine has started."""
        self.journal = Journal()
        """Tells its readers of every output and every step, on a thread of its own."""
        self.core = EngineCore(
            parts.runner,
            parts.scheduler,
            vocab_size=model.vocab_size,
            journal=self.journal,
            observer=observer,
            overlap=parts.config.overlap,
            pacer=parts.pacer,
            annotate=jax.profiler.TraceAnnotation,
        )
        """Works on token ids; everything that is done with requests is done by it."""
        self.registry = Registry()
        """The values of all metrics of this engine."""
        is_measured = parts.config.metrics
        self._meters = measure(parts, self.core, self.journal, self.registry) if is_measured else None
        self.updater = Updater(
            self.core,
            parts.runner.device,
            model.rules,
            backend=parts.backend,
            meters=UpdateMeters(self.registry),
            threads=max(1, (parts.config.threads or 1) // 2),  # the other half computes steps meanwhile
        )
        """Takes new weights, from other programs and from files."""
        self.profiler = Profiler(self.core)
        """Records what host and device do in the next steps."""
        self.core.on_failure(self.profiler.stop)
        self._rules = RequestRules(
            parts.config, vocab_size=model.vocab_size, vision=model.vision, callback=sampling_params_callback
        )
        self._grammars = grammar_compiler(model.text, parts.info, parts.config)
        self._switch_interval = SwitchInterval(parts.config.switch_interval_s)
        # Without its weights: the runner holds those that serve, and an update must be able to free the old.
        self._model = dataclasses.replace(model, weights=None)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        sampling_params_callback: SamplingCallback | None = None,
    ) -> Self:
        """Load "demo", a checkpoint directory or a Hugging Face hub id. Raises ConfigError."""
        config = config or EngineConfig()
        devices = start_backends(config.threads or available_processors())
        backend = choose_backend(config, devices[0])
        return cls(
            load_model(model, config, backend),
            config,
            backend=backend,
            observer=observer,
            sampling_params_callback=sampling_params_callback,
        )

    # -- life --

    def start(self) -> None:
        """Compile every program (with a progress bar) and start the engine thread; blocks until ready."""
        self.runner.compile()
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the server: no collection need walk it again
        self._switch_interval.apply()
        self.journal.start()
        self.core.start()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.core.ready

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine died, if it did."""
        return self.core.failure

    def pulse(self) -> Pulse:
        """Whether the engine's thread moves; any thread may ask at any time, and waits for nothing."""
        return self.core.pulse()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call this once when the engine dies, before its requests are told; at once if it is dead. It may be
        called on any thread, and must not block.
        """
        self.core.on_failure(callback)

    @property
    def text(self) -> TextCodec | None:
        """The model's tokenizer; None for a model without one."""
        return self._model.text

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles grammars for the model's tokenizer; None for a model without one, or with one that cannot
        have them. The first access makes it, which takes up to a second.
        """
        return self._grammars.get()

    def on_ready_changed(self, callback: Callable[[], None]) -> None:
        """Call this whenever an update in place leaves weights that cannot serve, and when an update mends
        them: `ready` has changed. It may be called on any thread, and must not block.
        """
        self.core.on_ready_changed(callback)

    @property
    def weights(self) -> WeightsVersion:
        """Which weights serve."""
        return self.core.weights

    @property
    def weights_since(self) -> dt.datetime:
        """When they went live, in UTC."""
        return self.core.changes.weights_since

    def version_of(self, generation: int) -> WeightsVersion:
        """The version of a generation of weights; the label of one long gone is empty."""
        return self.core.changes.version_of(generation)

    @property
    def compiles_after_warmup(self) -> int:
        """XLA compilations by the engine thread since `start`; anything but 0 is a bug."""
        return self.runner.compiles_after_warmup.count

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(checkpoint name, dtype, shape) of every weight, as `update_weights` takes them."""
        tensors = () if self._model.rules is None else self._model.rules.tensors
        return [(spec.name, np.dtype(spec.dtype).name, tuple(spec.shape)) for spec in tensors]

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the others; false if some are left after `timeout_s` seconds."""
        return self.core.drain(timeout_s)

    def __enter__(self) -> Self:
        """Starts the engine; leaving the block shuts it down."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End what runs (ABORTED) and free the device's memory. May be called twice."""
        self.core.shutdown()
        self.profiler.close()
        self.journal.close()
        self.updater.close()
        self._switch_interval.restore()
        self._grammars.close()
        host_memory.let_go()

    # -- tokens --

    def prepare(self, request: Request) -> PreparedPrompt:
        """The part of `submit` that takes the longer the longer prompt and sampling are, to be done in any
        thread, once for all outputs of a prompt. Raises nothing.
        """
        return self._rules.prepare(request, self.core.prepare(request))

    def submit(self, request: Request, sink: Sink, prepared: PreparedPrompt | None = None) -> None:
        """Queue a request; its outputs go to `sink`, on the engine's thread. `prepared` is what `prepare`
        made of it (else ValueError); None: it is prepared now. The sampling that `sampling_params_callback`
        returns is the one that counts.

        Raises InvalidRequest, DuplicateRequestId, QueueFull, PromptTooLong, ExceedsKVCapacity or
        WeightsTooOld, which concern the request, and NotReady, Draining, WeightsIncomplete or EngineDead,
        which concern the engine.
        """
        self.core.submit(self._rules.apply(request, prepared), sink, prepared)

    def set_sampling_params_callback(self, callback: SamplingCallback | None) -> None:
        """From the next request on, `callback` has its say in the sampling of every request; None: nobody
        has. Any thread may call it at any time.
        """
        self._rules.callback = callback

    def cancel(self, *request_ids: str) -> None:
        """Free requests whose reader is gone; waits for nothing."""
        self.core.cancel(*request_ids)

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason found in its text."""
        self.core.finish(request_id, finish)

    def abort(
        self,
        request_ids: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all_requests: bool = False,
        message: str = "",
    ) -> list[tuple[str, AbortOutcome]]:
        """End requests by exact ids, prefix, or all; slot and pages are free when this returns."""
        return self.core.abort(request_ids, prefix=prefix, all_requests=all_requests, message=message)

    def load(self) -> Load:
        """How busy the engine is."""
        return self.core.load()

    def oldest_outputs(self, most: int) -> Sequence[OutputStatus]:
        """Where the outputs stand that arrived first, at most so many."""
        return self.core.oldest_outputs(most)

    def metrics(self, *, flush: bool = True) -> EngineMetrics:
        """What the engine does and has done: totals, rates and percentiles of latencies. Any thread may ask.
        Without `flush` the last moment (a tenth of a second) may be missing, and this waits for nothing, also
        if the engine hangs. ConfigError where `EngineConfig.metrics` is off.
        """
        if self._meters is None:
            raise ConfigError("metrics: the engine was made without them")
        return self._meters.metrics(flush=flush)

    def flush_prefix_cache(self) -> FlushedPages:
        """Forget all cached prefixes."""
        return self.core.flush_prefix_cache()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused; waits for nothing."""
        return self.core.changes.is_paused

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
        return self.core.changes.pause(
            in_flight,
            drain_timeout_s=drain_timeout_s,
            free_kv_cache=free_kv_cache,
            offload_weights=offload_weights,
        )

    def resume(self) -> Future[None]:
        """Go on after a pause, with what it has freed restored; see `Changes.resume`."""
        return self.core.changes.resume()

    def update_weights(
        self,
        tensors: Arrays,
        *,
        label: str,
        in_flight: InFlightPolicy = InFlightPolicy.WAIT,
        partial: bool = False,
    ) -> Future[UpdateReport]:
        """Stage named tensors now, while serving, and swap them in between two steps.

        Until then the new weights lie beside those that serve, made leaf by leaf, which takes as much memory
        again as what is new. `tensors` may be lazy: each is asked for twice, to be checked and to be taken,
        and not held on to. Cancelling the future before the update's turn takes it back; the memory that the
        update needed is free when the future is done.

        Raises TensorsRefused naming every missing, extra or wrongly shaped tensor; then nothing has changed.
        """
        options = UpdateOptions(update_id="", label=label, in_flight=in_flight, partial=partial)
        return self.updater.update(options, tensors)
