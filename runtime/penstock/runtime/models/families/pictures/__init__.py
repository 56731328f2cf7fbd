"""Families whose models also read pictures, published as `...ForConditionalGeneration`."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.pictures import qwen, unread

FAMILIES: Mapping[str, ModelFamily] = {**qwen.FAMILIES, **unread.FAMILIES}
