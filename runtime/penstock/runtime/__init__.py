"""The engine. `from penstock.runtime import Engine` embeds it. Submodules that do not need jax can be
imported without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.runtime.chat.messages import ChatTurn, Tool, ToolCall
    from penstock.runtime.config import EngineConfig
    from penstock.runtime.engine import Engine
    from penstock.runtime.images.image import Image
    from penstock.runtime.inprocess.async_engine import AsyncEngine
    from penstock.runtime.inprocess.streams import AsyncGenerationStream, GenerationStream
    from penstock.runtime.prompting.prompts import ContextParams, Truncation
    from penstock.runtime.prompting.results import Generation, Output, Score
    from penstock.runtime.requests.output_constraints import Choice, Ebnf, JsonObject, JsonSchema, Regex
    from penstock.runtime.requests.request import CacheParams, Finish, FinishReason, Pooling, StoppingParams
    from penstock.runtime.requests.sampling import ResolvedSampling, SamplingParams
    from penstock.runtime.text.assembler import Delta

__all__ = [
    "AsyncEngine",
    "AsyncGenerationStream",
    "CacheParams",
    "ChatTurn",
    "Choice",
    "ContextParams",
    "Delta",
    "Ebnf",
    "Engine",
    "EngineConfig",
    "Finish",
    "FinishReason",
    "Generation",
    "GenerationStream",
    "Image",
    "JsonObject",
    "JsonSchema",
    "Output",
    "Pooling",
    "Regex",
    "ResolvedSampling",
    "SamplingParams",
    "Score",
    "StoppingParams",
    "Tool",
    "ToolCall",
    "Truncation",
]

_HOME = {
    "AsyncEngine": "penstock.runtime.inprocess.async_engine",
    "AsyncGenerationStream": "penstock.runtime.inprocess.streams",
    "CacheParams": "penstock.runtime.requests.request",
    "ChatTurn": "penstock.runtime.chat.messages",
    "Choice": "penstock.runtime.requests.output_constraints",
    "ContextParams": "penstock.runtime.prompting.prompts",
    "Delta": "penstock.runtime.text.assembler",
    "Ebnf": "penstock.runtime.requests.output_constraints",
    "Engine": "penstock.runtime.engine",
    "EngineConfig": "penstock.runtime.config",
    "Finish": "penstock.runtime.requests.request",
    "FinishReason": "penstock.runtime.requests.request",
    "Generation": "penstock.runtime.prompting.results",
    "GenerationStream": "penstock.runtime.inprocess.streams",
    "Image": "penstock.runtime.images.image",
    "JsonObject": "penstock.runtime.requests.output_constraints",
    "JsonSchema": "penstock.runtime.requests.output_constraints",
    "Output": "penstock.runtime.prompting.results",
    "Pooling": "penstock.runtime.requests.request",
    "Regex": "penstock.runtime.requests.output_constraints",
    "ResolvedSampling": "penstock.runtime.requests.sampling",
    "SamplingParams": "penstock.runtime.requests.sampling",
    "Score": "penstock.runtime.prompting.results",
    "StoppingParams": "penstock.runtime.requests.request",
    "Tool": "penstock.runtime.chat.messages",
    "ToolCall": "penstock.runtime.chat.messages",
    "Truncation": "penstock.runtime.prompting.prompts",
}


def __getattr__(name: str) -> Any:
    # Imports are lazy (PEP 562), so that the scheduler's tests and the client need not import jax.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
