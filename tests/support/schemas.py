"""JSON schemas that structured output must honour, and a stand-in for a model that writes under a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from numpy.typing import NDArray

from penstock.runtime.requests.constraint import TokenConstraint, mask_words

CORPUS = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class SchemaCase:
    """An entry of schemas.json."""

    name: str
    schema: Any

    @property
    def text(self) -> str:
        return json.dumps(self.schema)


@cache
def corpus() -> tuple[SchemaCase, ...]:
    """Every schema of the corpus, by name."""
    return tuple(SchemaCase(name, schema) for name, schema in json.loads(CORPUS.read_text()).items())


def violations(schema: Any, text: str) -> list[str]:
    """Return what jsonschema, with formats, finds wrong with the JSON document `text`. ValueError if `text`
    is not JSON.

    Numbers are decimals on both sides, because 0.3 is a multiple of 0.1 in decimal but not in binary.
    """
    value = json.loads(text, parse_float=_exact, parse_constant=_not_json)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
    with localcontext(prec=2_000):
        return [error.message for error in validator.iter_errors(value)]


def _exact(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except ArithmeticError:  # for example an exponent of twenty digits
        return float(text)


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def allowed_ids(mask: NDArray[np.int32], vocab_size: int) -> NDArray[np.int64]:
    """Return the ids whose bits are set in the mask, ascending."""
    bits = np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size])


@dataclass(frozen=True)
class Walk:
    """The tokens that a writer wrote. `complete`: the constraint ended the output, not `max_tokens`."""

    token_ids: tuple[int, ...]
    complete: bool


class RandomWriter:
    """A stand-in for a model, with random logits: its outputs obey the masks and nothing else.

    The longer an output is, the likelier is an end token and, with `json`, a token that closes something, so
    that most outputs end.
    """

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int], *, json: bool = True) -> None:
        self._vocab_size = len(tokens)
        self._eos = frozenset(eos_token_ids)
        self._closing = np.array([_closing(token) if json else 0.0 for token in tokens], np.float32)
        self._closing[list(eos_token_ids)] = 6.0

    def write(self, constraint: TokenConstraint, seed: int, *, max_tokens: int = 400, calm: int = 30) -> Walk:
        """Write an output of at most `max_tokens` tokens. The pull towards an end is at its full strength
        after twice `calm` tokens.
        """
        rng = np.random.default_rng(seed)
        mask = np.zeros(mask_words(self._vocab_size), np.int32)
        written: list[int] = []
        while not constraint.is_complete and len(written) < max_tokens:
            mask[:] = 0x5A5A5A5A  # the old content must not matter
            constraint.fill(mask)
            ids = allowed_ids(mask, self._vocab_size)
            assert ids.size, "the mask allows no token"
            ends = self._eos.intersection(map(int, ids))
            assert not ends or ends == self._eos, "some end tokens are allowed and others are not"
            logits = rng.normal(scale=1.5, size=self._vocab_size).astype(np.float32)
            logits += self._closing * min(2.0, len(written) / calm)
            token = int(ids[np.argmax(logits[ids])])
            constraint.accept([token])
            written.append(token)
        return Walk(tuple(written), constraint.is_complete)


def _closing(token: bytes) -> float:
    """Roughly how much closer a token brings JSON to its end."""
    if token in _CLOSERS:
        return _CLOSERS[token]
    if token.startswith(b"</"):
        return 3.0
    if token[:1] in (b"{", b"[", b",", b" ", b"\n", b"\t", b"\\"):
        return -2.0
    return -0.7 * len(token)


_CLOSERS = {b'"': 2.5, b"}": 1.0, b"]": 1.0, b"@": 1.0, b":": 0.5}
