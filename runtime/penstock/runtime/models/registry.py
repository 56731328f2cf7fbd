"""Architecture name to everything that is needed to serve it. A new family adds its `FAMILIES` here."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

from penstock.runtime.errors import ConfigError, UnknownArchitecture
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.families import (
    deepseek,
    dense,
    eagle,
    encoders,
    gemma,
    gemma4,
    gemma4_vision,
    gemma_vision,
    gpt_oss,
    granite_hybrid,
    hunyuan,
    intern_vision,
    layer_normed,
    lfm2,
    llama,
    llama4,
    llama4_vision,
    mamba,
    mistral_vision,
    olmo,
    qwen_hybrid,
    qwen_vision,
    sigmoid_mixtures,
    softmax_mixtures,
    variants,
)
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.hf_fields import Fields

ARCHITECTURES: Mapping[str, ModelFamily] = {
    **llama.FAMILIES,
    **deepseek.FAMILIES,
    **dense.FAMILIES,
    **encoders.FAMILIES,
    **gemma.FAMILIES,
    **gemma4.FAMILIES,
    **gemma4_vision.FAMILIES,
    **gemma_vision.FAMILIES,
    **granite_hybrid.FAMILIES,
    **hunyuan.FAMILIES,
    **layer_normed.FAMILIES,
    **lfm2.FAMILIES,
    **qwen_hybrid.FAMILIES,
    **softmax_mixtures.FAMILIES,
    **sigmoid_mixtures.FAMILIES,
    **gpt_oss.FAMILIES,
    **mamba.FAMILIES,
    **llama4.FAMILIES,
    **olmo.FAMILIES,
    **intern_vision.FAMILIES,
    **llama4_vision.FAMILIES,
    **mistral_vision.FAMILIES,
    **qwen_vision.FAMILIES,
    **variants.FAMILIES,
}


HEADS: Mapping[str, ModelFamily] = eagle.FAMILIES
"""Heads beside a model, which are no models of their own."""


def family_of(architecture: str) -> ModelFamily:
    """Return the registry's entry, also of a head; raise UnknownArchitecture if there is none."""
    found = ARCHITECTURES.get(architecture) or HEADS.get(architecture)
    if found is None:
        raise UnknownArchitecture(architecture)
    return found


def nearest_to(architecture: str, data: Mapping[str, object]) -> tuple[str, tuple[str, ...]]:
    """Find the architecture that takes the most of a config.json, and the fields that it does not take. Of
    equals it is the one with the most similar name. Of a model that reads more than text, its text model is
    compared. Wrappers of such models, which read no further without their model_type, are none.
    """
    inner = data.get("text_config")
    text = inner if isinstance(inner, dict) else data
    plain = {name: value for name, value in text.items() if name != "model_type"}

    def refused(other: str) -> tuple[str, ...]:
        fields = Fields(plain)
        fields.ignore(ARCHITECTURES[other].ignored)
        try:
            ARCHITECTURES[other].parse(other, fields)
        except ConfigError:
            return tuple(dict.fromkeys(problem.partition(":")[0] for problem in fields.problems))
        return ()

    def distance(other: str) -> tuple[int, float]:
        return len(by_name[other]), -SequenceMatcher(None, architecture, other).ratio()

    by_name = {other: refused(other) for other in ARCHITECTURES}
    by_name = {
        other: fields
        for other, fields in by_name.items()
        if not any(field.endswith("model_type") for field in fields)
    }
    nearest = min(by_name, key=distance)
    return nearest, by_name[nearest]


def parse_config(data: Mapping[str, object], *, heads: bool = False) -> ModelConfig:
    """Parse a config.json mapping, without transformers. heads: also that of a head.

    Raises UnknownArchitecture, or ConfigError listing every field that cannot be served.
    """
    names = data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"config.json: architectures must name exactly one architecture, not {names!r}")
    if names[0] in HEADS and not heads:
        raise ConfigError(
            f"config.json: {names[0]} is an EAGLE head, which is no model of its own: serve the model that "
            "it was made for with --speculation draft, and give the head as --draft-model"
        )
    if names[0] not in ARCHITECTURES and names[0] not in HEADS:
        raise UnknownArchitecture(names[0], *nearest_to(names[0], data))
    family, fields = family_of(names[0]), Fields(data)
    fields.ignore(family.ignored)
    return family.parse(names[0], fields)
