"""Makes the parts of an engine from a served model and an operator's options (`build`), and says where the
metrics come from that the parts keep (`measure`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.runtime.adapters.peft import AdapterReader
from penstock.runtime.config import (
    CHECKED_ROWS,
    DEFAULT_TARGET_ITL_S,
    ON_DEVICE,
    EngineConfig,
    ResolvedConfig,
    resolve,
)
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import (
    Backend,
    check_required,
    choose_backend,
    lacking_kernels,
)
from penstock.runtime.execution.buckets import NATIVE_TOKEN_GROWTH, TOKEN_GROWTH, Buckets
from penstock.runtime.execution.compilation import use_compilation_cache
from penstock.runtime.execution.device_state import DeviceState, holds_for_attention, peak_temp_bytes
from penstock.runtime.execution.images import encode_buckets
from penstock.runtime.execution.kv_sizing import KVPlan, device_kv_bytes, plan_kv, prefix_cache_pages
from penstock.runtime.execution.own_stage import OwnStage
from penstock.runtime.execution.pipeline import PipelineRunner, PipelineState
from penstock.runtime.execution.program_store import Ahead
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.following.interface import DispatchLog
from penstock.runtime.following.leading import LeadingRunner
from penstock.runtime.following.stages import LastStageRunner
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.compile.on_demand import CompilerOnDemand
from penstock.runtime.grammar.vocabulary import rule_and_ends
from penstock.runtime.images.image import ImageLimits
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.loading.served_model import ServedModel
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.journal import Journal
from penstock.runtime.loop.stepping import Pacer
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.machine.resident import resident_bytes
from penstock.runtime.measuring.engine_meters import EngineMeters
from penstock.runtime.measuring.engine_state import BuildInfo, Sources
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.models.stages import largest_groups
from penstock.runtime.ops.cache_spec import cache_dtype
from penstock.runtime.scheduling.drafting import Drafting
from penstock.runtime.scheduling.image_pool import BLOCK_TOKENS, blocks_of
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.lookup import Lookup
from penstock.runtime.scheduling.proposals import Proposer
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.scheduler_config import GroupLimits, SchedulerConfig
from penstock.runtime.scheduling.text_windows import TextWindows
from penstock.runtime.text.codec import TextCodec

log = logging.getLogger(__name__)

_PROBE_PAGES = 64
"""How many pages each group of layers has in the cache for which programs are compiled to measure their
scratch memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of an engine. No program is compiled for serving yet."""

    runner: ModelRunner
    scheduler: Scheduler
    pacer: Pacer
    config: ResolvedConfig
    """The options, with what was derived from the model, the platform and its memory."""
    info: ModelInfo
    backend: Backend
    adapter_reader: AdapterReader | None
    """Reads adapters for the model; None for an engine without them."""
    images: ImageReader | None
    """Reads the images of prompts; None for a model that takes none."""


def build(
    model: ServedModel,
    options: EngineConfig,
    backend: Backend | None = None,
    log_of_calls: DispatchLog | None = None,
    ahead: Ahead | None = None,
) -> EngineParts:
    """Size the KV cache and everything that depends on it, and make the parts. ConfigError if the options
    cannot be met. `backend` None: the backend of the devices that hold the model's weights. `log_of_calls`:
    takes the runner's calls, for followers. `ahead`: reads programs meanwhile.
    """
    if backend is None:
        found = {device for leaf in jax.tree.leaves(model.weights) for device in leaf.devices()}
        backend = choose_backend(options, *sorted(found, key=lambda device: device.id))
    check_required(options, backend, np.dtype(model.dtype))
    threads = options.threads or available_processors()
    model = laid_out(with_whole_texts(model, options, backend), backend)
    cache = model.cache
    config, shapes = longest_shapes(model, options, backend, threads=threads)
    _log_penalties(model, config)
    if config.speculation != options.speculation != "auto" and model.reader is not None:
        log.warning("speculation: nothing is proposed, because the model generates nothing")
    better = lacking_kernels(options.dtype, np.dtype(model.dtype), backend)
    if better is not None:
        log.warning(
            "the checkpoint is in %s, which XLA computes: dtype %s, which the native kernels compute, takes "
            "a fraction of the processor time",
            np.dtype(model.dtype),
            better,
        )
    if options.speculation == "auto" and config.speculation == "off":
        for name in ("max_proposed_tokens", "lookup_text"):
            if getattr(options, name) is not None:
                log.warning(
                    "%s: has no effect, because nothing is proposed: the model generates nothing, or its "
                    "bits may depend on a step's size; speculation says who is to propose all the same",
                    name,
                )
    if options.lookup_text is not None and model.lookup_tokens is None:
        raise ConfigError("lookup_text: a model has its tokens, and this one was made without them")
    check_adapters(model, config)
    check_draft(model, config)
    use_compilation_cache(config.compilation_cache)
    groups = largest_groups(model.caches, config.page_size, shapes.kv_dtype)
    kv = kv_plan(model, config, shapes, device_bytes=_free_bytes(model, config, shapes, backend))
    shapes = dataclasses.replace(
        shapes, max_model_len=kv.max_model_len, num_snapshots=kv.num_snapshots, ahead=ahead
    )
    if log_of_calls is None and _windows_read_text(model, config, backend):
        assert config.max_proposed_tokens is not None, "it has a number where tokens are proposed"
        text_guesses = min(config.max_proposed_tokens, CHECKED_ROWS - 1)
        shapes = dataclasses.replace(shapes, text_guesses=text_guesses, text_rows=CHECKED_ROWS)
    runner = _runner(model, shapes, backend, log_of_calls)
    batch_invariant = _is_batch_invariant(model, config, backend)
    is_native = batch_invariant if backend.needs_all_native else runner.device.decodes_natively
    if config.native == "require" and not is_native:
        raise ConfigError(backend.kernels_cannot)
    _log_attention(runner.device, backend)
    if model.draft is not None and model.draft.is_of_checkpoint:
        log.info("%s guess tokens", model.draft.name)
    elif model.draft is not None:
        draft_bytes = sum(int(leaf.nbytes) for leaf in runner.device.draft_leaves)
        log.info("%s guesses tokens: it takes %.2f GiB of weights", model.draft.name, draft_bytes / 2**30)
    images = _image_reader(model, config)
    runner.initialize_kv_cache(kv.num_pages)
    config = dataclasses.replace(
        config,
        served_model_name=model.name,
        max_model_len=kv.max_model_len,
        state_snapshots=kv.num_snapshots,
        prefix_cache_pages=prefix_cache_pages(
            config,
            has_state=cache.has_state,
            num_snapshots=kv.num_snapshots,
            reads_whole=_reads_whole(model),
        ),
        kv_cache_bytes=(
            max(each.state_bytes(config.max_num_seqs, kv.num_snapshots) for each in model.caches)
            + sum(pages * group.page_bytes for pages, group in zip(kv.num_pages, groups, strict=True))
        )
        or None,  # an encoder has none
        dtype=np.dtype(model.dtype).name,
        threads=threads,
        target_itl_s=_target_itl_s(config, batch_invariant=batch_invariant),
    )
    text_windows = TextWindows(shapes.text_rows) if shapes.text_guesses else None
    return EngineParts(
        runner=runner,
        scheduler=Scheduler(
            _scheduler_config(model, config, shapes, kv),
            _proposer(config, model, text_windows, reads_earlier=options.speculation != "auto"),
            text_windows,
        ),
        pacer=Pacer(
            config.decode_window_s,
            config.max_decode_steps,
            config.target_itl_s or 0.0,
            num_turns=max(1, len(model.stages)),
        ),
        config=config,
        info=ModelInfo(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=kv.max_model_len,
            eos_token_ids=model.eos_token_ids,
            defaults=model.defaults,
            directory=model.directory,
            num_pages=sum(kv.num_pages),
            page_size=config.page_size,
            devices=tuple(f"{d.platform}:{d.id} {d.device_kind}" for d in backend.devices),
            images=None if images is None else images.limits,
            hidden_size=model.hidden_size,
            pooling=model.pooling,
            answer_token_ids=model.answer_token_ids,
            reader=model.reader,
            batch_invariant=batch_invariant,
        ),
        backend=backend,
        adapter_reader=_adapter_reader(model, config),
        images=images,
    )


def longest_shapes(
    model: ServedModel, options: EngineConfig, backend: Backend, *, threads: int
) -> tuple[ResolvedConfig, RunnerConfig]:
    """Return the options with numbers where nothing was chosen, and the runner's configuration for the
    longest context and the most snapshots that were asked for; the KV cache may hold less. ConfigError if the
    cache cannot be of the dtype that was asked for.
    """
    model.cache.check_dtype(options.kv_cache_dtype)
    config = resolve(options, backend.sizes, defaults=model.defaults)
    chosen = config.speculation
    if model.reader is not None:
        chosen = "off"
    elif chosen == "auto":
        chosen = _usual_speculation(model, config, backend)
    if chosen == "off":
        config = dataclasses.replace(config, speculation=chosen, max_proposed_tokens=None, lookup_text=None)
    elif chosen != config.speculation:
        config = dataclasses.replace(config, speculation=chosen)
    return config, _runner_config(model, config, _buckets(model, config, backend), backend, threads=threads)


def _usual_speculation(model: ServedModel, config: ResolvedConfig, backend: Backend) -> str:
    """Return who proposes tokens where the operator has not said it. Nobody does where a step's size might
    change a bit, and thereby a token.
    """
    if config.draft_model is not None:
        return "draft"
    proposes = not model.stages and _is_batch_invariant(model, config, backend)
    return "lookup" if proposes else "off"


def _is_batch_invariant(model: ServedModel, config: ResolvedConfig, backend: Backend) -> bool:
    """See `ModelInfo.batch_invariant`."""
    if not model.is_native or (model.adapted is not None and not model.adapted.is_native):
        return False
    if model.cache.has_state and not backend.recurs_batch_invariantly:
        return False
    return holds_for_attention(
        backend.attends_batch_invariantly,
        model.cache,
        dtype=np.dtype(model.dtype),
        kv_dtype=_kv_dtype(model, config, backend),
        page_size=config.page_size,
        num_slots=config.max_num_seqs,
    )


def _kv_dtype(model: ServedModel, config: ResolvedConfig, backend: Backend) -> np.dtype[Any]:
    """Return what keys and values are stored in."""
    return backend.kv_storage_dtype(cache_dtype(config.kv_cache_dtype, np.dtype(model.dtype)))


def kv_plan(
    model: ServedModel, config: ResolvedConfig, shapes: RunnerConfig, *, device_bytes: int | None
) -> KVPlan:
    """Tell how large the cache is, see `plan_kv`."""
    caches = model.caches
    return plan_kv(
        config,
        model_max_len=model.max_model_len,
        groups=largest_groups(caches, config.page_size, shapes.kv_dtype),
        state_bytes=max(cache.slot_bytes for cache in caches) * config.max_num_seqs,
        snapshot_bytes=max(cache.snapshot_bytes for cache in caches),
        tokens_per_row=model.tokens_per_row,
        device_bytes=device_bytes,
    )


def grammar_compiler(text: TextCodec | None, info: ModelInfo, config: ResolvedConfig) -> CompilerOnDemand:
    """Make a compiler of grammars for the model's tokenizer, if it allows them; else the log says why not."""
    backend = None if text is None or info.reader is not None else text.backend
    if backend is None:
        return CompilerOnDemand(None)
    try:
        rule_and_ends(backend, info.vocab_size, info.eos_token_ids)
    except ConfigError as error:
        log.warning("no structured output: %s", error)
        return CompilerOnDemand(None)
    return CompilerOnDemand(
        lambda: GrammarCompiler.from_tokenizer(
            backend,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            config=CompilerConfig(time_limit_s=config.grammar_time_limit_s),
        )
    )


def _image_reader(model: ServedModel, config: ResolvedConfig) -> ImageReader | None:
    """Make what reads images for the model."""
    if model.vision is None or model.image_processor is None:
        return None
    limits = ImageLimits(
        max_images=config.max_images,
        max_bytes=config.max_image_bytes,
        max_pixels=config.max_image_pixels,
        max_tokens=config.max_image_tokens,
    )
    return ImageReader(model.vision, model.image_processor, limits, _marks(model))


def _marks(model: ServedModel) -> tuple[str, str, str] | None:
    """Return the texts of the tokens that stand before an image, for it, and behind it, see
    `ImageReader`.
    """
    vision, text = model.vision, model.text
    if vision is None or vision.around is None or text is None:
        return None
    texts = {token_id: written for written, token_id in text.added_tokens.items()}
    begin, end = vision.around
    ids = (begin, vision.image_token_id, end)
    if not all(token_id in texts for token_id in ids):
        raise ConfigError(f"the tokenizer has no texts for the tokens of images, {ids}")
    return texts[begin], texts[vision.image_token_id], texts[end]


def _log_attention(device: DeviceState, backend: Backend) -> None:
    if device.decodes_natively:
        log.info("decode steps attend by a kernel for %s", backend.platform_name)
    else:
        log.info("decode steps attend by XLA in some layers or all")


def _log_penalties(model: ServedModel, config: ResolvedConfig) -> None:
    if model.defaults.sampling().has_penalties:
        log.info(
            "requests have penalties unless they say otherwise: %d feature slots for them, %.0f MB",
            config.feature_slots,
            config.feature_slots * model.vocab_size * 8 / 1e6,
        )


def _windows_read_text(model: ServedModel, config: ResolvedConfig, backend: Backend) -> bool:
    """Return whether windows of decode steps guess by the text that a lookup reads: where they may end early,
    rows of padding cost little, and nothing is kept by slot. Programs that another machine has compiled do
    not have it.
    """
    return (
        model.lookup_tokens is not None
        and config.speculation == "lookup"
        and config.max_decode_steps > 1
        and config.compiled is None
        and model.skips_padding
        and model.vision is None
        and not (model.cache.has_state or model.stages or backend.fixed_windows)
        and backend.mesh.size == 1
    )


def _proposer(
    config: ResolvedConfig, model: ServedModel, text_windows: TextWindows | None, *, reads_earlier: bool
) -> Proposer | None:
    """`reads_earlier`: whether a lookup also looks at what earlier requests have said. Whoever can see what
    is proposed learns of them, so the operator must have asked for it.
    """
    computes_again = model.cache.has_state
    if config.speculation in ON_DEVICE:
        return Drafting(config.speculation, computes_again=computes_again)
    if config.speculation == "off":
        return None
    return Lookup(
        computes_again=computes_again,
        reads_earlier=reads_earlier,
        text=model.lookup_tokens,
        text_windows=text_windows,
    )


def _drafted_tokens(config: ResolvedConfig) -> int:
    """Return the most tokens that are guessed on the device for a row in a step; 0 where none are."""
    return config.max_proposed_tokens or 0 if config.speculation in ON_DEVICE else 0


def check_draft(model: ServedModel, config: ResolvedConfig) -> None:
    """Raise ConfigError unless the model has what guesses tokens on the device where the options want it, and
    only there.
    """
    draft = model.draft
    has_heads = draft is not None and draft.is_of_checkpoint
    if (draft is not None and not has_heads) != (config.speculation == "draft"):
        raise ConfigError('draft_model: a model has a draft with speculation="draft", and only then')
    if has_heads != (config.speculation == "heads"):
        raise ConfigError('speculation: a model has heads that guess with "heads", and only then')


def _buckets(model: ServedModel, config: ResolvedConfig, backend: Backend) -> Buckets:
    return Buckets.default(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        token_growth=NATIVE_TOKEN_GROWTH if model.skips_padding else TOKEN_GROWTH,
        row_growth=backend.row_growth,
        max_window=config.max_decode_steps if backend.fixed_windows else None,
        has_windows=not model.stages,
        decodes=model.reader is None,
        most_rows=config.most_rows,
    )


def _reads_whole(model: ServedModel) -> bool:
    return model.reader is not None and model.reader.reads_whole


def with_whole_texts(model: ServedModel, options: EngineConfig, backend: Backend) -> ServedModel:
    """Return the model with a context that a step has room for, if it reads texts in one step. ConfigError
    for options that such a model has no use for.
    """
    if not _reads_whole(model):
        return model
    most = resolve(options, backend.sizes, defaults=model.defaults).max_num_batched_tokens
    if options.max_prefill_chunk is not None:
        raise ConfigError("max_prefill_chunk: must be left out: an encoder reads each text in one step")
    if options.max_model_len is not None and options.max_model_len > most:
        raise ConfigError(
            f"max_model_len: {options.max_model_len} is more than max_num_batched_tokens, {most}: an encoder "
            "reads each text in one step"
        )
    if model.max_model_len > most and options.max_model_len is None:
        log.warning(
            "texts have at most %d tokens, not the model's %d, because an encoder reads each in one step; "
            "raise it with max_num_batched_tokens (--max-num-batched-tokens)",
            most,
            model.max_model_len,
        )
    return dataclasses.replace(model, max_model_len=min(model.max_model_len, most))


def laid_out(model: ServedModel, backend: Backend) -> ServedModel:
    """Return the model, its draft and its stages with caches as the platform stores them
    (`CacheSpec.laid_out`).
    """
    draft, lanes = model.draft, backend.lanes
    if draft is not None:
        draft = dataclasses.replace(draft, cache=draft.cache.laid_out(lanes))
    stages = (dataclasses.replace(stage, cache=stage.cache.laid_out(lanes)) for stage in model.stages)
    return dataclasses.replace(model, cache=model.cache.laid_out(lanes), draft=draft, stages=tuple(stages))


def _runner(
    model: ServedModel, shapes: RunnerConfig, backend: Backend, log_of_calls: DispatchLog | None
) -> ModelRunner:
    """Make the runner, and what it keeps on the device."""
    if backend.own_stage is not None:
        own = OwnStage(model.graphdef, model.weights, shapes, backend, model.stages)
        if log_of_calls is None:
            return ModelRunner(own, shapes)  # a follower's, whose steps `StageRepeater` makes
        return LastStageRunner(own, shapes, log_of_calls)
    if model.stages:
        stages = PipelineState(model.graphdef, model.weights, shapes, backend, model.stages)
        return PipelineRunner(stages, shapes)
    device = DeviceState(
        model.graphdef, model.weights, model.cache, shapes, backend, model.draft, text=model.lookup_tokens
    )
    if log_of_calls is None:
        return ModelRunner(device, shapes)
    return LeadingRunner(device, shapes, log_of_calls)


def _free_bytes(
    model: ServedModel, config: ResolvedConfig, shapes: RunnerConfig, backend: Backend
) -> int | None:
    """Tell how many bytes the device has left for the KV cache; None if it does not report that, or if the
    options say how large the cache is. State that is made only for this measures the scratch memory of
    programs, because it is made for one context length, which depends on the cache.
    """
    if config.kv_cache_bytes is not None or backend.memory() is None:
        return None
    probe = DeviceState(model.graphdef, model.weights, model.cache, shapes, backend, model.draft)
    peak_bytes = peak_temp_bytes(probe.builder((_PROBE_PAGES,) * len(model.cache.windows)))
    memory = backend.memory()  # while the probe holds the arrays for sampling that the runner will hold too
    return None if memory is None else device_kv_bytes(memory, config.hbm_utilization, peak_bytes)


def _runner_config(
    model: ServedModel, config: ResolvedConfig, buckets: Buckets, backend: Backend, *, threads: int
) -> RunnerConfig:
    classes = None if model.reader is None else model.reader.classes
    return RunnerConfig(
        buckets=buckets,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or model.max_model_len,
        page_size=config.page_size,
        dtype=model.dtype,
        kv_dtype=_kv_dtype(model, config, backend),
        vocab_size=model.vocab_size if model.reader is None else 1,  # of the logits: see `no_logits`
        eos_token_ids=model.eos_token_ids,
        num_classes=0 if classes is None else len(classes.labels),
        has_projections=model.reader is not None and model.reader.has_projections,
        feature_slots=config.feature_slots,
        max_logprobs=config.max_logprobs,
        num_snapshots=_most_snapshots(model, config),
        threads=threads,
        max_decode_steps=config.max_decode_steps,
        show_progress=config.show_progress,
        program_folder=config.compilation_cache,
        compiled=config.compiled,
        checks_proposals=config.speculation != "off",
        drafted_tokens=_drafted_tokens(config),
        **_image_shapes(model, config, backend),
        **_adapter_shapes(model, config),
    )


def check_adapters(model: ServedModel, config: ResolvedConfig) -> None:
    """Raise ConfigError if adapters are asked for and the model cannot have any."""
    if config.max_adapters and model.adapted is None:
        raise ConfigError("max_adapters: this model takes no adapters")


def _adapter_reader(model: ServedModel, config: ResolvedConfig) -> AdapterReader | None:
    adapted = model.adapted
    if adapted is None or not config.max_adapters:
        return None
    return AdapterReader(adapted, config.max_adapter_rank)


def _adapter_shapes(model: ServedModel, config: ResolvedConfig) -> dict[str, Any]:
    """Return the runner's shapes for adapters; none for an engine without them."""
    if model.adapted is None or not config.max_adapters:
        return {}
    return {
        "max_adapters": config.max_adapters,
        "adapter_rank": config.max_adapter_rank,
        "adapter_size": model.adapted.size,
    }


def _image_shapes(model: ServedModel, config: ResolvedConfig, backend: Backend) -> dict[str, Any]:
    """Return the runner's shapes for a model that reads images; none for another."""
    if model.vision is None:
        return {}
    return {
        "vision": model.vision,
        "pool_rows": blocks_of(config.media_pool_tokens) * BLOCK_TOKENS,
        "encode_buckets": encode_buckets(model.vision, config.max_image_tokens, backend.row_growth),
    }


def _most_snapshots(model: ServedModel, config: ResolvedConfig) -> int:
    if not model.cache.has_state:
        return 0
    return config.max_num_seqs if config.state_snapshots is None else config.state_snapshots


def _scheduler_config(
    model: ServedModel, config: ResolvedConfig, shapes: RunnerConfig, kv: KVPlan
) -> SchedulerConfig:
    buckets = shapes.buckets
    (num_pages, window), *further = zip(kv.num_pages, model.cache.windows, strict=True)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=kv.max_model_len + (model.reader is not None),  # a prompt leaves room for no token
        whole_prompts=_reads_whole(model),
        page_size=config.page_size,
        num_pages=num_pages,
        eos_token_ids=frozenset(model.eos_token_ids),
        feature_slots=config.feature_slots,
        max_queued_requests=config.max_queued_requests,
        max_prefill_chunk=config.max_prefill_chunk,
        step_sizes=() if model.skips_padding else buckets.token_buckets,
        scheduling_policy=config.scheduling_policy,
        prefix_cache_pages=config.prefix_cache_pages,
        sliding_window=window,
        further_groups=tuple(starmap(GroupLimits, further)),
        has_state=model.cache.has_state,
        num_snapshots=kv.num_snapshots,
        window_steps=() if buckets.window_steps == (0,) else buckets.window_steps,
        image_blocks=shapes.pool_rows // BLOCK_TOKENS,
        whole_image_tokens=_whole_image_tokens(shapes),
        max_encode_patches=config.max_encode_patches or max(shapes.encode_buckets, default=0),
        max_proposed_tokens=config.max_proposed_tokens or 0,
        max_rows=config.most_rows,
        vocab_size=model.vocab_size,
        drafted_tokens=_drafted_tokens(config),
        max_adapters=config.max_adapters,
        num_turns=max(1, len(model.stages)),
    )


def _whole_image_tokens(shapes: RunnerConfig) -> int:
    """See `SchedulerConfig`."""
    vision = shapes.vision
    if vision is None or not vision.both_ways:
        return 0
    return max(shapes.encode_buckets) // vision.patches_per_token


def _target_itl_s(config: ResolvedConfig, *, batch_invariant: bool) -> float:
    """Return the target in seconds; 0: no limit. By default there is one only if no bit depends on a step's
    size.
    """
    if config.target_itl_s is not None:
        return config.target_itl_s
    return DEFAULT_TARGET_ITL_S if batch_invariant else 0.0


LOCK_WAIT_S = 0.5
"""How long metrics wait for the engine's lock, which is held for milliseconds at most."""


def measure(parts: EngineParts, core: EngineCore, journal: Journal, registry: Registry) -> EngineMeters:
    """Begin to fold the journal into the registry, which shows all metrics of the engine from now on."""
    sources = Sources(
        load=_load_of(core),
        totals=core.totals,
        weights_generation=lambda: core.weights.generation,
        are_weights_broken=lambda: core.changes.weights_problem is not None,
        is_paused=lambda: core.changes.is_paused,
        compiles_after_warmup=lambda: parts.runner.compiles_after_warmup.count,
        dropped_entries=lambda: journal.dropped,
        memory=lambda: _memory(parts),
    )
    return EngineMeters(registry, journal, sources, _build_info(parts))


def _load_of(core: EngineCore) -> Callable[[], Load]:
    """Say how busy the engine is, or was when that could be asked last: metrics are shown also while a thread
    hangs with the engine's lock.
    """
    latest = core.load()

    def load() -> Load:
        nonlocal latest
        latest = core.load_within(LOCK_WAIT_S) or latest
        return latest

    return load


def _build_info(parts: EngineParts) -> BuildInfo:
    config = parts.config
    return BuildInfo(
        version=importlib.metadata.version("penstock"),
        jax=jax.__version__,
        platform=parts.backend.platform_name,
        model=parts.info.name,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=cache_dtype(config.kv_cache_dtype, jnp.dtype(config.dtype)).name,
    )


def _memory(parts: EngineParts) -> dict[str, int]:
    device = parts.runner.device
    size = device.num_devices
    found = {"weights": device.weights_bytes // size, "kv_cache": device.cache_bytes // size}
    resident, memory = resident_bytes(), parts.backend.memory()
    if resident is not None:
        found["resident"] = resident
    if memory is not None:
        found["device"] = memory.used_bytes
    return found
