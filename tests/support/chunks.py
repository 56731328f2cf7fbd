"""Other chunk sizes on a running engine."""

from __future__ import annotations

import dataclasses

from penstock.runtime.engine import Engine


def set_chunk(engine: Engine, size: int | None) -> None:
    """What `EngineConfig.max_prefill_chunk` sets: an engine of its own for each size would take hours to
    compile. Nothing may run.
    """
    planner = engine.core._scheduler._planner
    planner._config = dataclasses.replace(planner._config, max_prefill_chunk=size)
