"""Embeddings and scores, as frozen values."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from penstock.client.values.results import PromptInfo, Timing, Usage, WeightsVersion


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one input. With NumPy: `numpy.frombuffer(embedding.values, "<f4")`."""

    values: bytes = field(repr=False)
    """The numbers, each a float of 32 bits with its lowest byte first."""
    token_count: int
    """Tokens of the input, as the model saw it."""
    truncated_tokens: int
    """How many tokens were cut off."""
    weights: WeightsVersion
    """The weights that made it."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers of the vector."""
        return struct.unpack(f"<{len(self.values) // 4}f", self.values)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of some inputs, in their order."""

    request_id: str
    model: str
    embeddings: tuple[Embedding, ...]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely the model finds one continuation of a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token, after the prompt and the tokens before it."""
    total_logprob: float
    """Their sum: the log-probability of the whole continuation."""
    weights: WeightsVersion
    """The weights that computed the last of them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of some continuations of one prompt, in their order."""

    request_id: str
    model: str
    prompt: PromptInfo
    scores: tuple[ContinuationScore, ...]
    usage: Usage
    timing: Timing
