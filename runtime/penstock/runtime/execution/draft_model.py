"""What guesses tokens on the device: a draft model, which is a small model beside the served one, its target;
an EAGLE head, which is a layer beside its target; or the heads of the served checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from penstock.runtime.ops.cache_spec import CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A draft on its target's device, or the heads that the target has itself (`CausalLM.predict`). It uses
    its target's pages: each of them has room for the keys and values of the draft's layers, too.
    """

    name: str
    graphdef: nnx.GraphDef[Any] | None
    """With `weights` the halves of nnx.split; None: the target has heads, and their weights are among its
    own."""
    weights: Any
    """None for heads."""
    cache: CacheSpec
    """What its layers keep. None of them keeps state by slot."""
    vocab_size: int
    taps: tuple[int, ...] = ()
    """The layers of the target whose inputs an EAGLE head reads; (): it is no EAGLE head."""

    @property
    def is_of_checkpoint(self) -> bool:
        """Whether these are the heads that the served checkpoint has."""
        return self.graphdef is None
