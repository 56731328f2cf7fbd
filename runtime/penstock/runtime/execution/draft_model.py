"""A draft model: a small model that guesses what the served one, its target, makes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from penstock.runtime.ops.cache_spec import CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A draft on its target's device. `graphdef` and `weights` are the halves of nnx.split. It uses its
    target's pages: each of them has room for the keys and values of the draft's layers, too.
    """

    name: str
    graphdef: nnx.GraphDef[Any]
    weights: Any
    cache: CacheSpec
    """What its layers keep. None of them keeps state by slot."""
    vocab_size: int
