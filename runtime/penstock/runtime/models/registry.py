"""Architecture name to everything that is needed to serve it. A new family adds its `FAMILIES` here."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.errors import ConfigError, UnknownArchitecture
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.families import (
    deepseek,
    dense,
    gemma,
    gemma4,
    gpt_oss,
    granite_hybrid,
    hunyuan,
    layer_normed,
    lfm2,
    llama,
    llama4,
    mamba,
    olmo,
    qwen_hybrid,
    qwen_vision,
    sigmoid_mixtures,
    softmax_mixtures,
    unread_vision,
    variants,
)
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.hf_fields import Fields

ARCHITECTURES: Mapping[str, ModelFamily] = {
    **llama.FAMILIES,
    **deepseek.FAMILIES,
    **dense.FAMILIES,
    **gemma.FAMILIES,
    **gemma4.FAMILIES,
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
    **qwen_vision.FAMILIES,
    **unread_vision.FAMILIES,
    **variants.FAMILIES,
}


def family_of(architecture: str) -> ModelFamily:
    """The registry's entry; raises UnknownArchitecture if there is none."""
    if architecture not in ARCHITECTURES:
        raise UnknownArchitecture(architecture, tuple(ARCHITECTURES))
    return ARCHITECTURES[architecture]


def parse_config(data: Mapping[str, object]) -> ModelConfig:
    """Parse a config.json mapping, without transformers.

    Raises UnknownArchitecture, or ConfigError listing every field that cannot be served.
    """
    names = data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"config.json: architectures must name exactly one architecture, not {names!r}")
    family, fields = family_of(names[0]), Fields(data)
    fields.ignore(family.ignored)
    return family.parse(names[0], fields)
