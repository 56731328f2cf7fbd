"""The defaults of sampling: the operator's values, over those of the model's generation_config.json, over
neutral values. No jax.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.errors import ConfigError, InvalidRequest
from penstock.runtime.requests.request import ResolvedSampling

log = logging.getLogger(__name__)

_NEUTRAL: dict[str, Any] = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1}
"""Fields of the file that are not honoured, and the values that change nothing."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The values that a request's unset sampling fields have on this server."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def sampling(self) -> ResolvedSampling:
        """The sampling of a request that sets no field."""
        return ResolvedSampling(**{field: getattr(self, field) for field in FIELDS})


FIELDS = tuple(field.name for field in dataclasses.fields(GenerationDefaults))


def read_generation_defaults(
    directory: Path, override: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """The defaults of the checkpoint in `directory`: neutral values, replaced by those of its
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
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    for name, neutral in _NEUTRAL.items():
        if data.get(name) not in (None, neutral):
            log.warning("%s: %s = %s is not honoured", path.name, name, data[name])
    return data


def override_defaults(defaults: GenerationDefaults, override: Mapping[str, Any]) -> GenerationDefaults:
    """`defaults` with some values replaced; see `read_generation_defaults`."""
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
        defaults = dataclasses.replace(defaults, **values)
        defaults.sampling()
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error}") from error
    return defaults


def _number(where: str, name: str, value: Any) -> float:
    """A number from JSON as a float; `top_k` must be a whole number and becomes an int."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: {name}: must be a number, not {value!r}")
    if name != "top_k":
        return math.inf if abs(value) > 1e300 else float(value)  # JSON's integers have no largest
    if value != value // 1:
        raise ConfigError(f"{where}: top_k: must be a whole number, not {value!r}")
    return int(value)
