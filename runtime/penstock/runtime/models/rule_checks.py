"""Proves that the load rules of a model fill each leaf exactly once, and read every entry of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from penstock.runtime.models.load_rules import LoadRules, ParamPath, Part, ReadPart


def check(rules: LoadRules, leaves: Mapping[ParamPath, jax.ShapeDtypeStruct]) -> None:
    """Raise ValueError, which names tensor and leaf, unless the rules fill every leaf exactly once and read
    all of every tensor that they name. A failure is a mistake in the model, not in a checkpoint.
    """
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    filled: dict[ParamPath, list[tuple[str, Part]]] = {path: [] for path in shapes}
    read: dict[str, list[ReadPart]] = {}
    tensors = {tensor.name: tensor.shape for tensor in rules.tensors}
    for rule in rules.rules:
        names = " and ".join(source.name for source in rule.sources)
        for source in rule.sources:
            if source.shape != tensors[source.name]:
                raise ValueError(
                    f"rules expect {source.name} as {source.shape} and as {tensors[source.name]}"
                )
            read.setdefault(source.name, []).append(source.part(rule.num_rows))
        for target in rule.targets:
            if target.path not in filled:
                raise ValueError(f"{names} shall fill {target.path}, which is no leaf of the model")
            if rule.num_rows % target.rows_per_entry:
                raise ValueError(
                    f"{names} shall fill {target.path} with {rule.num_rows} rows: no whole blocks"
                )
            filled[target.path].append((names, target.part(0, rule.num_rows)))
    for padding in rules.padding:
        if padding.path not in filled:
            raise ValueError(f"{padding.path} has padding, but is no leaf of the model")
        filled[padding.path].append(("padding", padding.part))
    for path, parts in filled.items():
        _check_filled(path, shapes[path], parts)
    for name, read_parts in read.items():
        _check_read(name, tensors[name], read_parts)


def _check_filled(path: ParamPath, shape: tuple[int, ...], parts: Sequence[tuple[str, Part]]) -> None:
    if not parts:
        raise ValueError(f"no tensor fills any of the leaf {path}")
    cells = _Cells(shape, [part for _, part in parts])
    owners = np.full(cells.shape, -1, np.int32)
    for i, (names, part) in enumerate(parts):
        _check_inside(f"the leaf {path}, which {names} shall fill,", shape, part)
        index = cells.index(part)
        before = owners[index].max(initial=-1)
        if before >= 0:
            raise ValueError(f"both {parts[before][0]} and {names} fill {part} of the leaf {path}")
        owners[index] = i
    if (empty := np.argwhere(owners < 0)).size:
        raise ValueError(f"no tensor fills {cells.first(empty[0])} of the leaf {path}")


def _check_read(name: str, shape: tuple[int, ...], parts: Sequence[ReadPart]) -> None:
    cells = _Cells(shape, parts)
    is_read = np.zeros(cells.shape, np.bool_)
    for part in parts:
        _check_inside(f"the tensor {name}", shape, part)
        is_read[cells.index(part)] = True
    if (unread := np.argwhere(~is_read)).size:
        raise ValueError(f"nobody reads {cells.first(unread[0])} of the tensor {name}")


class _Cells:
    """An array divided into the coarsest cells that tell its parts apart, so that large tensors need no
    arrays of their own size. An axis along which a part lists its entries has a cell for each entry.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[ReadPart]) -> None:
        self._begins: list[dict[int, int]] = []  # of each axis: where cells begin and end, to their numbers
        self._sizes = shape
        for axis, size in enumerate(shape[: max(map(len, parts))]):
            along = [part[axis] for part in parts if axis < len(part)]
            if any(isinstance(index, np.ndarray) for index in along):
                begins = set(range(size + 1))
            else:
                begins = {0, size}.union(*(_ends(index, size) for index in along))
            self._begins.append({entry: cell for cell, entry in enumerate(sorted(begins))})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(begins) - 1 for begins in self._begins)

    def index(self, part: ReadPart) -> ReadPart:
        """Find the cells of a part."""
        found: list[slice | npt.NDArray[np.intp]] = []
        for index, begins, size in zip(part, self._begins, self._sizes, strict=False):
            if isinstance(index, np.ndarray):
                found.append(index)
            else:
                first, last = _ends(index, size)
                found.append(slice(begins[first], begins[last]))
        return tuple(found)

    def first(self, cell: npt.NDArray[np.intp]) -> list[int]:
        """Return the first entry of a cell."""
        return [list(begins)[number] for begins, number in zip(self._begins, cell, strict=True)]


def _ends(index: Any, size: int) -> tuple[int, int]:
    """Return the entries where an index of one axis begins and ends."""
    if isinstance(index, slice):
        return index.start or 0, size if index.stop is None else index.stop
    return index, index + 1


def _check_inside(what: str, shape: tuple[int, ...], part: ReadPart) -> None:
    """Raise ValueError if a part exceeds the shape; numpy itself would cut a slice that is too long."""
    if len(part) > len(shape):
        raise ValueError(f"{what} has shape {shape}, and so no {part}")
    for size, index in zip(shape, part, strict=False):
        if isinstance(index, slice):
            end = index.stop
        else:
            end = int(np.max(index, initial=-1)) + 1
        if end is not None and end > size:
            raise ValueError(f"{what} has shape {shape}, and so no {part}")
