"""The engine. `from penstock.runtime import Engine` to embed it; submodules without jax import without
jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.runtime.assemble import Delta
    from penstock.runtime.config import EngineConfig
    from penstock.runtime.engine import Engine
    from penstock.runtime.generation import Generation
    from penstock.runtime.request import SamplingParams, StoppingParams

__all__ = ["Delta", "Engine", "EngineConfig", "Generation", "SamplingParams", "StoppingParams"]

_HOME = {
    "Delta": "penstock.runtime.assemble",
    "Engine": "penstock.runtime.engine",
    "EngineConfig": "penstock.runtime.config",
    "Generation": "penstock.runtime.generation",
    "SamplingParams": "penstock.runtime.request",
    "StoppingParams": "penstock.runtime.request",
}


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562), so that the scheduler's tests and the client never pay for importing jax.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
