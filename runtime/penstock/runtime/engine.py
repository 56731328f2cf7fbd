"""Engine: one model, ready to generate. The service stands on it, and it can be embedded without a server.

>>> with Engine.from_pretrained("demo", EngineConfig(max_num_seqs=4)) as engine:
...     print(engine.generate("Once upon a time", stopping=StoppingParams(max_tokens=40)).text)

`EngineCore` works on requests of token ids, and `building` sizes and makes its parts. `RequestRules` says how
a caller's request is changed before the core sees it, and `penstock.runtime.prompting` puts text around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Literal, Self, Unpack, overload

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.adapters.registry import AdapterRegistry
from penstock.runtime.building import build, grammar_compiler, measure
from penstock.runtime.chat.parser import ChatForms, choose_forms
from penstock.runtime.config import EngineConfig, ResolvedConfig
from penstock.runtime.errors import ConfigError, InvalidRequest, PenstockError, UnsupportedFeature, Violation
from penstock.runtime.execution import compiled_set
from penstock.runtime.execution.backend import Backend, choose_backend
from penstock.runtime.execution.cpu_threads import start_backends
from penstock.runtime.execution.program_store import Ahead
from penstock.runtime.following.interface import DispatchLog, Lead
from penstock.runtime.following.joining import joined
from penstock.runtime.following.sharing import sharing
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.compile.compiler import GrammarCompiler
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.images.vision import Vision
from penstock.runtime.inprocess.active_ids import ActiveIds
from penstock.runtime.inprocess.batch import generate_all
from penstock.runtime.inprocess.options import (
    ChatOptions,
    Messages,
    PromptOptions,
    Prompts,
    chat_job,
    is_list_of_prompts,
    jobs_of,
    prompt_job,
)
from penstock.runtime.inprocess.scoring import ReadingOptions, embed, score
from penstock.runtime.inprocess.streams import GenerationStream
from penstock.runtime.loading.served_model import ServedModel, load_model, with_mesh_size
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import (
    InFlightPolicy,
    Observer,
    Sink,
)
from penstock.runtime.loop.journal import Journal
from penstock.runtime.machine import host_memory
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.machine.switch_interval import SwitchInterval
from penstock.runtime.measuring.engine_metrics import EngineMetrics
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.update_meters import UpdateMeters
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.profiling.profile import (
    DEFAULT_STEPS,
    DEFAULT_TIMEOUT_S,
    ProfileOptions,
    ProfileRun,
)
from penstock.runtime.profiling.profiler import Profiler
from penstock.runtime.prompting.prompts import Truncation
from penstock.runtime.prompting.results import Generation, Score, VectorForm
from penstock.runtime.requests.reader import Reader
from penstock.runtime.requests.request import Pooling, PreparedPrompt, Request
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.requests.word_table import WordTable
from penstock.runtime.text.codec import TextCodec
from penstock.runtime.updating.interface import UpdateOptions, UpdateReport
from penstock.runtime.updating.update import alone, update_threads
from penstock.runtime.updating.updater import Updater
from penstock.runtime.updating.upload import Arrays

SamplingCallback = Callable[[Request], ResolvedSampling]
"""Called with every request before it is queued, in the caller's thread. Returns the sampling that the
request is to have. It must be quick. What it returns is checked like a caller's own sampling, and the caller
gets any error that it raises."""


class RequestRules:
    """Applies the operator's callback to a request's sampling and the engine's limits to its
    log-probabilities and images, and makes a constraint of bad words that have several tokens.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        vocab_size: int,
        vision: Vision | None,
        callback: SamplingCallback | None,
        reader: Reader | None = None,
    ) -> None:
        """`vision`: what the model makes of images; None: it reads none. `reader`: what it is, if it
        generates nothing. Without a `callback` the sampling
        stays as requested.
        """
        self._vocab_size, self._vision, self._reader = vocab_size, vision, reader
        self._max_logprobs, self._max_image_tokens = config.max_logprobs, config.max_image_tokens
        self.callback = callback
        """May be replaced at any time."""

    def prepare(self, request: Request, prepared: PreparedPrompt) -> PreparedPrompt:
        """Add a table of the request's bad words to `prepared`; making it takes longer for more words. There
        is no table if the sampling mentions tokens that the model does not have.
        """
        words = _long_words(request.sampling)
        if not words or prepared.sampling is None:
            return prepared
        return dataclasses.replace(prepared, words=WordTable(words, self._vocab_size))

    def apply(self, request: Request, prepared: PreparedPrompt | None) -> Request:
        """Return the request as the loop is to have it. Raises InvalidRequest if it asks for too many
        log-probabilities or has an image that the model cannot take, UnsupportedFeature for what a model
        that generates nothing cannot tell, TypeError if the callback does not
        return ResolvedSampling, and whatever the callback raises.
        """
        self._check_reading(request)
        callback = self.callback
        if callback is not None:
            request = dataclasses.replace(request, sampling=_rewritten(request, callback))
        self._check_logprobs(request)
        if request.media:
            self._check_media(request)
        words: Sequence[Sequence[int]] | WordTable = _long_words(request.sampling)
        if not words:
            return request
        if prepared is not None and prepared.words is not None and prepared.covers(request.sampling):
            words = prepared.words
        constraint = BadWords(words, request.constraint, self._vocab_size)
        return dataclasses.replace(request, constraint=constraint)

    def _check_reading(self, request: Request) -> None:
        reading, reader = request.reading, self._reader
        if reader is not None and (reading is None or reading.scores_from is not None):
            asked = "generation" if reading is None else "scores of tokens"
            raise UnsupportedFeature([asked], f"the model is {reader.kind}, which has no next token")
        if reading is not None and reading.classes and (reader is None or reader.classes is None):
            raise UnsupportedFeature(["classes"], "the model has no classifier")

    def _check_logprobs(self, request: Request) -> None:
        most = self._max_logprobs
        bad = [
            Violation(f"output.{name}", f"must be at most {most}, not {value}")
            for name, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs))
            if value is not None and value > most
        ]
        if bad:
            raise InvalidRequest(bad)

    def _check_media(self, request: Request) -> None:
        """Refuse what would raise on the engine's thread, and so end the engine for all."""
        if self._vision is None:
            raise InvalidRequest([Violation("media", "the model reads no images")])
        found = (self._vision.problem(item, self._max_image_tokens) for item in request.media)
        bad = [Violation(f"media[{i}]", problem) for i, problem in enumerate(found) if problem is not None]
        if bad:
            raise InvalidRequest(bad)


def _rewritten(request: Request, callback: SamplingCallback) -> ResolvedSampling:
    sampling = callback(request)
    if not isinstance(sampling, ResolvedSampling):
        raise TypeError(f"sampling_params_callback must return ResolvedSampling, not {type(sampling)}")
    return sampling


def _long_words(sampling: ResolvedSampling) -> list[tuple[int, ...]]:
    """Return the bad words of several tokens. A word of one token is a bias on the logits instead."""
    return [word for word in sampling.bad_words if len(word) > 1]


class Engine(EngineCore):
    """A served model that goes on with texts, token ids and conversations.

    `generate`, `stream` and `chat` may be called by any number of threads at once; `AsyncEngine` has them for
    coroutines. All take the keyword arguments of `RequestOptions`, and raise RequestError where the caller
    can mend the request, UnavailableError where it may be tried again later, GenerationError where the model
    cannot go on, and EngineFailure where the engine is dead.
    """

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig,
        *,
        backend: Backend | None = None,
        observer: Observer | None = None,
        sampling_params_callback: SamplingCallback | None = None,
        log_of_calls: DispatchLog | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Make all parts of the engine; programs are compiled by `start`. ConfigError where the options
        cannot be met.

        `backend` is the one that the model was loaded for; None: that of the device on which its weights are.
        `observer` sees every step. `sampling_params_callback` sees every request before it is queued, in the
        caller's thread, and returns the sampling it is to have; it must be quick. What it returns is checked
        as a caller's own would be, and an error that it raises is the caller's answer. `log_of_calls` takes
        the runner's calls, for followers; None: there are none. `ahead` reads programs, which may be those of
        this engine.
        """
        parts = build(model, config, backend, log_of_calls, ahead)
        self.config: ResolvedConfig = parts.config
        self.info: ModelInfo = parts.info
        self.images: ImageReader | None = parts.images
        """Reads the images of prompts; None for a model that takes none."""
        self.runner = parts.runner
        """What computes the steps. Only the engine's thread may call it once the engine has started."""
        self.journal = Journal()
        """Tells its readers of every output and every step, on a thread of its own."""
        super().__init__(
            parts.runner,
            parts.scheduler,
            vocab_size=model.vocab_size * (1 if model.reader is None else model.reader.token_types),
            journal=self.journal,
            observer=observer,
            overlap=parts.config.overlap,
            pacer=parts.pacer,
            annotate=jax.profiler.TraceAnnotation,
        )
        self.registry = Registry()
        """The values of all metrics of this engine."""
        is_measured = parts.config.metrics
        self._meters = measure(parts, self, self.journal, self.registry) if is_measured else None
        self.updater = Updater(
            self,
            parts.runner.device,
            model.rules,
            rules_for=model.rules_for,
            backend=parts.backend,
            meters=UpdateMeters(self.registry),
            threads=update_threads(parts.config.threads),
            share=alone if log_of_calls is None else sharing(log_of_calls, parts.backend, model.stages),
        )
        """Takes new weights, from other programs and from files."""
        self.adapters = AdapterRegistry(
            parts.config, parts.adapter_reader, parts.scheduler.roster.adapters, self.name_adapters
        )
        """The LoRA adapters that requests may name."""
        self.profiler = Profiler(self)
        """Records what host and device do in the next steps."""
        self.on_failure(self.profiler.stop)
        self._rules = RequestRules(
            parts.config,
            vocab_size=model.vocab_size,
            vision=model.vision,
            callback=sampling_params_callback,
            reader=model.reader,
        )
        self._grammars = grammar_compiler(model.text, parts.info, parts.config)
        self._switch_interval = SwitchInterval(parts.config.switch_interval_s)
        # Without its weights: the runner holds those that serve, and an update must be able to free the old.
        self._model = dataclasses.replace(model, weights=None, draft=None)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        sampling_params_callback: SamplingCallback | None = None,
        lead: Lead | None = None,
    ) -> Self:
        """Load "demo", a checkpoint directory, a GGUF file or a hub id. Raises ConfigError. `lead`: the group
        of processes whose leader this one is; None: it has all devices itself. GroupEnded if a follower is
        lost meanwhile.
        """
        config = config or EngineConfig()
        threads = config.threads or available_processors()
        if config.compiled is not None:
            compiled_set.check(config.compiled)
        if lead is None:
            size = (config.tensor_parallel_size or 1) * config.pipeline_parallel_size
            devices = start_backends(threads, size)
            config = with_mesh_size(config, model, devices)
        else:
            devices = joined(model, config, lead.options, lead.log.meet)
        backend = choose_backend(config, *devices)
        folder, ahead = config.compilation_cache, None
        if folder is not None and len(devices) == 1:
            ahead = Ahead(folder, f"{model} {config}", list(backend.mesh.devices.flat))
        return cls(
            load_model(model, config, backend),
            config,
            backend=backend,
            observer=observer,
            sampling_params_callback=sampling_params_callback,
            log_of_calls=None if lead is None else lead.log,
            ahead=ahead,
        )

    # -- life --

    def start(self) -> None:
        """Compile every program (with a progress bar) and start the engine thread; blocks until ready."""
        self.runner.compile()
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the engine: no collection need walk it again
        self._switch_interval.apply()
        self.journal.start()
        super().start()

    @property
    def text(self) -> TextCodec | None:
        """The model's tokenizer; None for a model without one."""
        return self._model.text

    @property
    def has_grammars(self) -> bool:
        """Whether there is a compiler of grammars; asking does not make it."""
        return self._grammars.exists

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles grammars for the model's tokenizer; None for a model without one, or with one that cannot
        have them. The first access makes it, which takes up to a second.
        """
        return self._grammars.get()

    @property
    def compiles_after_warmup(self) -> int:
        """XLA compilations by the engine thread since `start`; anything but 0 is a bug."""
        return self.runner.compiles_after_warmup.count

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return (checkpoint name, dtype, shape) of every weight, as `update_weights` takes them."""
        tensors = () if self._model.rules is None else self._model.rules.tensors
        return [(spec.name, np.dtype(spec.dtype).name, tuple(spec.shape)) for spec in tensors]

    def __enter__(self) -> Self:
        """Start the engine; leaving the block shuts it down."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End what runs (ABORTED) and free the device's memory. May be called twice."""
        super().shutdown()
        self.profiler.close()
        self.journal.close()
        self.updater.close()
        self._switch_interval.restore()
        self._grammars.close()
        gc.unfreeze()  # what `start` froze, so that it goes with the engine
        host_memory.let_go()

    # -- tokens --

    def prepare(self, request: Request) -> PreparedPrompt:
        """Do the part of `submit` that takes the longer the longer prompt and sampling are; any thread may do
        it, once for all outputs of a prompt. Raises nothing.
        """
        if request.adapter is not None:
            with contextlib.suppress(PenstockError):  # `submit` raises it
                request = self._with_adapter(request)
        return self._rules.prepare(request, super().prepare(request))

    def _with_adapter(self, request: Request, prepared: PreparedPrompt | None = None) -> Request:
        """Return the request with the weights of the adapter that it names: its own if it has some, or those
        of `prepared`, so that all outputs of a prompt have the same. See `AdapterRegistry.weights_of` for
        what it raises.
        """
        if request.adapter is None or request.adapter_weights is not None:
            return request
        weights = None if prepared is None else prepared.adapter_weights
        return dataclasses.replace(
            request, adapter_weights=weights or self.adapters.weights_of(request.adapter)
        )

    def submit(self, request: Request, sink: Sink, prepared: PreparedPrompt | None = None) -> None:
        """Queue a request; its outputs go to `sink`, on the engine's thread. `prepared` is what `prepare`
        made of it (else ValueError); None: it is prepared now. The sampling that `sampling_params_callback`
        returns is the one that counts.

        Raises InvalidRequest, DuplicateRequestId, QueueFull, PromptTooLong, ExceedsKVCapacity, WeightsTooOld
        or UnknownAdapterError, which concern the request, and NotReady, Draining, WeightsIncomplete or
        EngineDead, which concern the engine.
        """
        request = self._with_adapter(request, prepared)
        if prepared is not None and prepared.adapter_weights is not request.adapter_weights:
            prepared = None  # the adapter was not there yet
        super().submit(self._rules.apply(request, prepared), sink, prepared)

    def set_sampling_params_callback(self, callback: SamplingCallback | None) -> None:
        """Give `callback` its say in the sampling of every request from the next one on; None: nobody has.
        Any thread may call it at any time.
        """
        self._rules.callback = callback

    def metrics(self, *, flush: bool = True) -> EngineMetrics:
        """Report what the engine does and has done: totals, rates and percentiles of latencies. Any thread
        may ask. Without `flush` the last moment (a tenth of a second) may be missing, and this waits for
        nothing, also if the engine hangs. ConfigError where `EngineConfig.metrics` is off.
        """
        if self._meters is None:
            raise ConfigError("metrics: the engine was made without them")
        return self._meters.metrics(flush=flush)

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

    # -- texts --

    @cached_property
    def active_ids(self) -> ActiveIds:
        """The ids of the requests that are read here."""
        return ActiveIds()

    @cached_property
    def forms(self) -> ChatForms:
        """How the model writes calls of tools, and what it thinks."""
        if self.text is None:
            return ChatForms()
        return choose_forms(
            self.text.chat_template,
            self.text.added_tokens,
            tools=self.config.tool_call_parser,
            reasoning=self.config.reasoning_parser,
        )

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is one prompt, though it is a sequence of texts
        self, prompt: str | Sequence[int], **options: Unpack[PromptOptions]
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        show_progress: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: Prompts,
        *,
        show_progress: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> Generation | list[Generation]:
        """Go on with a prompt, a text or token ids, and return when its outputs have ended.

        Of a list of prompts it returns as many generations, in the same order. As many prompts as keep the
        engine busy run at once, so a list may be longer than the engine's queue. The first error ends them
        all and is raised. A bar shows how many have ended, where stderr is a terminal and `show_progress`
        says so; None: what `EngineConfig.show_progress` says.
        """
        if is_list_of_prompts(prompt):
            return generate_all(self, jobs_of(self, prompt, options), show_progress)
        if show_progress is not None:
            raise TypeError("show_progress goes with a list of prompts")
        with GenerationStream(self, prompt_job(self, prompt, options)) as stream:
            return stream.result()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[PromptOptions]) -> GenerationStream:
        """Go on with one prompt, and yield what is new as it comes. Use it in a `with` block, or close it:
        that ends the request. What is refused raises here, before the first delta.
        """
        return GenerationStream(self, prompt_job(self, prompt, options))

    def embed(
        self,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling | str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncation: Truncation | str = Truncation.REJECT,
        **options: Unpack[ReadingOptions],
    ) -> NDArray[np.float32]:
        """Make a vector of each text, or of each sequence of token ids: float32[inputs, numbers].

        `pooling` says what a vector is made of: "last_token", "first_token", "mean" or "max"; None: what the
        model is made for. Only the first `dimensions` numbers are kept (None: all), and then each vector is
        divided by its length if `normalize` says so. `truncation` says what is cut of inputs that are too
        long.
        """
        form = VectorForm(normalize=normalize, dimensions=dimensions)
        return embed(self, inputs, pooling=pooling, form=form, truncation=truncation, options=options)

    def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str] | Sequence[Sequence[int]],
        **options: Unpack[ReadingOptions],
    ) -> list[Score]:
        """Tell how likely the model finds each continuation of a prompt, token by token. Nothing is
        generated. A continuation of text is tokenized alone, without special tokens.
        """
        return score(self, prompt, continuations, options)

    def profile(
        self,
        folder: str | Path,
        *,
        steps: int = DEFAULT_STEPS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        keep: int | None = None,
    ) -> ProfileRun:
        """Begin to record what host and device do in the next `steps` steps, or until `timeout_s` seconds
        have passed. Returns when the recording has begun; `ProfileRun.result` waits for the files.

        They are written to a folder of their own in `folder`, of which the newest `keep` stay; None: all.
        Raises InvalidRequest, ProfileUnderWay where this program records already, ProfileFailed, and Draining
        after `shutdown`.
        """
        options = ProfileOptions(steps=steps, timeout_s=timeout_s)
        return self.profiler.start(Path(folder), options, keep)

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Generation: ...
    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> GenerationStream: ...
    def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Generation | GenerationStream:
        """Generate the assistant's next turn of a conversation: whole, or with `stream` as it comes.

        `messages` are turns, or mappings with "role" and "content". The model's chat template, or
        `chat_template`, makes the prompt. What the model thinks and which tools it calls is taken out of the
        text, in `reasoning` and `tool_calls`. `Generation.message` is the turn to go on with.
        """
        running = GenerationStream(self, chat_job(self, messages, options))
        if stream:
            return running
        with running:
            return running.result()
