"""Fits prompts of which nothing is generated, and makes vectors of what the engine has computed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import InvalidRequest, PromptTooLong, Violation
from penstock.runtime.requests.context import ContextParams, Fitted, Truncation, fit
from penstock.runtime.requests.request import StoppingParams, TokenLogprobs

_NO_STOPPING = StoppingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorForm:
    """How vectors are made of pooled hidden states."""

    normalize: bool = True
    """Whether each is divided by its length."""
    dimensions: int | None = None
    """How many of the first numbers are kept, before that; None: all."""

    def check(self, hidden_size: int) -> None:
        """InvalidRequest where the hidden states have fewer numbers than are wanted."""
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            described = f"must be from 1 to {hidden_size}, not {self.dimensions}"
            raise InvalidRequest([Violation("dimensions", described)])

    def vector(self, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """The vector of a pooled hidden state, float32[dimensions]. A state of zeros stays as it is."""
        kept = pooled[: self.dimensions]
        if not self.normalize:
            return kept
        length = np.linalg.norm(kept.astype(np.float64))
        return (kept / length).astype(np.float32) if length else kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a model finds a continuation of a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token, after the prompt and the tokens before it."""

    @classmethod
    def of(cls, token_ids: tuple[int, ...], values: Sequence[TokenLogprobs]) -> Self:
        """Of the continuation with these tokens, what the engine says of each."""
        return cls(token_ids=token_ids, logprobs=tuple(value.sampled for value in values))

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(self.logprobs)


@contextlib.contextmanager
def naming(field: str, bad: list[Violation]) -> Iterator[None]:
    """Adds what is wrong with one of several prompts to `bad`, under the name of its field: one prompt alone
    is refused without that.
    """
    try:
        yield
    except PromptTooLong as error:
        described = f"at most {error.max_prompt_tokens} tokens, not {error.num_prompt_tokens}"
        bad.append(Violation(field, described))
    except InvalidRequest as error:
        bad += [Violation(field, violation.description) for violation in error.violations]


def fit_inputs(inputs: Sequence[tuple[int, ...]], truncation: Truncation, room: int) -> list[Fitted]:
    """Cuts the inputs of which embeddings are made. InvalidRequest names all that are empty, or too long
    where nothing may be cut.
    """
    context, bad = ContextParams(truncation), list[Violation]()
    fitted: list[Fitted] = []
    for i, token_ids in enumerate(inputs):
        with naming(f"inputs[{i}]", bad):
            fitted.append(fit(token_ids, context, _NO_STOPPING, room))
        if not token_ids:
            bad.append(Violation(f"inputs[{i}]", "has no tokens"))
    if bad:
        raise InvalidRequest(bad)
    return fitted


def join(
    prompt: tuple[int, ...], continuations: Sequence[tuple[int, ...]], room: int
) -> list[tuple[int, ...]]:
    """The prompt with each continuation. InvalidRequest where one of these is empty, and PromptTooLong where
    they do not fit together.
    """
    bad = [
        Violation(f"continuations[{i}]", "has no tokens")
        for i, continuation in enumerate(continuations)
        if not continuation
    ]
    if bad or not prompt:
        raise InvalidRequest(bad or [Violation("input", "the prompt has no tokens")])
    longest = len(prompt) + max(map(len, continuations))
    if longest > room - 1:
        raise PromptTooLong(longest, room - 1)
    return [prompt + continuation for continuation in continuations]
