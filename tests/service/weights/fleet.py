"""Servers of tiny checkpoints: one whose weights are updated, and one for each version, which keeps it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from tests.service.rig import Kept, Rig, serving
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.tiny import Tensors

ROWS = 16
CONFIG = EngineConfig(
    max_num_seqs=ROWS,
    max_num_batched_tokens=256,
    max_model_len=256,
    kv_cache_bytes=16 << 20,
    max_decode_steps=4,
    compilation_cache=TEST_CACHE,
    show_progress=False,
)
SEEDS = {"initial": 1, "b": 2, "c": 3}
"""The label of each version, and what its weights are drawn with. "initial" is what a server starts with."""


@dataclass(frozen=True)
class Version:
    """One set of weights."""

    tensors: Tensors
    directory: Path
    """A checkpoint of them."""


def loaded(directory: Path) -> Engine:
    """Start an engine. The caller shuts it down."""
    engine = Engine.from_pretrained(str(directory), CONFIG)
    engine.start()
    return engine


@dataclass(frozen=True)
class Fleet:
    """The server under test, and those that explain its answers."""

    rig: Rig
    references: Mapping[str, Rig]


@contextlib.asynccontextmanager
async def fleet(subject: Any, references: Mapping[str, Any], **options: Any) -> AsyncIterator[Fleet]:
    """All servers, each on a port of its own."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        rigs = {label: await enter(serving(engine)) for label, engine in references.items()}
        yield Fleet(await enter(serving(Kept(subject), **options)), rigs)
