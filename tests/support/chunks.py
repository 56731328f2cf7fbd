"""Changes the size of prefill chunks of an engine that already runs."""

from __future__ import annotations

from penstock.runtime.engine import Engine


def set_chunk(engine: Engine, size: int | None) -> None:
    """Set what `EngineConfig.max_prefill_chunk` sets, without a new engine: compiling one for each size would
    take hours. No request may be running.
    """
    engine.limit_prefill_chunk(size)
