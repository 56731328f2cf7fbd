"""The tokens that a request must generate, in plain numpy, without the engine or jax, one token after the
other.

It is written from the definitions: Hugging Face's logits processors (repetition penalty, bad words, min new
tokens, temperature, top-k, top-p, min-p), and OpenAI's presence and frequency penalty and logit bias, in the
order that the docs and `ResolvedSampling` promise. It computes in float64 and the engine in float32; where
two tokens are too close to decide between, the witness says so, and the comparison ends there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.request import Request
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.models.table import EOS, VOCAB, Tables

Logits = NDArray[np.float64]
MARGIN = 1e-3
"""If two logits are closer than this, float32 may order them the other way round."""


@dataclass(frozen=True)
class Told:
    """The tokens of an output, and whether the token after them is too close to call."""

    tokens: list[int]
    unclear: bool


def shaped_logits(
    request: Request, tables: Tables, made: Sequence[int], allowed: frozenset[int] | None = None
) -> Logits:
    """Return the logits of the next token after penalties and bias, with -inf for forbidden tokens. `made`:
    the tokens generated so far; `allowed`: the tokens that a constraint allows, if there is one.
    """
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
    # If nothing is left, only a constraint and bad words of several tokens count.
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
    """Return the tokens forbidden by a constraint and by bad words of several tokens. If these words leave no
    token, only the constraint counts.
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
    """What the witness asks of a constraint; `tests.support.mix.Turns` implements it."""

    def allowed(self) -> frozenset[int]: ...
    def accept(self, token_ids: Sequence[int]) -> None: ...
    @property
    def is_complete(self) -> bool: ...


def greedy_tokens(request: Request, tables: Tables, num: int, rule: Rule | None = None) -> Told:
    """Up to `num` likeliest tokens, up to the first that ends the request or completes the rule. Of equally
    likely tokens it takes the smallest id.
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
    """Return the probability of each next token under Hugging Face's warpers in their order: temperature,
    top-k, top-p, min-p.

    `nudge` moves the thresholds of top-p and min-p, to find out whether a token is too close to one of them;
    a positive `nudge` keeps fewer tokens.
    """
    scaled = logits / sampling.temperature
    if sampling.top_k:
        kth = np.sort(scaled)[::-1][min(sampling.top_k, VOCAB) - 1]
        scaled = np.where(scaled < kth, -np.inf, scaled)
    if sampling.top_p < 1.0:  # the fewest likeliest tokens whose sum is at least top_p
        probs = np.exp(log_softmax(scaled))
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        scaled[order[before >= sampling.top_p - nudge]] = -np.inf
    if sampling.min_p > 0.0:
        probs = np.exp(log_softmax(scaled))
        scaled = np.where(probs < (sampling.min_p + nudge) * probs.max(), -np.inf, scaled)
    result: Logits = np.exp(log_softmax(scaled))
    return result
