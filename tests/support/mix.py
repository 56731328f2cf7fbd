"""Random requests for the table model, with every sampling feature in every combination."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.runtime.requests.constraint import Mask, mask_words
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.models.table import VOCAB, Tables
from tests.support.models.witness import greedy_tokens


class Mixer:
    """Draws random requests, all from one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def _tokens(self, least: int, most: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, VOCAB, self._rng.integers(least, most + 1)).tolist())

    def _maybe(self, probability: float = 0.5) -> bool:
        return bool(self._rng.random() < probability)

    def greedy(self, name: str, tables: Tables, max_tokens: int = 24) -> Request:
        """Make a greedy request. Bad words, stop ids and some biases are taken from the tokens that would be
        generated without them, so that they change the output.
        """
        request = self._request(name, self._shaping(temperature=0.0), max_tokens)
        would_be = greedy_tokens(request, tables, max_tokens).tokens
        words = [
            tuple(would_be[at : at + length])
            for length in (1, 2, 2, 3)
            if self._maybe() and (at := int(self._rng.integers(0, max_tokens))) + length <= len(would_be)
        ]
        stops = [t for t in would_be[2:] if self._maybe(0.1)][:4]
        return dataclasses.replace(
            request,
            sampling=dataclasses.replace(request.sampling, bad_words=tuple(words)),
            stopping=dataclasses.replace(request.stopping, stop_token_ids=tuple(stops)),
        )

    def sampled(self, name: str, max_tokens: int = 24) -> Request:
        """Make a request with a seed, so that there is only one right output."""
        sampling = dataclasses.replace(
            self._shaping(temperature=float(self._rng.choice([0.3, 0.8, 1.0, 1.7, 2.5, 6.0]))),
            seed=int(self._rng.integers(0, 2**63)),
            top_k=int(self._rng.choice([0, 0, 3, 12])),
            top_p=float(self._rng.choice([1.0, 1.0, 0.9, 0.6])),
            min_p=float(self._rng.choice([0.0, 0.0, 0.05, 0.3])),
        )
        return self._request(name, sampling, max_tokens)

    def _request(self, name: str, sampling: ResolvedSampling, max_tokens: int) -> Request:
        stopping = StoppingParams(
            max_tokens=max_tokens,
            min_tokens=int(self._rng.integers(0, 12)) if self._maybe() else 0,
            ignore_eos=self._maybe(),
        )
        return Request(name, self._tokens(1, 40), sampling, stopping)

    def _shaping(self, temperature: float) -> ResolvedSampling:
        penalties = self._rng.uniform(-2, 2, 2) * (self._rng.random(2) < 0.5)
        return ResolvedSampling(
            temperature=temperature,
            presence_penalty=float(penalties[0]),
            frequency_penalty=float(penalties[1]),
            repetition_penalty=float(self._rng.uniform(0.6, 2.5)) if self._maybe() else 1.0,
            logit_bias=tuple((t, self._bias()) for t in self._tokens(0, 6)) if self._maybe() else (),
            bad_words=tuple((t,) for t in self._tokens(0, 3)),
            allowed_token_ids=self._tokens(4, 30) if self._maybe(0.3) else (),
        )

    def _bias(self) -> float:
        return -math.inf if self._maybe(0.2) else float(self._rng.uniform(-6, 6))


@dataclass(eq=False)
class Turns:
    """A constraint that allows token t as the i-th generated token if (t + i) % 3 is not 0, and is complete
    after `limit` tokens.
    """

    limit: int = 1_000
    accepted: list[int] = field(default_factory=list)

    def allowed(self) -> frozenset[int]:
        return frozenset(t for t in range(VOCAB) if (t + len(self.accepted)) % 3)

    def fill(self, mask: Mask) -> None:
        bits = np.zeros(32 * mask_words(VOCAB), np.uint8)
        bits[sorted(self.allowed())] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert token in self.allowed()
            self.accepted.append(token)

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) >= self.limit


class ForeseenTurns(Turns):
    """The same, which also knows what may follow tokens that it was not given."""

    def fill_ahead(self, masks: Mask, token_ids: Sequence[int]) -> None:
        ahead = Turns(self.limit, list(self.accepted))
        for mask, token in zip(masks, token_ids, strict=True):
            if ahead.is_complete or token not in ahead.allowed():
                return
            ahead.accept([token])
            ahead.fill(mask)

    def forced(self) -> Sequence[int]:
        return ()
