"""Sampling, stopping and context parameters of the contract to validated frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.grammar.bad_words import bad_word_ids
from penstock.runtime.request import MAX_STOP_TOKEN_IDS, SamplingParams, StoppingParams
from penstock.service.backend import Info
from penstock.service.context import ContextParams, Truncation
from penstock.v1 import types_pb2

T = TypeVar("T")
MAX_BAD_IDS = 100
_MAX_DURATION_S = 315_576_000_000  # google.protobuf.Duration: 10,000 years
_TRUNCATIONS = {
    types_pb2.TRUNCATION_REJECT: Truncation.REJECT,
    types_pb2.TRUNCATION_LEFT: Truncation.LEFT,
    types_pb2.TRUNCATION_RIGHT: Truncation.RIGHT,
    types_pb2.TRUNCATION_MIDDLE: Truncation.MIDDLE,
}


class Violations:
    """Collects what is wrong, so that a caller learns all of it at once."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        self.found.append(Violation(field, description))

    def build(self, make: Callable[[], T]) -> T | None:
        """`make()`, or None with its violations noted."""
        try:
            return make()
        except InvalidRequest as error:
            self.found.extend(error.violations)
            return None

    def raise_if_any(self) -> None:
        if self.found:
            raise InvalidRequest(self.found)


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int, bad: Violations) -> None:
    """Note ids outside the vocabulary: one violation each, as far as a status may hold them anyway."""
    if not ids or max(ids) < vocab_size:
        return
    outside = [(i, token) for i, token in enumerate(ids) if token >= vocab_size]
    for i, token in outside[:MAX_BAD_IDS]:
        bad.add(f"{field}[{i}]", f"must be below the vocabulary size {vocab_size}, not {token}")
    if len(outside) > MAX_BAD_IDS:
        bad.add(field, f"{len(outside) - MAX_BAD_IDS} more ids are not below the vocabulary size")


class _NoTokens:
    """Spells nothing: what is wrong with words is found before they are spelt."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return []


def sampling_params(message: types_pb2.SamplingParams, info: Info, bad: Violations) -> SamplingParams | None:
    """Unset fields take the model's effective defaults. None, noted, where something is wrong. Bad words are
    checked and not in it yet: see `with_bad_words`.
    """
    vocab = info.vocab_size
    allowed = tuple(dict.fromkeys(message.allowed_token_ids))
    check_token_ids("sampling.allowed_token_ids", allowed, vocab, bad)
    biases = sorted(message.logit_bias.items())
    for token, _ in biases:
        if token >= vocab:
            bad.add(f"sampling.logit_bias[{token}]", f"must be below the vocabulary size {vocab}")
    defaults = info.defaults

    def value(name: str) -> float:
        is_set = message.HasField(name)  # type: ignore[arg-type]  # one of its literals
        given: float = getattr(message if is_set else defaults, name)
        return given

    bad.build(lambda: bad_word_ids(_NoTokens(), message.bad_words))
    return bad.build(
        lambda: SamplingParams(
            temperature=value("temperature"),
            top_k=int(value("top_k")),
            top_p=value("top_p"),
            min_p=value("min_p"),
            seed=message.seed if message.HasField("seed") else None,
            presence_penalty=value("presence_penalty"),
            frequency_penalty=value("frequency_penalty"),
            repetition_penalty=value("repetition_penalty"),
            logit_bias=tuple(biases),
            allowed_token_ids=allowed,
        )
    )


def with_bad_words(
    sampling: SamplingParams, words: tuple[tuple[int, ...], ...], vocab: int
) -> SamplingParams:
    """The same without these sequences of tokens; InvalidRequest where every token is forbidden then."""
    sampling = dataclasses.replace(sampling, bad_words=words)
    bad = Violations()
    forbidden = {token for token, bias in sampling.logit_bias if bias == float("-inf")}
    forbidden |= {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.allowed_token_ids and forbidden.issuperset(sampling.allowed_token_ids):
        bad.add("sampling.allowed_token_ids", "all of them are forbidden by bad_words or logit_bias")
    elif len(forbidden) == vocab:
        bad.add("sampling.logit_bias", "forbids every token")
    bad.raise_if_any()
    return sampling


def num_outputs(message: types_pb2.SamplingParams, most: int, bad: Violations) -> int:
    """How many outputs are asked for."""
    if message.HasField("n") and not 1 <= message.n <= most:
        bad.add("sampling.n", f"must be from 1 to {most}, not {message.n}")
    return message.n if message.HasField("n") else 1


def context_params(message: types_pb2.ContextOptions, default: Truncation, bad: Violations) -> ContextParams:
    """What to do with a prompt that leaves too little room."""
    truncation = _TRUNCATIONS.get(message.truncation, default)
    if message.truncation not in (types_pb2.TRUNCATION_UNSPECIFIED, *_TRUNCATIONS):
        bad.add("context.truncation", f"{message.truncation} is no value of Truncation")
    reserve = message.reserve_tokens if message.HasField("reserve_tokens") else None
    return ContextParams(truncation, reserve, message.cap_max_tokens)


def stopping_params(message: types_pb2.StoppingParams, info: Info, bad: Violations) -> StoppingParams | None:
    ids = tuple(message.stop_token_ids)
    check_token_ids("stopping.stop_token_ids", ids, info.vocab_size, bad)
    room = MAX_STOP_TOKEN_IDS - len(info.eos_token_ids)
    if room < len(ids) <= MAX_STOP_TOKEN_IDS:
        bad.add("stopping.stop_token_ids", f"at most {room} ids with this model, not {len(ids)}")
    time_limit_s = None
    if message.HasField("time_limit"):
        time_limit_s = _seconds("stopping.time_limit", message.time_limit, bad)
    return bad.build(
        lambda: StoppingParams(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            min_tokens=message.min_tokens,
            stop=tuple(message.stop),
            stop_token_ids=ids,
            ignore_eos=message.ignore_eos,
            include_stop=message.include_stop,
            time_limit_s=time_limit_s,
        )
    )


def _seconds(field: str, duration: Duration, bad: Violations) -> float | None:
    """A Duration in seconds; None, noted, where it breaks the rules of google.protobuf.Duration."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > _MAX_DURATION_S or abs(nanos) >= 10**9 or seconds * nanos < 0:
        bad.add(field, f"is not a valid Duration: {seconds} s and {nanos} ns")
        return None
    return seconds + nanos / 1e9
