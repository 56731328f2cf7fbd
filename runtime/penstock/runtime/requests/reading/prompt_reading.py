"""What is wanted of a prompt after which nothing is generated: an embedding, or scores of tokens. No jax."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.runtime.errors import Violation


class Pooling(enum.Enum):
    """What an embedding is made of: the hidden states of the last layer, after the final norm."""

    LAST_TOKEN = "last_token"
    """Of the last token alone."""
    MEAN = "mean"
    """Of all tokens: their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReading:
    """Exactly one of the two is given."""

    pooling: Pooling | None = None
    """The embedding that is wanted."""
    scores_from: int | None = None
    """The position of the first token whose log-probability is wanted. `Request.prompt_logprobs` says how
    many likeliest tokens are wanted beside it."""

    def violations(self, num_prompt: int, prompt_logprobs: int | None, *, generates: bool) -> list[Violation]:
        """What is wrong with a request that reads its prompt like this. `generates`: whether it asks for
        anything of generated tokens.
        """
        bad: list[Violation] = []
        if (self.pooling is None) == (self.scores_from is None):
            bad.append(Violation("reading", "must be either an embedding or scores"))
        if self.scores_from is not None and not 0 < self.scores_from < num_prompt:
            described = f"must be from 1 to {num_prompt - 1}, not {self.scores_from}"
            bad.append(Violation("reading.scores_from", described))
        if (self.scores_from is None) != (prompt_logprobs is None):
            bad.append(Violation("output.prompt_logprobs", "must be given with scores, and only then"))
        if generates:
            bad.append(Violation("reading", "does not go with what is asked for of generated tokens"))
        return bad
