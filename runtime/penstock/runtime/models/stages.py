"""Pipeline parallelism: the layers of a model are cut into stages, one behind the other, each with devices of
its own.

The first stage has the embeddings, and the last one the final norm and the head. A table of embeddings that
is the head, too, lies in both. The pools of small parameters are whole in every stage. The paths of leaves
are those of the whole model, so a checkpoint or an update fills them by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.load_rules import ParamPath
from penstock.runtime.ops.cache_spec import CacheGroup, CacheSpec

_LAST = ("lm_head", "norm")
"""Where the paths of leaves begin that only the last stage has."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Some layers of a model, one behind the other."""

    number: int
    """Its place among the stages, from 0 on."""
    begin: int
    """Its first layer."""
    end: int
    """The layer behind its last one."""
    is_last: bool
    cache: CacheSpec
    """The whole cache, of which the entries of other stages are empty."""
    has_tied_head: bool
    """Whether the table of embeddings is the head, too."""

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embeddings of tokens."""
        return self.number == 0

    def has(self, path: ParamPath) -> bool:
        """Say whether the stage needs the leaf at this path."""
        if path[0] == "layers":
            return self.begin <= int(path[1]) < self.end
        if len(path) == 1:  # a pool
            return True
        if path[0] in _LAST:
            return self.is_last
        return self.is_first or (self.is_last and self.has_tied_head and path[0] == "embed_tokens")


def stages_of(model: ModelConfig, count: int) -> tuple[Stage, ...]:
    """Cut the model into so many stages of equally many layers, of which the first ones have one more where
    that does not divide, or as near to that as layers that share keys and values allow; () for one.
    ConfigError if the model cannot be cut so.
    """
    if count == 1:
        return ()
    _check(model, count)
    entries, spec = (*model.cache_entries, len(model.cache.layers)), model.cache
    begins = (0, *_cuts(model, count), len(model.layers))
    return tuple(
        Stage(
            number=number,
            begin=begin,
            end=end,
            is_last=number == count - 1,
            cache=spec.only(range(entries[begin], entries[end])),
            has_tied_head=model.tie_word_embeddings,
        )
        for number, (begin, end) in enumerate(pairwise(begins))
    )


def _cuts(model: ModelConfig, count: int) -> list[int]:
    """Return the first layer of each stage but the first. No stage begins between a layer and one that
    attends to its keys and values.
    """
    least, more = divmod(len(model.layers), count)
    owners = [layer.shares_kv_of for layer in model.layers]
    allowed = [
        begin
        for begin in range(1, len(owners))
        if not any(owner is not None and owner < begin for owner in owners[begin:])
    ]
    if len(allowed) < count - 1:
        raise ConfigError(
            f"pipeline_parallel_size: {model.architecture} cannot be cut into {count} stages: layers attend "
            f"to keys and values of layers before, so stages can begin only at {allowed or 'none'}"
        )
    cuts: list[int] = []
    for number in range(1, count):
        wanted, last = number * least + min(number, more), cuts[-1] if cuts else 0
        left = allowed[: len(allowed) - (count - 1 - number)]  # so many further ones begin behind it
        cuts.append(min((begin for begin in left if begin > last), key=lambda begin: abs(begin - wanted)))
    return cuts


def home_of(stages: tuple[Stage, ...], path: ParamPath) -> int:
    """Return the number of the first stage that has the leaf at this path; 0 where there are no stages."""
    return next((stage.number for stage in stages if stage.has(path)), 0)


def largest_groups(
    caches: Sequence[CacheSpec], page_size: int, dtype: np.dtype[Any]
) -> tuple[CacheGroup, ...]:
    """Return the groups of layers, with the most bytes that a page of each takes in one of the stages, which
    have these caches.
    """
    of_stages = zip(*(cache.groups(page_size, dtype) for cache in caches), strict=True)
    return tuple(max(groups, key=lambda group: group.page_bytes) for groups in of_stages)


def _check(model: ModelConfig, count: int) -> None:
    """Raise ConfigError for a model of which no stages are made."""
    what = None
    if len(model.layers) < count:
        what = f"it has {len(model.layers)} layers"
    elif not model.generates:
        what = "it generates nothing"
    elif model.vision is not None:
        what = "it reads images"
    if what is not None:
        raise ConfigError(
            f"pipeline_parallel_size: {model.architecture} cannot be cut into {count} stages: {what}"
        )
