"""How the tensors of a checkpoint become the leaves of a model's state, as frozen rules.

A rule reads rows of one or several tensors (`Source`), converts them (`Put`), and writes the result to parts
of one or several leaves (`Target`). Its rows are those of what the model computes, such as the outputs of a
linear layer. A source may be some rows of a tensor, one of several matrices stacked in it, or stored
transposed. A target may be some rows of a fused weight, one matrix of a stacked one, or a place in a pool.
The rule's `put` does what a format needs beyond that (tiles, int8 and its scales, several tensors that make
one weight).

Every module of a model lists its own rules (`HasLoadRules`). `check` proves that together they fill each leaf
exactly once, and read every entry of every tensor that they name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from penstock.runtime.ops.native import linear as native

ParamPath: TypeAlias = tuple[str | int, ...]
"""The place of a leaf in the model's state."""
Part: TypeAlias = tuple[int | slice, ...]
"""An index of a leaf. It is a basic index of numpy's, so what it selects can be written to."""
Leaves: TypeAlias = Mapping[ParamPath, npt.NDArray[Any]]
Put: TypeAlias = Callable[[Sequence[npt.NDArray[Any]], Sequence[npt.NDArray[Any]]], None]
"""Called with (parts, rows): makes what belongs into parts of a rule's targets from rows of its sources, and
writes it there. The rows are the first axis of each source's array."""


class Tensor(Protocol):
    """A tensor, such as an array, of which consecutive entries along the first axis can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: slice, /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class Source:
    """What a rule reads of one tensor: row r of the rule is the tensor's entry `begin` + r along an axis."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    at: tuple[int, ...] = ()
    """Leading indices of the tensor, to pick one of the matrices that it stacks."""
    begin: int = 0
    axis: int = 0
    """The axis of the rows, after `at` is applied; 1 for a matrix that is stored transposed."""
    dtype: np.dtype[np.generic] | None = None
    """The dtype that the tensor must have; None: any of floats, which is converted to the rule's dtype."""

    @property
    def row_size(self) -> int:
        """Values in one row."""
        rest = self.shape[len(self.at) :]
        return math.prod(rest[: self.axis] + rest[self.axis + 1 :])

    def read(self, tensor: Tensor, begin: int, end: int) -> npt.NDArray[Any]:
        """Rows `begin` to `end` of the rule, [rows, ...]."""
        rows = slice(self.begin + begin, self.begin + end)
        if not self.at and self.axis == 0:
            return tensor[rows]
        first = self.at[0] if self.at else 0
        values = tensor[first : first + 1][0] if self.at else tensor[0 : tensor.shape[0]]
        turned: npt.NDArray[Any] = np.moveaxis(values[self.at[1:]], self.axis, 0)
        return turned[rows]

    def part(self, begin: int, end: int) -> Part:
        """Where rows `begin` to `end` of the rule lie in the tensor."""
        rows = slice(self.begin + begin, self.begin + end)
        return (*self.at, *(slice(None),) * self.axis, rows)


@dataclass(frozen=True, slots=True)
class Target:
    """What a rule fills of one leaf: row r of the rule becomes the leaf's entry `begin` + r along an axis."""

    path: ParamPath
    at: tuple[int, ...] = ()
    """Leading indices of the leaf, to pick one of the matrices that it stacks."""
    begin: int = 0
    axis: int = 0
    """The axis of the rows, after `at` is applied."""
    rows_per_entry: int = 1
    """Above 1 if an entry is a block of rows, such as of tiles. Then row r is in entry `begin` + r /
    rows_per_entry."""

    def part(self, begin: int, end: int) -> Part:
        """Where rows `begin` to `end` of the rule, in whole blocks, lie in the leaf."""
        first, last = begin // self.rows_per_entry, -(-end // self.rows_per_entry)
        return (*self.at, *(slice(None),) * self.axis, slice(self.begin + first, self.begin + last))


@dataclass(frozen=True, slots=True)
class Padding:
    """Entries of a leaf, along an axis, that no tensor fills and no operation reads."""

    path: ParamPath
    begin: int
    size: int
    axis: int = 0

    @property
    def part(self) -> Part:
        return (*(slice(None),) * self.axis, slice(self.begin, self.begin + self.size))


def copy_rows(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Copies the rows as they are."""
    parts[0][...] = rows[0]


def pack_rows(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Packs the rows into tiles for the native kernels."""
    native.pack_into(parts[0], np.ascontiguousarray(rows[0]))


def quantize_rows(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Writes the rows in int8, and their scales as the second part."""
    values, parts[1][...] = native.quantize(rows[0])
    parts[0][...] = values


def quantize_and_pack_rows(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Writes the rows as tiles of int8, and their scales as the second part."""
    values, parts[1][...] = native.quantize(rows[0])
    native.pack_into(parts[0], np.ascontiguousarray(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRule:
    """`num_rows` rows of the sources become parts of the targets."""

    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    num_rows: int
    dtype: np.dtype[np.generic]
    """The dtype to which floats are converted before `put` gets them."""
    put: Put = copy_rows

    @property
    def unit(self) -> int:
        """Rows are filled in multiples of this number."""
        return max(target.rows_per_entry for target in self.targets)

    @property
    def row_size(self) -> int:
        """How many values are read for one row."""
        return sum(source.row_size for source in self.sources)

    @property
    def num_bytes(self) -> int:
        """Bytes that the rule reads, counted in its own dtype."""
        return self.num_rows * self.row_size * self.dtype.itemsize

    @property
    def paths(self) -> set[ParamPath]:
        """The leaves that it fills."""
        return {target.path for target in self.targets}

    def parts_of(self, path: ParamPath) -> list[Part]:
        """The parts of one leaf that the rule fills."""
        return [target.part(0, self.num_rows) for target in self.targets if target.path == path]

    def fill(self, leaves: Leaves, tensors: Mapping[str, Tensor], begin: int, end: int) -> list[str]:
        """Puts rows `begin` to `end` of the tensors into host arrays of the leaves; these are whole units.

        Returns the tensors with values that the rule's dtype cannot hold, whose result is of no use.
        """
        too_large: list[str] = []
        rows: list[npt.NDArray[Any]] = []
        for source in self.sources:
            values = source.read(tensors[source.name], begin, end)
            if source.dtype is None:
                as_sent, is_narrower = values, _largest(values.dtype) > _largest(self.dtype)
                with np.errstate(over="ignore", invalid="ignore"):
                    values = values.astype(self.dtype, copy=False)
                if (
                    is_narrower
                    and (infinite := np.isinf(values)).any()
                    and np.isfinite(as_sent[infinite]).any()
                ):
                    too_large.append(source.name)
            rows.append(values)
        self.put([leaves[target.path][target.part(begin, end)] for target in self.targets], rows)
        return too_large


def _largest(dtype: np.dtype[Any]) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]  # jax leaves finfo unannotated


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the checkpoint as a model expects it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    """The tensor's dtype in the model or, if `exact`, the one that it must have in the checkpoint."""
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRules:
    """Everything that a model makes of a checkpoint."""

    rules: tuple[LoadRule, ...]
    padding: tuple[Padding, ...] = ()
    harmless: tuple[str, ...] = ()
    """Regular expressions: tensors in whose names one of them is found are allowed, and not read."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor to the name of another one. The tensor may be absent; if it is there, it must hold the
    same bits as the other."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors, each once, in the order of the rules."""
        found: dict[str, TensorSpec] = {}
        for rule in self.rules:
            for source in rule.sources:
                if source.name not in found:
                    dtype, exact = source.dtype or rule.dtype, source.dtype is not None
                    found[source.name] = TensorSpec(source.name, source.shape, dtype, exact)
        return tuple(found.values())


NameOf: TypeAlias = Callable[[ParamPath], str]
"""Path to the checkpoint's name of the tensor, where the path is that of a state in which nothing is fused.
"""


@runtime_checkable
class HasLoadRules(Protocol):
    """A module with parameters of its own."""

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], name: NameOf
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """The rules of the module at `path` of a model in `dtype`. Each comes with the path that its (first)
        tensor would have if nothing were fused; rules are sorted by these paths.
        """
        ...


def check(rules: LoadRules, leaves: Mapping[ParamPath, jax.ShapeDtypeStruct]) -> None:
    """Raises ValueError, which names tensor and leaf, unless the rules fill every leaf exactly once and read
    all of every tensor that they name. A failure is a mistake in the model, not in a checkpoint.
    """
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    filled: dict[ParamPath, list[tuple[str, Part]]] = {path: [] for path in shapes}
    read: dict[str, list[Part]] = {}
    tensors = {tensor.name: tensor.shape for tensor in rules.tensors}
    for rule in rules.rules:
        names = " and ".join(source.name for source in rule.sources)
        for source in rule.sources:
            if source.shape != tensors[source.name]:
                raise ValueError(
                    f"rules expect {source.name} as {source.shape} and as {tensors[source.name]}"
                )
            read.setdefault(source.name, []).append(source.part(0, rule.num_rows))
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
    owners = np.full(shape[: max(len(part) for _, part in parts)], -1, np.int32)
    for i, (names, part) in enumerate(parts):
        _check_inside(f"the leaf {path}, which {names} shall fill,", shape, part)
        before = owners[part].max(initial=-1)
        if before >= 0:
            raise ValueError(f"both {parts[before][0]} and {names} fill {part} of the leaf {path}")
        owners[part] = i
    if (empty := np.argwhere(owners < 0)).size:
        raise ValueError(f"no tensor fills {empty[0].tolist()} of the leaf {path}")


def _check_read(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
    is_read = np.zeros(shape[: max(map(len, parts))], np.bool_)
    for part in parts:
        _check_inside(f"the tensor {name}", shape, part)
        is_read[part] = True
    if (unread := np.argwhere(~is_read)).size:
        raise ValueError(f"nobody reads {unread[0].tolist()} of the tensor {name}")


def _check_inside(what: str, shape: tuple[int, ...], part: Part) -> None:
    """Raises ValueError if a part exceeds the shape; numpy itself would cut a slice that is too long."""
    if len(part) > len(shape):
        raise ValueError(f"{what} has shape {shape}, and so no {part}")
    for size, index in zip(shape, part, strict=False):
        end = index + 1 if isinstance(index, int) else index.stop
        if end is not None and end > size:
            raise ValueError(f"{what} has shape {shape}, and so no {part}")
