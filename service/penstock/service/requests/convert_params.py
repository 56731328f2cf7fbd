"""Converts the contract's parameters of sampling, stopping and context to validated frozen values."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.grammar.bad_words import check_bad_words
from penstock.runtime.requests.context import ContextParams, Truncation
from penstock.runtime.requests.request import (
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ResolvedSampling,
    StoppingParams,
)
from penstock.runtime.requests.sampling_defaults import FIELDS
from penstock.runtime.requests.sampling_params import SamplingParams
from penstock.service.backend import Info
from penstock.v1 import types_pb2

T = TypeVar("T")
MAX_VIOLATIONS = 20
"""How many violations are kept; more than a status has room for."""
IDS_AT_ONCE = 16_384
"""How many ids are copied and checked at a time; that takes about half a millisecond."""
_MAX_DURATION_S = 315_576_000_000  # google.protobuf.Duration: 10,000 years
TRUNCATIONS = {
    types_pb2.TRUNCATION_REJECT: Truncation.REJECT,
    types_pb2.TRUNCATION_LEFT: Truncation.LEFT,
    types_pb2.TRUNCATION_RIGHT: Truncation.RIGHT,
    types_pb2.TRUNCATION_MIDDLE: Truncation.MIDDLE,
}


class Ids(Protocol):
    """A repeated field of token ids, which are never below 0. Asking for its length is cheap."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> list[int]: ...


class Violations:
    """Collects violations, so that a caller learns all of them at once.

    It keeps the first MAX_VIOLATIONS and counts the others, so that half a million bad ids cost no more than
    twenty.
    """

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._num_more = 0

    @property
    def is_full(self) -> bool:
        """Whether further violations are only counted."""
        return len(self.found) >= MAX_VIOLATIONS

    def add(self, field: str, description: str) -> None:
        if self.is_full:
            self._num_more += 1
        else:
            self.found.append(Violation(field, description))

    def add_uncollected(self, count: int) -> None:
        """Count `count` more violations, of which only the number is reported."""
        self._num_more += count

    def allows(self, field: str, count: int, most: int, what: str) -> bool:
        """Whether there are at most `most` values; adds a violation if not. To be asked before anything walks
        over them.
        """
        if count > most:
            self.add(field, f"at most {most} {what}, not {count}")
        return count <= most

    def build(self, make: Callable[[], T]) -> T | None:
        """Return `make()`. If it raises InvalidRequest, add its violations and return None."""
        try:
            return make()
        except InvalidRequest as error:
            for violation in error.violations:
                self.add(violation.field, violation.description)
            return None

    def raise_if_any(self) -> None:
        if self._num_more:
            raise InvalidRequest([*self.found, Violation("", f"and {self._num_more} more violations")])
        if self.found:
            raise InvalidRequest(self.found)


def token_ids(field: str, ids: Ids, vocab_size: int, bad: Violations) -> tuple[int, ...]:
    """Copy the ids of a repeated field. Adds a violation for each id that is outside the vocabulary, with its
    index.

    They are copied in parts, because no other thread runs while a part is copied: a million ids at once would
    keep the event loop waiting for tens of milliseconds, on whichever thread that is done.
    """
    taken: list[int] = []
    for start in range(0, len(ids), IDS_AT_ONCE):
        part = ids[start : start + IDS_AT_ONCE]
        if max(part) >= vocab_size:
            _note_unknown(field, start, part, vocab_size, bad)
        taken += part
    return tuple(taken)


def _note_unknown(field: str, start: int, ids: Sequence[int], vocab_size: int, bad: Violations) -> None:
    for i, token in enumerate(ids):
        if bad.is_full:
            bad.add_uncollected(sum(map(vocab_size.__le__, ids[i:])))
            return
        if token >= vocab_size:
            bad.add(f"{field}[{start + i}]", f"must be below the vocabulary size {vocab_size}, not {token}")


def sampling_params(
    message: types_pb2.SamplingParams, info: Info, bad: Violations
) -> ResolvedSampling | None:
    """Convert the sampling parameters; unset fields take the model's defaults. Returns None, and adds
    violations, if a value is wrong. Bad words are only checked here: `with_bad_words` adds them once they are
    tokenized.
    """
    vocab = info.vocab_size
    allowed = _allowed_ids(message, vocab, bad)
    biases = _biases(message, vocab, bad)

    def value(name: str) -> Any:
        is_set = message.HasField(name)  # type: ignore[arg-type]  # one of its literals
        return getattr(message, name) if is_set else None

    bad.build(lambda: check_bad_words(message.bad_words))
    asked = SamplingParams(**{name: value(name) for name in (*FIELDS, "seed")})
    sampling = bad.build(lambda: asked.resolved(info.defaults))
    if sampling is None or not (biases or allowed):
        return sampling
    return bad.build(lambda: dataclasses.replace(sampling, logit_bias=biases, allowed_token_ids=allowed))


def _allowed_ids(message: types_pb2.SamplingParams, vocab: int, bad: Violations) -> tuple[int, ...]:
    field, ids = "sampling.allowed_token_ids", message.allowed_token_ids
    if not bad.allows(field, len(ids), vocab, "ids (the vocabulary)"):
        return ()
    return tuple(dict.fromkeys(token_ids(field, ids, vocab, bad)))


def _biases(message: types_pb2.SamplingParams, vocab: int, bad: Violations) -> tuple[tuple[int, float], ...]:
    """The biases in the order of their token ids."""
    field, biases = "sampling.logit_bias", message.logit_bias
    if not (biases and bad.allows(field, len(biases), vocab, "tokens (the vocabulary)")):
        return ()
    # numpy sorts them, because it lets other threads run meanwhile.
    tokens: list[int] = np.sort(np.fromiter(biases, np.uint32, len(biases))).tolist()
    for token in tokens[bisect_left(tokens, vocab) :]:
        bad.add(f"{field}[{token}]", f"must be below the vocabulary size {vocab}")
    return tuple([(token, biases[token]) for token in tokens])


def num_outputs(message: types_pb2.SamplingParams, most: int, bad: Violations) -> int:
    """How many outputs the request asks for."""
    if message.HasField("n") and not 1 <= message.n <= most:
        bad.add("sampling.n", f"must be from 1 to {most}, not {message.n}")
    return message.n if message.HasField("n") else 1


def truncation_of(message: types_pb2.ContextOptions, default: Truncation) -> Truncation:
    """The truncation that the request asks for, or the default where it names none that there is."""
    return TRUNCATIONS.get(message.truncation, default)


def context_params(message: types_pb2.ContextOptions, default: Truncation, bad: Violations) -> ContextParams:
    """What the request wants done with a prompt that leaves too little room."""
    if message.truncation not in (types_pb2.TRUNCATION_UNSPECIFIED, *TRUNCATIONS):
        bad.add("context.truncation", f"{message.truncation} is no value of Truncation")
    reserve = message.reserve_tokens if message.HasField("reserve_tokens") else None
    return ContextParams(truncation_of(message, default), reserve, message.cap_max_tokens)


def stopping_params(message: types_pb2.StoppingParams, info: Info, bad: Violations) -> StoppingParams | None:
    field, room = "stopping.stop_token_ids", MAX_STOP_TOKEN_IDS - len(info.eos_token_ids)
    ids: tuple[int, ...] = ()
    if bad.allows(field, len(message.stop_token_ids), room, "ids with this model"):
        ids = token_ids(field, message.stop_token_ids, info.vocab_size, bad)
    stop: tuple[str, ...] = ()
    if bad.allows("stopping.stop", len(message.stop), MAX_STOP_STRINGS, "strings"):
        stop = tuple(message.stop)
    time_limit_s = None
    if message.HasField("time_limit"):
        time_limit_s = seconds("stopping.time_limit", message.time_limit, bad)
    return bad.build(
        lambda: StoppingParams(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            min_tokens=message.min_tokens,
            stop=stop,
            stop_token_ids=ids,
            ignore_eos=message.ignore_eos,
            include_stop=message.include_stop,
            time_limit_s=time_limit_s,
        )
    )


def seconds(field: str, duration: Duration, bad: Violations) -> float | None:
    """Convert a Duration to seconds. Returns None, and adds a violation, if it breaks the rules of
    google.protobuf.Duration.
    """
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > _MAX_DURATION_S or abs(nanos) >= 10**9 or seconds * nanos < 0:
        bad.add(field, f"is not a valid Duration: {seconds} s and {nanos} ns")
        return None
    return seconds + nanos / 1e9
