"""How a caller asks for tokens to be drawn. No jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.request import ResolvedSampling
from penstock.runtime.requests.sampling_defaults import FIELDS, GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn, as a caller says it. What is None is the model's default, which
    `Engine.info.defaults` shows; `ResolvedSampling` says what each value does.

    Values out of range raise InvalidRequest when the request is made.
    """

    temperature: float | None = None
    """0 always takes the likeliest token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """From 0 to 2^64 - 1; None lets the engine draw one."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to what is added to its logit; -inf forbids the token."""
    bad_words: Sequence[str] = ()
    """Texts that the output must not hold, with or without a space before them."""
    allowed_token_ids: Sequence[int] = ()
    """The only tokens that may be drawn; empty: all."""

    def resolved(self, defaults: GenerationDefaults) -> ResolvedSampling:
        """All values as numbers, those that are None from `defaults`. The bad words are not in it: they are
        texts, and the engine knows tokens. Raises InvalidRequest with every value that is out of range.
        """
        given = {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}
        bad = [*_number_problems(given), *_kind_problems(self)]
        if bad:
            raise InvalidRequest(bad)
        return ResolvedSampling(
            **{name: given.get(name, getattr(defaults, name)) for name in FIELDS},
            seed=self.seed,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids)),
        )


def _number_problems(given: Mapping[str, Any]) -> list[Violation]:
    return [
        Violation(f"sampling.{name}", f"must be a number, not {value!r}")
        for name, value in given.items()
        if not _is_number(value)
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _kind_problems(params: SamplingParams) -> list[Violation]:
    bad = []
    bias: Any = params.logit_bias
    words: Any = params.bad_words
    top_k: Any = params.top_k
    if params.seed is not None and (isinstance(params.seed, bool) or not isinstance(params.seed, int)):
        bad.append(Violation("sampling.seed", f"must be a whole number, not {params.seed!r}"))
    if top_k is not None and not isinstance(top_k, int):
        bad.append(Violation("sampling.top_k", f"must be a whole number, not {params.top_k!r}"))
    if not isinstance(bias, Mapping) or not all(
        isinstance(token, Integral) and _is_number(value) for token, value in bias.items()
    ):
        bad.append(Violation("sampling.logit_bias", "must map token ids to numbers"))
    if not all(isinstance(token, Integral) for token in params.allowed_token_ids):
        bad.append(Violation("sampling.allowed_token_ids", "must be token ids"))
    if isinstance(words, str):
        bad.append(Violation("sampling.bad_words", "must be a sequence of strings, not one string"))
    return bad
