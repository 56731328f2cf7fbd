"""What the engine itself keeps or knows: metrics that are asked for at each snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.scheduling.load import Load, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """What runs here. The names are those of the metric's labels."""

    version: str
    """Penstock's own."""
    jax: str
    """JAX's version."""
    platform: str
    """The kind of device, as JAX names it."""
    model: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    """The dtype of keys and values in the cache, never "auto"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the numbers come from that an engine keeps. Any thread may call these at any time."""

    load: Callable[[], Load]
    totals: Callable[[], Totals]
    weights_generation: Callable[[], int]
    are_weights_broken: Callable[[], bool]
    is_paused: Callable[[], bool]
    compiles_after_warmup: Callable[[], int]
    dropped_entries: Callable[[], int]
    """Of the journal."""
    memory: Callable[[], Mapping[str, int]]
    """Kind of memory to bytes; without kinds that are not known."""


def show(registry: Registry, sources: Sources, build: BuildInfo) -> None:
    """Show in a registry what an engine keeps."""
    state = _State(sources)
    registry.on_snapshot(state.look)
    registry.gauge(defined.OUTPUTS_RUNNING, lambda: {(): state.load.num_running})
    registry.gauge(defined.OUTPUTS_WAITING, lambda: {(): state.load.num_waiting})
    registry.gauge(defined.WAITING_PROMPT_TOKENS, lambda: {(): state.load.waiting_prompt_tokens})
    registry.gauge(defined.KV_PAGES, lambda: _pages(state.load))
    registry.gauge(defined.KV_USAGE, lambda: {(): state.load.pages_used / max(state.load.pages_total, 1)})
    registry.gauge(defined.PAUSED, lambda: {(): int(sources.is_paused())})
    registry.gauge(defined.WEIGHTS_GENERATION, lambda: {(): sources.weights_generation()})
    registry.gauge(defined.WEIGHTS_BROKEN, lambda: {(): int(sources.are_weights_broken())})
    registry.gauge(
        defined.MEMORY, lambda: {(kind,): num_bytes for kind, num_bytes in sources.memory().items()}
    )
    labels = tuple(dataclasses.asdict(build)[name] for name in defined.BUILD_INFO.labels)
    registry.gauge(defined.BUILD_INFO, lambda: {labels: 1})
    for instrument, read in (
        (defined.TOKENS_RECOMPUTED, lambda: state.totals.recomputed_tokens),
        (defined.PREFIX_CACHE_QUERIED, lambda: state.totals.prefix_queried_tokens),
        (defined.PREFIX_CACHE_HIT, lambda: state.totals.prefix_hit_tokens),
        (defined.PREEMPTIONS, lambda: state.totals.preemptions),
        (defined.GRAMMAR_PUT_OFF_ROWS, lambda: state.totals.put_off_rows),
        (defined.COMPILES_AFTER_WARMUP, sources.compiles_after_warmup),
        (defined.JOURNAL_DROPPED, sources.dropped_entries),
    ):
        registry.observed_counter(instrument, _unlabelled(read))


class _State:
    """What was so at the last look, so that all metrics of a snapshot are of one moment."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.look()

    def look(self) -> None:
        self.load, self.totals = self._sources.load(), self._sources.totals()


def _unlabelled(read: Callable[[], int]) -> Callable[[], Mapping[tuple[str, ...], float]]:
    return lambda: {(): read()}


def _pages(load: Load) -> dict[tuple[str, ...], float]:
    free = load.pages_total - load.pages_used - load.pages_cached
    return {("used",): load.pages_used, ("cached",): load.pages_cached, ("free",): free}
