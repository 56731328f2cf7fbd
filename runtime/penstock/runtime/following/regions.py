"""Which regions of an update's tensors the devices of one process need. The leader sends these alone to a
follower.

Leader and follower find the regions by the same rules, so no message says where the values of a piece belong:
the pieces of a tensor come in the order of its regions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.runtime.loading.dtypes import DTYPES
from penstock.runtime.loading.own_rules import own_rules, rules_of_leaves
from penstock.runtime.machine import host_memory
from penstock.runtime.models.load_rules import LoadRule, LoadRules, Source, put_zeros
from penstock.runtime.models.stages import Stage
from penstock.runtime.sent_tensors import SentTensor

REGION_BYTES = 1 << 20
"""The most bytes of a region. A call waits behind one at most."""
Region: TypeAlias = tuple[range, ...]
"""Consecutive entries of a tensor along each of its axes."""
Regions: TypeAlias = Mapping[str, Sequence[Region]]
"""Those of each tensor, by its name; () for a tensor of which nothing is needed."""


class KeptRegions:
    """The regions that the devices of one process need. They are kept for each tensor, because all updates of
    a trainer have the same tensors, and to find the regions of a large mixture takes a second.
    """

    def __init__(self, own: range, devices: int, stage: Stage | None = None) -> None:
        """`own`: the numbers of the process's devices among all `devices`. `stage`: the one that the process
        has, where `devices` are those of it alone; None: the whole model.
        """
        self._own, self._devices, self._stage = own, devices, stage
        self._kept: tuple[LoadRules | None, Mapping[SentTensor, Sequence[Region]]] = None, {}
        """Rules, and the regions that were found by them. Several threads may begin updates at a time, so
        both are replaced at once.
        """

    def of(self, rules: LoadRules, sent: Sequence[SentTensor]) -> Regions:
        """Return the regions of these tensors, which have no checksums. `rules`: what is made of tensors, on
        all devices. Any thread may ask.
        """
        by, kept = self._kept
        if rules is not by:  # of tensors whose names begin otherwise
            kept = {}
        new = [each for each in sent if each not in kept]
        if new:
            own = own_rules(rules, self._own, self._devices)
            if self._stage is not None:
                own = rules_of_leaves(own, self._stage.has)
            found = regions_of(own.rules, new)
            kept = {**kept, **{each: found[each.name] for each in new}}
            self._kept = rules, kept
        return {each.name: kept[each] for each in sent}


def regions_of(rules: Iterable[LoadRule], sent: Sequence[SentTensor]) -> Regions:
    """Find what the rules read of these tensors. What several rules read is found once, unless they read
    different columns that overlap.
    """
    found: dict[str, dict[tuple[int, Region], list[npt.NDArray[np.intp]]]] = {each.name: {} for each in sent}
    for rule in rules:
        for source in rule.sources:
            if source.name in found and rule.put is not put_zeros:  # which writes zeros, whatever they are
                axis, others, rows = _read(source, rule.num_rows)
                found[source.name].setdefault((axis, others), []).append(rows)
    return {each.name: tuple(_regions(found[each.name], each)) for each in sent}


def _read(source: Source, num_rows: int) -> tuple[int, Region, npt.NDArray[np.intp]]:
    """Return the axis of the rows that are read, what is read along the axes before and behind it, and the
    rows. A tensor without axes has one.
    """
    shape, axis = source.shape or (1,), len(source.at) + source.axis
    part = source.part(num_rows)
    full = (*part, *(slice(None),) * (len(shape) - len(part)))
    others = tuple(
        range(*index.indices(size)) if isinstance(index, slice) else range(int(index), int(index) + 1)
        for at, (index, size) in enumerate(zip(full, shape, strict=True))
        if at != axis
    )
    return axis, others, np.arange(shape[axis])[full[axis]]


def _regions(
    found: Mapping[tuple[int, Region], Sequence[npt.NDArray[np.intp]]], sent: SentTensor
) -> Iterator[Region]:
    """Yield the regions of one tensor, none of which is too large. `found`: what is read of it: an axis and
    what is read along the others, to the rows.
    """
    joined = [
        (*others[:axis], run, *others[axis:]) for (axis, others), rows in found.items() for run in _runs(rows)
    ]
    for axis in reversed(range(len(sent.shape))):
        joined = _joined(joined, axis)
    for region in joined:
        yield from _cut(region, DTYPES[sent.dtype].itemsize)


def _runs(rows: Sequence[npt.NDArray[np.intp]]) -> list[range]:
    """Return the runs of consecutive rows among all of these."""
    every = np.concatenate(rows)
    is_read = np.zeros(every.max(initial=-1) + 3, bool)  # with a row before the first and behind the last
    is_read[every + 1] = True
    ends = np.flatnonzero(is_read[1:] != is_read[:-1]).tolist()
    return list(map(range, ends[::2], ends[1::2]))


def _joined(regions: Sequence[Region], axis: int) -> list[Region]:
    """Join regions that touch along an axis and are alike along the others."""
    alike: dict[tuple[Region, Region], list[range]] = {}
    for region in regions:
        alike.setdefault((region[:axis], region[axis + 1 :]), []).append(region[axis])
    joined: list[Region] = []
    for (before, behind), ranges in alike.items():
        runs: list[range] = []
        for each in sorted(ranges, key=lambda each: each.start):
            if runs and each.start <= runs[-1].stop:
                runs[-1] = range(runs[-1].start, max(runs[-1].stop, each.stop))
            else:
                runs.append(each)
        joined += [(*before, run, *behind) for run in runs]
    return joined


def _cut(region: Region, itemsize: int) -> Iterator[Region]:
    """Cut a region into some of at most REGION_BYTES."""
    sizes = [len(each) for each in region]
    if math.prod(sizes) * itemsize <= REGION_BYTES:
        yield region
        return
    axis = next(at for at, size in enumerate(sizes) if size > 1)
    entry_bytes = math.prod(sizes[axis + 1 :]) * itemsize
    step = max(1, REGION_BYTES // entry_bytes)
    for begin in range(region[axis].start, region[axis].stop, step):
        part = range(begin, min(begin + step, region[axis].stop))
        yield from _cut((*region[:axis], part, *region[axis + 1 :]), itemsize)


def values_in(region: Region, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of a tensor's values in a region."""
    if not values.shape:
        return values
    view: npt.NDArray[Any] = values[tuple(slice(each.start, each.stop) for each in region)]
    return view


class PartsOfTensor:
    """A tensor of which the values of some regions come, one region after the other."""

    def __init__(self, sent: SentTensor, regions: Sequence[Region]) -> None:
        self.values = host_memory.zeros(sent.shape, DTYPES[sent.dtype])
        """The values that have come, and zeros."""
        self._missing = list(reversed(regions))
        self._sha256 = hashlib.sha256()

    @property
    def is_complete(self) -> bool:
        """Whether all regions have come."""
        return not self._missing

    @property
    def sha256(self) -> bytes:
        """The SHA-256 of the bytes that have come."""
        return self._sha256.digest()

    def append(self, data: bytes) -> None:
        """Take the values of the next region; no bytes for a tensor of which nothing is needed. ValueError
        for more or fewer bytes.
        """
        self._sha256.update(data)
        if not self._missing:
            if data:
                raise ValueError("there are values of a tensor of which none are needed")
            return
        part = values_in(self._missing.pop(), self.values)
        part[...] = np.frombuffer(data, part.dtype).reshape(part.shape)
