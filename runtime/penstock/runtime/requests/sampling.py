"""How the next token is drawn: the fields of sampling, their ranges and neutral values, what a caller may
leave open, and the model's defaults. No jax.

A number stands twice here: in `SamplingNumbers`, with its range and its neutral value, and in
`SamplingParams`, where it may be left open. What packs it into the step's buffer, hands it to the samplers
and tells it to callers goes through `INTS` and `FLOATS`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from penstock.runtime.errors import ConfigError, InvalidRequest, Violation
from penstock.runtime.model_files import read_json_object

log = logging.getLogger(__name__)

_NOT_HONOURED: dict[str, Any] = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1}
"""Fields of generation_config.json that are not honoured, and the values that change nothing."""
MAX_BAD_BIASES = 20
"""Of biases that are not numbers, at most this many are named in an error."""


def _ranged(neutral: float, described: str, holds: Callable[[float], bool]) -> Any:
    """Make a field that changes nothing at `neutral`; `described` is its range in words, and `holds` tests
    it.
    """
    return field(default=neutral, metadata={"described": described, "holds": holds})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The numbers that say how a token is drawn. A value out of range raises InvalidRequest, which names all.

    Those with a neutral value of type int are whole. The samplers in XLA read them by name; the one in C++ by
    column, and `ops/native/src/sample/sample_codes.h` lists the columns in this order.
    """

    temperature: float = _ranged(1.0, "from 0 to 100", lambda x: 0.0 <= x <= 100.0)
    top_k: int = _ranged(0, "from 0 (off) to 2147483647", lambda x: 0 <= x < 2**31)
    top_p: float = _ranged(1.0, "above 0 and at most 1", lambda x: 0.0 < x <= 1.0)
    min_p: float = _ranged(0.0, "from 0 to 1", lambda x: 0.0 <= x <= 1.0)
    presence_penalty: float = _ranged(0.0, "from -2 to 2", lambda x: -2.0 <= x <= 2.0)
    frequency_penalty: float = _ranged(0.0, "from -2 to 2", lambda x: -2.0 <= x <= 2.0)
    repetition_penalty: float = _ranged(1.0, "above 0", lambda x: 0.0 < x < math.inf)

    def __post_init__(self) -> None:
        if bad := self._problems():
            raise InvalidRequest(bad)

    def _problems(self) -> list[Violation]:
        bad = []
        for number in _NUMBERS:
            value = getattr(self, number.name)
            if not number.metadata["holds"](value):
                described = f"must be {number.metadata['described']}, not {value}"
                bad.append(Violation(f"sampling.{number.name}", described))
        return bad


_NUMBERS = dataclasses.fields(SamplingNumbers)
FIELDS = tuple(number.name for number in _NUMBERS)
INTS = tuple(number.name for number in _NUMBERS if isinstance(number.default, int))
"""The whole ones of `FIELDS`."""
FLOATS = tuple(number.name for number in _NUMBERS if isinstance(number.default, float))
"""The others of `FIELDS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults(SamplingNumbers):
    """The values that a request's unset sampling fields have on this server."""

    def sampling(self) -> ResolvedSampling:
        """Return the sampling of a request that sets no field."""
        return ResolvedSampling(**{name: getattr(self, name) for name in FIELDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling(SamplingNumbers):
    """How the next token is drawn from the logits.

    The steps, in this order: repetition penalty; frequency and presence penalty; bias; removal of tokens that
    are not allowed; then, as in Hugging Face's processors, temperature, top_k, top_p, min_p. `temperature` 0
    is greedy, and the steps after it have no effect. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is an
    unsigned 64-bit number; None lets the engine draw one.

    `repetition_penalty` is Hugging Face's (CTRL, Keskar et al. 2019): the logit of every token of prompt or
    output is divided by it if positive, else multiplied. `frequency_penalty` and `presence_penalty` are
    OpenAI's: the former is subtracted for each occurrence in the output, the latter once if there is any.
    """

    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, number that is added to its logit); -inf forbids the token."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output must not contain."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: all."""

    def _problems(self) -> list[Violation]:
        bad = SamplingNumbers._problems(self)
        if self.seed is not None and not 0 <= self.seed < 2**64:
            bad.append(Violation("sampling.seed", "must be an unsigned 64-bit number"))
        no_numbers = ((token, bias) for token, bias in self.logit_bias if not bias < math.inf)
        for token, bias in itertools.islice(no_numbers, MAX_BAD_BIASES):
            bad.append(Violation(f"sampling.logit_bias[{token}]", f"must be a number, not {bias}"))
        if not all(self.bad_words):
            bad.append(Violation("sampling.bad_words", "must not hold an empty word"))
        return bad

    def seeded(self, seed: int) -> ResolvedSampling:
        """Make a copy with another seed, from 0 to 2^64 - 1. The other fields are shared, and not checked
        again.
        """
        if not 0 <= seed < 2**64:
            raise InvalidRequest([Violation("sampling.seed", "must be an unsigned 64-bit number")])
        twin = copy.copy(self)  # `dataclasses.replace` would check all fields again, maybe a whole vocabulary
        object.__setattr__(twin, "seed", seed)
        return twin

    def shares_tokens(self, other: ResolvedSampling) -> bool:
        """Say whether both have the very same token fields: `seeded` made one from the other, or both from a
        third.
        """
        return (
            self.logit_bias is other.logit_bias
            and self.bad_words is other.bad_words
            and self.allowed_token_ids is other.allowed_token_ids
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def has_bias(self) -> bool:
        """Whether a fixed value per token is added to the logits; -inf where the token is forbidden."""
        return bool(self.logit_bias or self.allowed_token_ids) or any(len(w) == 1 for w in self.bad_words)


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
        """Return all values as numbers, those that are None from `defaults`. The bad words are not in it:
        they are texts, and the engine knows tokens. Raises InvalidRequest with every value that is out of
        range.
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
    if params.seed is not None and (isinstance(params.seed, bool) or not isinstance(params.seed, int)):
        bad.append(Violation("sampling.seed", f"must be a whole number, not {params.seed!r}"))
    for name in INTS:
        value = getattr(params, name)
        if value is not None and not isinstance(value, int):
            bad.append(Violation(f"sampling.{name}", f"must be a whole number, not {value!r}"))
    if not isinstance(bias, Mapping) or not all(
        isinstance(token, Integral) and _is_number(value) for token, value in bias.items()
    ):
        bad.append(Violation("sampling.logit_bias", "must map token ids to numbers"))
    if not all(isinstance(token, Integral) for token in params.allowed_token_ids):
        bad.append(Violation("sampling.allowed_token_ids", "must be token ids"))
    if isinstance(words, str):
        bad.append(Violation("sampling.bad_words", "must be a sequence of strings, not one string"))
    return bad


def read_generation_defaults(
    directory: Path, override: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """Read the defaults of the checkpoint in `directory`: neutral values, replaced by those of its
    generation_config.json, if there is one, replaced by those of `override`, which has the same names.

    An explicit `do_sample: false` means temperature 0, as in transformers, whatever temperature is given
    beside it. If it is absent, the temperature decides. Fields of the file that change sampling and are not
    honoured are logged by name. In `override` an unknown name is a ConfigError. So is a value out of range in
    either.
    """
    override = override or {}
    path = directory / "generation_config.json"
    data = _read(path) if path.exists() else {}
    if override.get("do_sample") is not None:  # the operator decides whether the file's temperature counts
        data["do_sample"] = override["do_sample"]
    return override_defaults(_over(GenerationDefaults(), data, str(path)), override)


def _read(path: Path) -> dict[str, Any]:
    data = read_json_object(path)
    for name, neutral in _NOT_HONOURED.items():
        if data.get(name) not in (None, neutral):
            log.warning("%s: %s = %s is not honoured", path.name, name, data[name])
    return data


def override_defaults(defaults: GenerationDefaults, override: Mapping[str, Any]) -> GenerationDefaults:
    """Return `defaults` with some values replaced; see `read_generation_defaults`."""
    unknown = sorted(set(override) - {*FIELDS, "do_sample"})
    if unknown:
        raise ConfigError(
            f"generation_config: {', '.join(unknown)} cannot be set; there is {', '.join(FIELDS)}, do_sample"
        )
    return _over(defaults, override, "generation_config")


def _over(defaults: GenerationDefaults, data: Mapping[str, Any], where: str) -> GenerationDefaults:
    given = [name for name in FIELDS if data.get(name) is not None]
    values: dict[str, Any] = {name: _number(where, name, data[name]) for name in given}
    do_sample = data.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError(f"{where}: do_sample: must be true or false, not {do_sample!r}")
    if do_sample is False:
        values["temperature"] = 0.0
    try:
        return dataclasses.replace(defaults, **values)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error}") from error


def _number(where: str, name: str, value: Any) -> float:
    """Return a number from JSON as a float, or as an int if it must be whole."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: {name}: must be a number, not {value!r}")
    if name not in INTS:
        return math.inf if abs(value) > 1e300 else float(value)  # JSON's integers have no largest
    if value != value // 1:
        raise ConfigError(f"{where}: {name}: must be a whole number, not {value!r}")
    return int(value)
