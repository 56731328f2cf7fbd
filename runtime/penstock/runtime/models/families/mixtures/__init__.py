"""Families with mixtures of experts. DeepSeek, whose attention is latent too, is beside this folder."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.mixtures import gpt_oss, llama4, sigmoid, softmax

FAMILIES: Mapping[str, ModelFamily] = {
    **softmax.FAMILIES,
    **sigmoid.FAMILIES,
    **gpt_oss.FAMILIES,
    **llama4.FAMILIES,
}
