"""What a request must generate, in plain numpy: no engine, no jax, one token after the other.

Written down from the definitions: Hugging Face's logits processors (repetition penalty, bad words, min new
tokens, temperature, top-k, top-p, min-p) and OpenAI's presence and frequency penalty and logit bias, in the
order that docs and `ResolvedSampling` promise. In float64, where the engine computes in float32: where two
tokens are too close to tell, the witness says so and the comparison ends there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.request import Request, ResolvedSampling
from tests.support.models.table import EOS, VOCAB, Tables

Logits = NDArray[np.float64]
MARGIN = 1e-3
"""Closer than this, float32 may see it the other way round."""


@dataclass(frozen=True)
class Told:
    """A generation: its tokens, and whether the one after them was too close to call."""

    tokens: list[int]
    unclear: bool


def shaped_logits(
    request: Request, tables: Tables, made: Sequence[int], allowed: frozenset[int] | None = None
) -> Logits:
    """Logits of the next token with penalties and bias, -inf where forbidden. `allowed`: by a constraint."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    penalised = _penalised(tables.logits([*prompt, *made]), sampling, prompt, made)
    logits = penalised.copy()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if sampling.allowed_token_ids:
        logits[[t for t in range(VOCAB) if t not in sampling.allowed_token_ids]] = -np.inf
    logits[[word[0] for word in sampling.bad_words if len(word) == 1]] = -np.inf
    if len(made) < request.stopping.min_tokens:
        logits[sorted(_end_ids(request))] = -np.inf
    mask = sorted(_masked(sampling, made, allowed))
    penalised[mask] = logits[mask] = -np.inf
    # Nothing left: what a constraint forbids stays forbidden, all else is given up.
    return penalised if np.isneginf(logits).all() else logits


def _penalised(raw: Logits, sampling: ResolvedSampling, prompt: Sequence[int], made: Sequence[int]) -> Logits:
    logits = raw.copy()
    for token in {*prompt, *made}:  # Hugging Face, RepetitionPenaltyLogitsProcessor
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(made).items():  # OpenAI: c * frequency + (c > 0) * presence
        logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    return logits


def _masked(sampling: ResolvedSampling, made: Sequence[int], allowed: frozenset[int] | None) -> set[int]:
    """What a constraint, and words of several tokens, forbid. Where the words leave nothing, they do not
    count.
    """
    everything = set(range(VOCAB))
    unlawful = set() if allowed is None else everything - allowed
    words = [word for word in sampling.bad_words if len(word) > 1]
    ending = {word[-1] for word in words if (*made, word[-1])[-len(word) :] == word}
    return unlawful if unlawful | ending == everything else unlawful | ending


def _end_ids(request: Request) -> set[int]:
    eos = set() if request.stopping.ignore_eos else {EOS}
    return eos | set(request.stopping.stop_token_ids)


class Rule(Protocol):
    """What the witness asks of a constraint; `tests.support.mix.Turns` is one."""

    def allowed(self) -> frozenset[int]: ...
    def accept(self, token_ids: Sequence[int]) -> None: ...
    @property
    def is_complete(self) -> bool: ...


def greedy_tokens(request: Request, tables: Tables, num: int, rule: Rule | None = None) -> Told:
    """Up to `num` likeliest tokens, to the first that ends the request or completes the rule; of equal ones
    the smallest id.
    """
    made: list[int] = []
    while len(made) < num and not (rule is not None and rule.is_complete):
        logits = shaped_logits(request, tables, made, None if rule is None else rule.allowed())
        best = int(np.argmax(logits))
        others = np.delete(logits, best)
        if 0 < logits[best] - others.max() < MARGIN:
            return Told(made, unclear=True)
        made.append(best)
        if rule is not None:
            rule.accept([best])
        if best in _end_ids(request) and len(made) > request.stopping.min_tokens:
            break
    return Told(made, unclear=False)


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max()
    result: Logits = shifted - np.log(np.exp(shifted).sum())
    return result


def probabilities(logits: Logits, sampling: ResolvedSampling, nudge: float = 0.0) -> Logits:
    """Of each next token under Hugging Face's warpers in their order: temperature, top-k, top-p, min-p.

    `nudge` moves the thresholds of top-p and min-p, to see whether one is too close to call: upwards for
    fewer tokens.
    """
    scaled = logits / sampling.temperature
    if sampling.top_k:
        kth = np.sort(scaled)[::-1][min(sampling.top_k, VOCAB) - 1]
        scaled = np.where(scaled < kth, -np.inf, scaled)
    if sampling.top_p < 1.0:  # the smallest set of likeliest tokens with at least top_p between them
        probs = np.exp(log_softmax(scaled))
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        scaled[order[before >= sampling.top_p - nudge]] = -np.inf
    if sampling.min_p > 0.0:
        probs = np.exp(log_softmax(scaled))
        scaled = np.where(probs < (sampling.min_p + nudge) * probs.max(), -np.inf, scaled)
    result: Logits = np.exp(log_softmax(scaled))
    return result
