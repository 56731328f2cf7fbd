"""What makes a model an EAGLE-3 head of another one, its target (Li et al. 2025, arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass

NUM_TAPS = 3
"""Of how many layers of its target a head reads hidden states."""
HIDING_CHANNELS = 16
"""Channels that its keys and values have besides, see `EagleHead`: the fewest that native kernels take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """What a head has that no other model has."""

    target_hidden_size: int
    draft_vocab_size: int
    """How many tokens it can guess. Those that it reads are all of its target's."""
    taps: tuple[int, ...] = ()
    """The layers of the target whose inputs it reads, in rising order; (): the usual ones."""
    fc_bias: bool = False
    """Of the product that makes one hidden state of those of the taps."""
    adds_to_normed: bool = False
    """Whether attention is added to the hidden state behind its norm, rather than before it."""
    has_embeddings: bool = False
    """Whether it has a table of embeddings; else it has its target's."""
    maps_tokens: bool = False
    """Whether the checkpoint says which of its target's tokens its own are; else they are the first ones."""
    layer: str = "midlayer"
    """What the names of its layer's tensors begin with."""

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a target with so many layers whose inputs it reads. vLLM and SGLang take these
        where a checkpoint names none.
        """
        return self.taps or (2, num_layers // 2, num_layers - 3)
