"""How tokens are drawn: what a request may say of it, and what a server does where nothing is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream` that say how tokens are drawn."""

    temperature: float | None
    """From 0 to 100; 0 always takes the likeliest token."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    """From 0 to 1: tokens less likely than this share of the likeliest token are dropped."""
    presence_penalty: float | None
    """Subtracted from the logit of each token that was generated before; from -2 to 2."""
    frequency_penalty: float | None
    """Subtracted from the logit of each token once for each time it was generated before; from -2 to 2."""
    repetition_penalty: float | None
    """The logits of tokens that occur in the prompt or the output are divided by it if they are positive, and
    multiplied if they are negative; 1 switches it off.
    """
    seed: int | None
    n: int | None
    """The number of outputs of the prompt (default 1). Output i draws with a seed made of (seed, i)."""
    logit_bias: Mapping[int, float] | None
    """From a token id to what is added to its logit."""
    bad_words: Sequence[str] | None
    """Words that are never generated, with or without a space before them."""
    allowed_token_ids: Sequence[int] | None
    """The only tokens that may be generated; empty allows all."""


NEUTRAL: Mapping[str, float] = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "n": 1,
}
"""The values of `SamplingDefaults` that have no effect."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What unset sampling fields mean on this server; None if the server did not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias, in order of the ids."""
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows all."""
