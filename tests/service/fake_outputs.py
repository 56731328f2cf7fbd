"""What the fake engine generates for one output; see tests/service/fake.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.model_info import ModelInfo
from penstock.runtime.requests.constraint import TokenConstraint, mask_words
from penstock.runtime.requests.request import (
    SEPARATOR,
    Finish,
    FinishReason,
    Pooling,
    Request,
    RequestTiming,
    StepOutput,
    TokenLogprobs,
)
from penstock.runtime.scheduling.status import OutputStatus, Phase
from tests.support.models.byte_text import EOS

HIDDEN_SIZE = 4
Sink = Callable[[Sequence[StepOutput]], None]


def logprobs_of(token: int, top: int) -> TokenLogprobs:
    """Made-up log-probabilities: the sampled token has -token/8, and the likeliest tokens are token, token +
    1, ...
    """
    return TokenLogprobs(-token / 8, tuple((token + i, -(token + i) / 8) for i in range(top)))


def prompt_logprobs_of(token_ids: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Made-up log-probabilities of each prompt token but the first: half of those of `logprobs_of`."""
    return tuple(
        TokenLogprobs(-token / 16, tuple((token + i, -(token + i) / 16) for i in range(top)))
        for token in token_ids[1:]
    )


def hidden_of(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the made-up hidden state after these tokens: their number, their sum, the last one and 1."""
    return np.array([len(token_ids), sum(token_ids), token_ids[-1], 1], np.float32)


def pooled_of(token_ids: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """Return the made-up embedding of these tokens."""
    if pooling is Pooling.LAST_TOKEN:
        return hidden_of(token_ids)
    states = np.stack([hidden_of(token_ids[: end + 1]) for end in range(len(token_ids))])
    mean = (states.sum(axis=0, dtype=np.float64) / len(states)).astype(np.float32)
    pooled: dict[Pooling, NDArray[np.float32]] = {
        Pooling.FIRST_TOKEN: states[0],
        Pooling.MAX: states.max(axis=0),
        Pooling.MEAN: mean,
    }
    return pooled[pooling]


@dataclass
class Running:
    """One output in the fake engine."""

    request: Request
    sink: Sink
    timing: RequestTiming
    made: list[int] = field(default_factory=list)

    @property
    def base_id(self) -> str:
        """The request that the output belongs to."""
        return self.request.request_id.partition(SEPARATOR)[0]

    @property
    def index(self) -> int:
        """The index of the output."""
        return int(self.request.request_id.partition(SEPARATOR)[2] or 0)

    def status(self, *, runs: bool) -> OutputStatus:
        """Where it stands. What runs has its whole prompt in the cache, and all its tokens but the newest."""
        num_prompt, num_made = len(self.request.prompt_token_ids), len(self.made)
        phase = Phase.WAITING if not runs else Phase.DECODE if num_made else Phase.PREFILL
        return OutputStatus(
            request_id=self.request.request_id,
            phase=phase,
            received_ns=self.timing.received_ns,
            num_prompt=num_prompt,
            num_computed=num_prompt + num_made - 1 if num_made else 0,
            num_generated=num_made,
            priority=self.request.priority,
            preemptions=0,
        )

    @property
    def deadline(self) -> float:
        limit = self.request.stopping.time_limit_s
        return float("inf") if limit is None else self.timing.arrived_ns / 1e9 + limit

    def make(self, script: Sequence[int] | None, info: ModelInfo) -> int:
        """Generate the next token."""
        token = self._wanted(script, info)
        constraint = self.request.constraint
        if constraint is not None:
            token = _allowed(constraint, token, info.vocab_size)
            constraint.accept((token,))
        self.made.append(token)
        return token

    def _wanted(self, script: Sequence[int] | None, info: ModelInfo) -> int:
        made = self.made
        if script is not None:
            token = script[len(made)] if len(made) < len(script) else EOS
        else:
            last = made[-1] if made else self.request.prompt_token_ids[-1] + self.index
            token = EOS if last == ord("z") else ord("a") if last >= EOS else last + 1
        if token in info.eos_token_ids and len(made) < self.request.stopping.min_tokens:
            return ord("a")
        return token

    def finish(self, info: ModelInfo, now: float) -> Finish | None:
        """How the output ends after the newest tokens, at the time `now` in seconds; None if it goes on."""
        stopping, made, token = self.request.stopping, self.made, self.made[-1]
        if token in info.eos_token_ids and not stopping.ignore_eos:
            return Finish(FinishReason.EOS, token_id=token)
        if token in stopping.stop_token_ids and len(made) > stopping.min_tokens:
            return Finish(FinishReason.STOP, token_id=token)
        if stopping.max_tokens is not None and len(made) >= stopping.max_tokens:
            return Finish(FinishReason.MAX_TOKENS)
        if len(self.request.prompt_token_ids) + len(made) >= info.max_model_len:
            return Finish(FinishReason.CONTEXT_FULL)
        if now >= self.deadline:
            return Finish(FinishReason.TIME_LIMIT)
        if self.request.constraint is not None and self.request.constraint.is_complete:
            return Finish(FinishReason.EOS)
        return None

    def output(
        self, new: Sequence[int], finish: Finish | None, timing: RequestTiming | None, generation: int
    ) -> StepOutput:
        """Return the engine's output for the newest tokens. With the first of them come the prompt's
        log-probabilities.
        """
        request = self.request
        logprobs: tuple[TokenLogprobs, ...] = ()
        prompt: tuple[TokenLogprobs, ...] = ()
        if request.logprobs is not None:
            logprobs = tuple(logprobs_of(token, request.logprobs) for token in new)
        if request.prompt_logprobs is not None and new and len(self.made) == len(new):
            prompt = prompt_logprobs_of(request.prompt_token_ids, request.prompt_logprobs)
        hidden = None
        if request.hidden_states and new:
            known = (*request.prompt_token_ids, *self.made)
            hidden = np.stack([hidden_of(known[: i - len(new)]) for i in range(len(new))])
        reading = request.reading
        if reading is not None and finish is not None and finish.reason is FinishReason.PROMPT_READ:
            tokens = request.prompt_token_ids
            if reading.pooling is not None:
                hidden = pooled_of(tokens, reading.pooling)
            else:
                prompt = prompt_logprobs_of(tokens, 0)[(reading.scores_from or 1) - 1 :]
        return StepOutput(
            request.request_id, tuple(new), logprobs, finish, timing, generation, None, prompt, hidden
        )

    def failed(self, error: Exception) -> StepOutput:
        """Return the engine's last output where this error ends it."""
        timing = replace(self.timing, finished_ns=time.monotonic_ns())
        return StepOutput(self.request.request_id, error=error, timing=timing)


def _allowed(constraint: TokenConstraint, wanted: int, vocab_size: int) -> int:
    mask = np.zeros(mask_words(vocab_size), np.int32)
    constraint.fill(mask)
    allowed: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return next((token for token in allowed if token >= wanted), allowed[0])
