"""Gathers the log-probabilities or the embedding of a prompt while its chunks are computed. No jax."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.reading.prompt_reading import Pooling
from penstock.runtime.requests.request import Request, TokenLogprobs


class PromptValues:
    """Gathers, chunk by chunk, what one request wants of its prompt.

    Every planned chunk is committed, in the order of the plans, also if the sequence is preempted meanwhile.
    So hidden states are added up once for each position: a chunk that is computed again adds those that no
    chunk before it was planned to add.
    """

    __slots__ = ("_logprobs", "_num_known", "_num_planned", "_num_prompt", "_pooling", "_sum", "is_wanted")

    def __init__(self, request: Request) -> None:
        reading = request.reading
        self._num_prompt = num_prompt = len(request.prompt_token_ids)
        self._pooling = None if reading is None else reading.pooling
        self.is_wanted = request.prompt_logprobs is not None or reading is not None
        """Whether anything is wanted of the prompt itself."""
        first = 1 if reading is None else reading.scores_from
        self._num_known = num_prompt - 1 if request.prompt_logprobs is None or first is None else first - 1
        """Below this position nothing is needed for the log-probabilities that are still wanted."""
        self._num_planned = num_prompt if self._pooling is None else 0
        """Below this position, hidden states are added up already, or by chunks in flight."""
        if self._pooling is Pooling.LAST_TOKEN:
            self._num_planned = num_prompt - 1
        self._logprobs: list[TokenLogprobs] = []
        self._sum: NDArray[np.float64] | None = None

    @property
    def first_needed(self) -> int:
        """The first position that must be computed for what is wanted and not known yet; a position that no
        sequence reaches where all is known.
        """
        known = self._num_known if self._num_known < self._num_prompt - 1 else sys.maxsize
        return min(known, self._num_planned) if self._num_planned < self._num_prompt else known

    # -- log-probabilities --

    def add_logprobs(self, end: int, values: Items[TokenLogprobs]) -> None:
        """Takes the log-probabilities that a chunk up to position `end` has given. A sequence that was
        preempted computes some of them again.
        """
        known = min(end, self._num_prompt - 1)
        if known > self._num_known:
            self._logprobs += values[self._num_known - known :]
            self._num_known = known

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Hands out the log-probabilities. All of them are known when the last chunk is committed."""
        taken, self._logprobs = tuple(self._logprobs), []
        return taken

    # -- the embedding --

    def plan_pooling(self, start: int, end: int) -> int | None:
        """Plans to add up hidden states of a chunk, the positions from `start` to `end`. Returns how many of
        its first ones are left out; None if all are.
        """
        first = max(self._num_planned, start)
        if first >= end:
            return None
        self._num_planned = end
        return first - start

    def add_hidden(self, hidden: NDArray[np.float32]) -> None:
        """Adds the hidden states, float32[E], that a chunk has added up."""
        self._sum = hidden.astype(np.float64) if self._sum is None else self._sum + hidden

    def pooled(self) -> NDArray[np.float32] | None:
        """The embedding, float32[E], once the last chunk is committed; None if none is wanted."""
        if self._pooling is None or self._sum is None:
            return None
        count = self._num_prompt if self._pooling is Pooling.MEAN else 1
        pooled: NDArray[np.float32] = (self._sum / count).astype(np.float32)
        return pooled
