"""Proves that the load rules of a model fill each leaf exactly once, and read every entry of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

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
    owners = np.full(_divided(shape, [part for _, part in parts]), -1, np.int32)
    for i, (names, part) in enumerate(parts):
        _check_inside(f"the leaf {path}, which {names} shall fill,", shape, part)
        before = owners[part].max(initial=-1)
        if before >= 0:
            raise ValueError(f"both {parts[before][0]} and {names} fill {part} of the leaf {path}")
        owners[part] = i
    if (empty := np.argwhere(owners < 0)).size:
        raise ValueError(f"no tensor fills {empty[0].tolist()} of the leaf {path}")


def _check_read(name: str, shape: tuple[int, ...], parts: Sequence[ReadPart]) -> None:
    is_read = np.zeros(_divided(shape, parts), np.bool_)
    for part in parts:
        _check_inside(f"the tensor {name}", shape, part)
        is_read[part] = True
    if (unread := np.argwhere(~is_read)).size:
        raise ValueError(f"nobody reads {unread[0].tolist()} of the tensor {name}")


def _divided(shape: tuple[int, ...], parts: Sequence[ReadPart]) -> tuple[int, ...]:
    """The shape of an array that tells the parts apart. An axis that all parts take whole has one entry, so
    that stacked matrices, stored transposed, do not need an array of their own size.
    """

    def is_whole(axis: int) -> bool:
        return all(
            isinstance(part[axis], slice) and part[axis] == slice(None) for part in parts if axis < len(part)
        )

    depth = max(map(len, parts))
    return tuple(1 if is_whole(axis) else size for axis, size in enumerate(shape[:depth]))


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
