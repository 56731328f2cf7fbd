"""Sampling defaults: the model's generation_config.json, then neutral values. No jax."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.errors import ConfigError, InvalidRequest
from penstock.runtime.request import SamplingParams

log = logging.getLogger(__name__)

_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "num_beams": 1,
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a request's unset sampling fields mean on this server."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Effective defaults of the checkpoint in `directory`; neutral ones where it has no
    generation_config.json.

    An explicit `do_sample: false` means greedy, as in transformers; where it is absent the values decide.
    Fields that change sampling and are not honoured are logged by name. Values out of range are a
    ConfigError.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    for name, neutral in _NEUTRAL.items():
        if data.get(name) not in (None, neutral):
            log.warning("%s: %s = %s is not honoured", path.name, name, data[name])
    if data.get("do_sample") is False:
        return GenerationDefaults(temperature=0.0)

    def value(name: str, default: float) -> Any:
        found = data.get(name)
        return default if found is None else found

    defaults = GenerationDefaults(
        temperature=value("temperature", 1.0),
        top_k=value("top_k", 0),
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
    )
    try:
        SamplingParams(defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p)
    except (InvalidRequest, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return defaults
