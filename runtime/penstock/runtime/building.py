"""Makes the parts of an engine from a served model and an operator's options."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from penstock.runtime.buckets import CPU_ROW_GROWTH, NATIVE_TOKEN_GROWTH, ROW_GROWTH, TOKEN_GROWTH, Buckets
from penstock.runtime.compilation import use_compilation_cache
from penstock.runtime.config import DEFAULT_TARGET_ITL_S, EngineConfig, ResolvedConfig, resolve
from penstock.runtime.cpu_threads import check_pool
from penstock.runtime.errors import ConfigError
from penstock.runtime.grammar.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.on_demand import CompilerOnDemand
from penstock.runtime.memory import KVPlan, device_kv_bytes, plan_kv
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.native import library
from penstock.runtime.pacing import Pacer
from penstock.runtime.processors import available_processors
from penstock.runtime.runner import ModelRunner, single_device_mesh
from penstock.runtime.runner_config import RunnerConfig
from penstock.runtime.scheduler import Scheduler, SchedulerConfig
from penstock.runtime.served import ServedModel
from penstock.runtime.text import TextCodec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of. Nothing is compiled for serving yet."""

    runner: ModelRunner
    scheduler: Scheduler
    pacer: Pacer
    config: ResolvedConfig
    """The options with what was derived from the model, the platform and its memory."""
    info: ModelInfo


def build(model: ServedModel, options: EngineConfig) -> EngineParts:
    """Sizes the KV cache and all else that depends on it, and makes the parts. ConfigError where the options
    cannot be met.
    """
    device = next(iter(jax.tree.leaves(model.weights)[0].devices()))
    mesh = single_device_mesh(device)
    threads = options.threads or available_processors()
    native = library.wanted(options.native, options.native_folder, device.platform, np.dtype(model.dtype))
    _check_threads(device, threads, native=native)
    config = resolve(options, device.platform, _memory_limit(device), defaults=model.defaults)
    _log_penalties(model, config)
    use_compilation_cache(config.compilation_cache)
    buckets = _buckets(model, config, device.platform)
    shapes = _runner_config(model, config, buckets, native=native, threads=threads)
    page_bytes = model.kv_spec.bytes_per_token(np.dtype(model.dtype).itemsize) * config.page_size
    kv = plan_kv(
        config,
        model_max_len=model.max_model_len,
        page_bytes=page_bytes,
        device_bytes=_free_bytes(model, config, shapes, mesh),
        sliding_window=model.sliding_window,
    )
    runner = _runner(model, dataclasses.replace(shapes, max_model_len=kv.max_model_len), mesh)
    batch_invariant = model.is_native and runner.attends_natively
    if config.native == "require" and not batch_invariant:
        raise ConfigError(
            "native: the kernels are required, but cannot compute all of this model: they take a "
            "page_size in multiples of 16, heads of 32, inputs of products of 64 and outputs of 16"
        )
    runner.initialize_kv_cache(kv.num_pages)
    config = dataclasses.replace(
        config,
        served_model_name=model.name,
        max_model_len=kv.max_model_len,
        kv_cache_bytes=kv.num_pages * page_bytes,
        dtype=np.dtype(model.dtype).name,
        threads=threads,
        target_itl_s=_target_itl_s(config, batch_invariant=batch_invariant),
    )
    return EngineParts(
        runner=runner,
        scheduler=Scheduler(_scheduler_config(model, config, buckets, kv)),
        pacer=Pacer(config.decode_window_s, config.max_decode_steps, config.target_itl_s or 0.0),
        config=config,
        info=ModelInfo(
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
        ),
    )


def grammar_compiler(text: TextCodec | None, info: ModelInfo, config: ResolvedConfig) -> CompilerOnDemand:
    """Compiles grammars for the model's tokenizer, if it has one that allows it."""
    backend = None if text is None else text.backend
    if backend is None:
        return CompilerOnDemand(None)
    return CompilerOnDemand(
        lambda: GrammarCompiler.from_tokenizer(
            backend,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            config=CompilerConfig(time_limit_s=config.grammar_time_limit_s),
        )
    )


def _check_threads(device: jax.Device, threads: int, *, native: bool) -> None:
    """Limits the native kernels to so many threads, and warns where XLA's pool has another size."""
    if native:
        library.limit_threads(threads)
    if device.platform == "cpu":
        check_pool(threads)


def _memory_limit(device: jax.Device) -> int | None:
    """Bytes that JAX may use of an accelerator, if it tells."""
    stats = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    return stats.get("bytes_limit")


def _log_penalties(model: ServedModel, config: ResolvedConfig) -> None:
    if model.defaults.sampling().has_penalties:
        log.info(
            "requests have penalties unless they say otherwise: %d feature slots for them, %.0f MB",
            config.feature_slots,
            config.feature_slots * model.vocab_size * 8 / 1e6,
        )


def _buckets(model: ServedModel, config: ResolvedConfig, platform: str) -> Buckets:
    on_cpu = platform == "cpu"
    return Buckets.default(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        token_growth=NATIVE_TOKEN_GROWTH if model.skips_padding else TOKEN_GROWTH,
        row_growth=CPU_ROW_GROWTH if on_cpu else ROW_GROWTH,
        max_window=None if on_cpu else config.max_decode_steps,
    )


def _free_bytes(model: ServedModel, config: ResolvedConfig, shapes: RunnerConfig, mesh: Mesh) -> int | None:
    """Bytes that an accelerator has left for the KV cache; None on CPU, and where the options say how large
    the cache is. What programs take on the way is measured by a runner for that alone, because a runner is
    made for one context length, which depends on the cache.
    """
    device = next(iter(mesh.devices.flat))
    if device.platform == "cpu" or config.kv_cache_bytes is not None:
        return None
    probe = _runner(model, shapes, mesh)
    return device_kv_bytes(device, config.hbm_utilization, probe.peak_temp_bytes())


def _runner(model: ServedModel, config: RunnerConfig, mesh: Mesh) -> ModelRunner:
    return ModelRunner(model.graphdef, model.weights, model.kv_spec, config, mesh)


def _runner_config(
    model: ServedModel, config: ResolvedConfig, buckets: Buckets, *, native: bool, threads: int
) -> RunnerConfig:
    """For the longest context that was asked for, which may be more than the KV cache will hold."""
    return RunnerConfig(
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


def _scheduler_config(
    model: ServedModel, config: ResolvedConfig, buckets: Buckets, kv: KVPlan
) -> SchedulerConfig:
    return SchedulerConfig(
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


def _target_itl_s(config: ResolvedConfig, *, batch_invariant: bool) -> float:
    """Seconds; 0 sets no limit. By default there is one only where no bit depends on a step's size."""
    if config.target_itl_s is not None:
        return config.target_itl_s
    return DEFAULT_TARGET_ITL_S if batch_invariant else 0.0
