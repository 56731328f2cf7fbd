"""Other chunk sizes on a running engine."""

from __future__ import annotations

from penstock.runtime.engine import Engine


def set_chunk(engine: Engine, size: int | None) -> None:
    """What `EngineConfig.max_prefill_chunk` sets: an engine of its own for each size would take hours to
    compile. Nothing may run.
    """
    engine.core.limit_prefill_chunk(size)
