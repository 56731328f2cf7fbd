"""Checks of a request that depend on the model that is served. No jax."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.request import MAX_STOP_TOKEN_IDS, Request
from penstock.runtime.requests.sampling import ResolvedSampling

MAX_BAD_IDS = 100
"""Of ids outside the vocabulary, at most this many are named in an error."""


def in_vocabulary(ids: Collection[int], vocab_size: int) -> bool:
    """Say whether all ids are from 0 to vocab_size - 1."""
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)


def knows_tokens(sampling: ResolvedSampling, vocab_size: int) -> bool:
    """Say whether the model has all tokens that `sampling` mentions."""
    return all(in_vocabulary(ids, vocab_size) for _, ids in _tokens_of(sampling))


def _tokens_of(sampling: ResolvedSampling) -> list[tuple[str, Collection[int]]]:
    """Yield pairs (field, token ids)."""
    return [
        ("sampling.allowed_token_ids", sampling.allowed_token_ids),
        ("sampling.logit_bias", [token for token, _ in sampling.logit_bias]),
        ("sampling.bad_words", [token for word in sampling.bad_words for token in word]),
    ]


def check_token_ids(
    request: Request, vocab_size: int, num_eos: int, *, prompt_is_known: bool, sampling_is_known: bool = False
) -> None:
    """Raise InvalidRequest for ids outside the vocabulary (naming the first ones), and for more stop ids
    than fit beside the model's `num_eos`. With `prompt_is_known` the prompt is not checked, and with
    `sampling_is_known` the sampling is not.
    """
    stopping = request.stopping
    fields: list[tuple[str, Collection[int]]] = [
        ("prompt_token_ids.ids", () if prompt_is_known else request.prompt_token_ids),
        ("stopping.stop_token_ids", stopping.stop_token_ids),
        *([] if sampling_is_known else _tokens_of(request.sampling)),
    ]
    found = (
        Violation(f"{name}[{i}]", f"must be from 0 to {vocab_size - 1}, not {token}")
        for name, ids in fields
        if not in_vocabulary(ids, vocab_size)
        for i, token in enumerate(ids)
        if not 0 <= token < vocab_size
    )
    bad = list(itertools.islice(found, MAX_BAD_IDS))
    most_stops = MAX_STOP_TOKEN_IDS - num_eos
    if len(stopping.stop_token_ids) > most_stops:
        bad.append(Violation("stopping.stop_token_ids", f"at most {most_stops} ids with this model"))
    if bad:
        raise InvalidRequest(bad)
