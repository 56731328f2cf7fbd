"""Families in which recurrent layers stand in the place of most attention."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.hybrids import granite, lfm2, qwen

FAMILIES: Mapping[str, ModelFamily] = {
    **granite.FAMILIES,
    **lfm2.FAMILIES,
    **qwen.FAMILIES,
}
