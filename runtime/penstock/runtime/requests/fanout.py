"""Several outputs of one prompt: each is a request of its own in the engine, with an id and a seed that are
made here. No jax.

The first output computes the prompt; the others are its forks, which begin with its KV pages
(`scheduling.planner`).
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.request import CacheParams, Request, ResolvedSampling
from penstock.runtime.requests.word_table import WordTable

MAX_OUTPUTS = 128
SEPARATOR = "\x00"
"""A character that no caller's id contains."""
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """What `Engine.prepare` makes of a request; all outputs of the request may share it."""

    token_ids: tuple[int, ...]
    cache: CacheParams
    page_keys: tuple[bytes, ...]
    """The prefix cache's keys of the prompt's full pages."""
    in_vocabulary: bool
    """Whether the model knows every token of the prompt."""
    sampling: ResolvedSampling | None = None
    """The sampling parameters, if the model knows all their tokens; None if it does not, or if that was not
    checked."""
    bias_row: NDArray[np.float32] | None = None
    """What `sampling` adds to each logit, float32[V]; None if that is quickly made for each output."""
    words: WordTable | None = None
    """The bad words of `sampling` that have several tokens."""

    def covers(self, sampling: ResolvedSampling) -> bool:
        """Whether what was made of this value's `sampling` can be used for `sampling`."""
        return self.sampling is not None and self.sampling.shares_tokens(sampling)


def output_id(request_id: str, index: int) -> str:
    """The engine's id of output `index`; the first output has the request's own id."""
    return request_id if index == 0 else f"{request_id}{SEPARATOR}{index}"


def request_id_of(engine_id: str) -> str:
    """The id of the request that an output belongs to."""
    return engine_id.partition(SEPARATOR)[0]


def output_seed(seed: int, index: int) -> int:
    """The seed of output `index`. The first output has the request's own seed, so that it equals the output
    of n = 1.

    The seed is SplitMix64's mixer (Steele, Lea and Flood 2014) of seed + index * gamma, which is one to one.
    """
    if index == 0:
        return seed
    z = (seed + index * _GOLDEN_GAMMA) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def outputs_of(request: Request, n: int, constraints: Sequence[TokenConstraint] = ()) -> list[Request]:
    """One request for each output, to be submitted in this order. `constraints` is empty, or has one for each
    output.

    Only the first output has log-probabilities of the prompt.
    """
    sampling = request.sampling
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return [
        dataclasses.replace(
            request,
            request_id=output_id(request.request_id, index),
            sampling=sampling.seeded(output_seed(seed, index)),
            prompt_logprobs=request.prompt_logprobs if index == 0 else None,
            constraint=constraints[index] if constraints else None,
            fork_of=request.request_id if index else None,
            num_outputs=n,
        )
        for index in range(n)
    ]
