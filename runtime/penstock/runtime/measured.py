"""Measures an engine: says where the metrics come from that its parts keep."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import jax
import jax.numpy as jnp

from penstock.runtime.building import EngineParts
from penstock.runtime.host.resident import resident_bytes
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.journal.journal import Journal
from penstock.runtime.measuring.engine_meters import EngineMeters
from penstock.runtime.measuring.engine_state import BuildInfo, Sources
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.ops.cache_spec import cache_dtype
from penstock.runtime.scheduling.load import Load

LOCK_WAIT_S = 0.5
"""How long metrics wait for the engine's lock, which is held for milliseconds at most."""


def measure(parts: EngineParts, core: EngineCore, journal: Journal, registry: Registry) -> EngineMeters:
    """Begins to fold the journal into the registry, which shows all metrics of the engine from now on."""
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
    """Says how busy the engine is, or was when that could be asked last: metrics are shown also while a
    thread hangs with the engine's lock.
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
    found = {"weights": device.weights_bytes, "kv_cache": device.cache_bytes}
    resident, memory = resident_bytes(), parts.backend.memory()
    if resident is not None:
        found["resident"] = resident
    if memory is not None:
        found["device"] = memory.used_bytes
    return found
