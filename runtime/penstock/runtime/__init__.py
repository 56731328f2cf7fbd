"""The engine. `from penstock.runtime import Engine` embeds it. Submodules that do not need jax can be
imported without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.runtime.config import EngineConfig
    from penstock.runtime.engine import Engine
    from penstock.runtime.generation import Generation
    from penstock.runtime.requests.request import SamplingParams, StoppingParams
    from penstock.runtime.text.assembler import Delta

__all__ = ["Delta", "Engine", "EngineConfig", "Generation", "SamplingParams", "StoppingParams"]

_HOME = {
    "Delta": "penstock.runtime.text.assembler",
    "Engine": "penstock.runtime.engine",
    "EngineConfig": "penstock.runtime.config",
    "Generation": "penstock.runtime.generation",
    "SamplingParams": "penstock.runtime.requests.request",
    "StoppingParams": "penstock.runtime.requests.request",
}


def __getattr__(name: str) -> Any:
    # Imports are lazy (PEP 562), so that the scheduler's tests and the client need not import jax.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
