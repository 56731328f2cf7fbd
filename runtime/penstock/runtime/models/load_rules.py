"""How the tensors of a checkpoint become the leaves of a model's state, as frozen rules.

A rule reads rows of one or several tensors (`Source`), converts them (`Put`), and writes the result to parts
of one or several leaves (`Target`). Its rows are those of what the model computes, such as the outputs of a
linear layer. A source may be some rows of a tensor, one of several matrices stacked in it, or stored
transposed. A target may be some rows of a fused weight, one matrix of a stacked one, or a place in a pool.
The rule's `put` does what a format needs beyond that (tiles, int8 and its scales, several tensors that make
one weight).

Every module of a model lists its own rules (`HasLoadRules`). `rule_checks` proves that together they fill
each leaf exactly once, and read every entry of every tensor that they name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from penstock.runtime.models.quantised import Coded, FloatCodes, quantised
from penstock.runtime.ops.codes import OUTPUTS, CodeForm
from penstock.runtime.ops.native import linear as native

AXIS = "model"
"""The axis of the mesh over whose devices a model is cut."""
ParamPath: TypeAlias = tuple[str | int, ...]
"""The place of a leaf in the model's state."""
Part: TypeAlias = tuple[int | slice, ...]
"""An index of a leaf. It is a basic index of numpy's, so what it selects can be written to."""
ReadPart: TypeAlias = tuple[int | slice | npt.NDArray[np.intp], ...]
"""An index of a tensor, which may also list entries along one axis."""
Rows: TypeAlias = tuple[int, ...] | range
"""Entries of a tensor along one axis, in the order in which a rule reads them."""
Leaves: TypeAlias = Mapping[ParamPath, npt.NDArray[Any]]
Put: TypeAlias = Callable[[Sequence[npt.NDArray[Any]], Sequence[npt.NDArray[Any]]], None]
"""Called with (parts, rows): makes what belongs into parts of a rule's targets from rows of its sources, and
writes it there. The rows are the first axis of each source's array."""


class Tensor(Protocol):
    """A tensor, such as an array, of which consecutive entries along the first axes can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, part: slice | tuple[slice, ...], /) -> npt.NDArray[Any]: ...


@runtime_checkable
class CodedTensor(Tensor, Protocol):
    """A tensor whose values stand in the checkpoint as codes."""

    @property
    def kept(self) -> CodeForm | None:
        """The bytes that can hold its codes as they are; None: none can."""
        ...

    def codes(self, rows: slice, form: CodeForm, /) -> Coded | None:
        """Return consecutive rows as codes that bytes of this form hold as they are; None if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """What a rule reads of one tensor: row r of the rule is the tensor's entry `begin` + r along an axis."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor. A tensor without axes has one row."""
    at: tuple[int, ...] = ()
    """Leading indices of the tensor, to pick one of the matrices that it stacks."""
    begin: int = 0
    axis: int = 0
    """The axis of the rows, after `at` is applied; 1 for a matrix that is stored transposed."""
    order: Rows | None = None
    """Where given, row r of the rule is the entry `begin` + order[r]. Channels that a checkpoint stores
    interleaved are put side by side so."""
    columns: slice | None = None
    """Which entries are read along the first axis that is not that of the rows; None: all."""
    dtype: np.dtype[np.generic] | None = None
    """The dtype that the tensor must have; None: any of floats, which is converted to the rule's dtype."""

    def piece(self, first: int, num_rows: int) -> Source:
        """Return rows `first` to `first + num_rows` of this source, as a source of its own."""
        if self.order is None:
            return replace(self, begin=self.begin + first)
        return replace(self, order=self.order[first : first + num_rows])

    @property
    def num_columns(self) -> int | None:
        """Entries of the whole tensor along the axis of `columns`; None: rows are single values."""
        return self._rest[self._across] if len(self._rest) > 1 else None

    @property
    def row_size(self) -> int:
        """Values that are read of one row."""
        sizes = list(self._rest)
        if self.columns is not None:
            sizes[self._across] = self.columns.stop - self.columns.start
        return math.prod(sizes[: self.axis] + sizes[self.axis + 1 :])

    @property
    def _rest(self) -> tuple[int, ...]:
        """The shape after `at` is applied."""
        return self.shape[len(self.at) :]

    @property
    def _across(self) -> int:
        """The axis of `columns`, after `at` is applied."""
        return 1 if self.axis == 0 else 0

    def read(self, tensor: Tensor, begin: int, end: int) -> npt.NDArray[Any]:
        """Read rows `begin` to `end` of the rule, [rows, ...]."""
        if self.order is None:
            return self._entries(tensor, self.begin + begin, self.begin + end)
        entries = np.asarray(self.order[begin:end])
        first = int(entries.min())
        found = self._entries(tensor, self.begin + first, self.begin + int(entries.max()) + 1)
        ordered: npt.NDArray[Any] = found[entries - first]
        return ordered

    def codes(self, tensor: CodedTensor, begin: int, end: int, form: CodeForm) -> Coded | None:
        """Read rows `begin` to `end` of the rule as codes for this form, if the tensor has them in rows."""
        if self.at or self.axis:
            return None
        if self.order is None:
            found = tensor.codes(slice(self.begin + begin, self.begin + end), form)
        else:
            entries = np.asarray(self.order[begin:end])
            first = int(entries.min())
            found = tensor.codes(slice(self.begin + first, self.begin + int(entries.max()) + 1), form)
            found = None if found is None else found.of_rows(entries - first)
        return found if found is None or self.columns is None else found.of_columns(self.columns)

    def _entries(self, tensor: Tensor, begin: int, end: int) -> npt.NDArray[Any]:
        """Return entries `begin` to `end` of the tensor along the axis, which comes first."""
        if not self.shape:
            return np.reshape(tensor[()], 1)[begin:end]
        stacked = tuple(slice(index, index + 1) for index in self.at)
        values = tensor[(*stacked, *self._index(slice(begin, end)))][(0,) * len(stacked)]
        return values if self.axis == 0 else np.moveaxis(values, self.axis, 0)

    def part(self, num_rows: int) -> ReadPart:
        """Tell where the first `num_rows` rows of the rule lie in the tensor."""
        if not self.shape:
            return ()
        rows: slice | npt.NDArray[np.intp] = slice(self.begin, self.begin + num_rows)
        if self.order is not None:
            rows = np.asarray(self.order[:num_rows], np.intp) + self.begin
        return (*self.at, *self._index(rows))

    def _index(self, rows: Any) -> tuple[Any, ...]:
        """Return the index of these rows, after `at` is applied."""
        index = {axis: slice(None) for axis in range(self.axis)} | {self.axis: rows}
        if self.columns is not None:
            index[self._across] = self.columns
        return tuple(index[axis] for axis in sorted(index))


Decode: TypeAlias = Callable[[Sequence[npt.NDArray[Any]]], npt.NDArray[Any] | Coded]
"""Makes rows of a parameter, in float32 or the rule's dtype or as codes, of the same rows of the tensors that
it is made of."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a checkpoint has a parameter: one source or, with `decode`, several that it is made of."""

    sources: tuple[Source, ...]
    decode: Decode | None = None
    kept: CodeForm | None = None
    """The bytes that can hold the codes that `decode` makes as they are; None: none can, or it makes none."""


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
        """Tell where rows `begin` to `end` of the rule, in whole blocks, lie in the leaf."""
        first, last = begin // self.rows_per_entry, -(-end // self.rows_per_entry)
        return (*self.at, *(slice(None),) * self.axis, slice(self.begin + first, self.begin + last))

    def from_row(self, row: int) -> Target:
        """Return the target of the rows from this one on."""
        return replace(self, begin=self.begin + row // self.rows_per_entry)


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
    """Copy the rows as they are."""
    parts[0][...] = rows[0]


def pack_rows(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Pack the rows into tiles for the native kernels."""
    native.pack_into(parts[0], np.ascontiguousarray(rows[0]))


def quantize_rows(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Write the rows in int8, and their scales as the second part."""
    values, parts[1][...] = native.quantize(rows[0])
    parts[0][...] = values


def quantize_and_pack_rows(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Write the rows as tiles of int8, and their scales as the second part."""
    values, parts[1][...] = native.quantize(rows[0])
    native.pack_into(parts[0], np.ascontiguousarray(values))


def pack_code_rows(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Write the rows as codes (`ops.codes`). `LoadRule.fill` packs those that are codes already."""
    quantised(rows[0], CodeForm.of(parts[0].shape[-1], rows[0].shape[1])).pack(parts[0])


def put_zeros(parts: Sequence[npt.NDArray[Any]], rows: Sequence[npt.NDArray[Any]]) -> None:
    """Write zeros, whatever the rows are."""
    for part in parts:
        part[...] = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows or columns that are cut into `pieces`, each of `size` rows or columns. Device i of n
    has piece i * pieces // n, so several devices have the same one if there are fewer.
    """

    pieces: int
    size: int

    @property
    def whole(self) -> int:
        """Rows or columns of all pieces."""
        return self.pieces * self.size

    def of(self, device: int, devices: int) -> int:
        """Return the first row or column of the device's piece."""
        return device * self.pieces // devices * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter is cut over the devices of a mesh (`cutting`)."""

    along: Literal["rows", "columns", "first", "sources"]
    """"rows": a device has some of the rows; "columns": it has some of each row's values. "first": the first
    device has all of it and the others have zeros, because the results of the devices are added up.
    "sources": each device has a parameter of its own, such as another expert's."""
    spans: tuple[Span, ...] = ()
    """What is cut along rows, one behind the other, each of which a device has a piece of; or the span along
    columns."""
    sources: tuple[tuple[Source, ...], ...] = ()
    """Those of each device, along sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRule:
    """`num_rows` rows of the sources become parts of the targets."""

    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    num_rows: int
    dtype: np.dtype[np.generic]
    """The dtype to which floats are converted before `put` gets them."""
    put: Put = copy_rows
    decode: Decode | None = None
    """Makes what `put` gets of the sources' rows; None: it gets them as they are."""
    kept: CodeForm | None = None
    """See `Stored.kept`."""
    may_keep: bool = False
    """Whether the module of the leaf can have codes instead, whatever other leaves have."""
    apart: ParamPath | None = None
    """A name for what it fills, where the module can have the codes of its parts in several leaves if they
    are of different kinds; None: they can only be in the one leaf."""
    cut: Cut | None = None
    """How it is cut over devices; None: each device has all of it. `num_rows` are those of one device, and
    the sources are those of the first piece."""
    columns: slice | None = None
    """Which of the values that are read of a row `put` gets; None: all."""

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
        """Return the parts of one leaf that the rule fills."""
        return [target.part(0, self.num_rows) for target in self.targets if target.path == path]

    def fill(self, leaves: Leaves, tensors: Mapping[str, Tensor], begin: int, end: int) -> list[str]:
        """Put rows `begin` to `end` of the tensors into host arrays of the leaves; these are whole units.

        Returns the tensors with values that the rule's dtype cannot hold, whose result is of no use.
        """
        if self.put is pack_code_rows:
            part = leaves[self.targets[0].path][self.targets[0].part(begin, end)]
            if (codes := self._codes(tensors, begin, end, part.shape[-1])) is not None:
                codes.pack(part)
                return []
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
        parts = [leaves[target.path][target.part(begin, end)] for target in self.targets]
        decoded = None if self.decode is None else self.decode(rows)
        if isinstance(decoded, Coded):
            if isinstance(decoded, FloatCodes) and not decoded.is_in_range:
                return [source.name for source in self.sources]
            if self.put is pack_code_rows and self._holds(parts[0], decoded):
                (decoded if self.columns is None else decoded.of_columns(self.columns)).pack(parts[0])
                return too_large
            decoded = decoded.dequantised()
        rows = rows if decoded is None else [decoded.astype(self.dtype, copy=False)]
        rows = rows if self.columns is None else [values[:, self.columns] for values in rows]
        self.put(parts, rows)
        return too_large

    def _holds(self, leaf: npt.NDArray[Any], decoded: Coded) -> bool:
        """Say whether a leaf of codes can hold these as they are. One of integers cannot hold small
        floats.
        """
        inputs = range(decoded.codes.shape[1])[slice(None) if self.columns is None else self.columns]
        needed = decoded.form()
        return needed is not None and CodeForm.of(leaf.shape[-1], len(inputs)).takes(needed)

    def kept_form(self, tensors: Mapping[str, Tensor]) -> CodeForm | None:
        """Return the bytes that can hold the codes that it reads as they are; None: none can, or it reads
        floats.
        """
        if self.decode is not None:
            return self.kept
        source, *others = self.sources
        tensor = tensors.get(source.name)
        if others or source.at or source.axis or not isinstance(tensor, CodedTensor):
            return None
        inputs = range(source.row_size)[slice(None) if self.columns is None else self.columns]
        return tensor.kept if tensor.kept is not None and tensor.kept.fits(OUTPUTS, len(inputs)) else None

    def _codes(self, tensors: Mapping[str, Tensor], begin: int, end: int, num_bytes: int) -> Coded | None:
        """Return rows of the one source as the codes that its tensor has, if they fit into a leaf with so
        many bytes for 16 outputs; else None.
        """
        source, *others = self.sources
        tensor = tensors[source.name]
        if others or not isinstance(tensor, CodedTensor):
            return None
        inputs = range(source.row_size)[slice(None) if self.columns is None else self.columns]
        codes = source.codes(tensor, begin, end, CodeForm.of(num_bytes, len(inputs)))
        return codes if codes is None or self.columns is None else codes.of_columns(self.columns)

    def on_device(self, device: int, devices: int) -> list[LoadRule]:
        """Return the rules for one device of a mesh. Leaves have an axis more, the first one, with an entry
        for each device.
        """
        targets = tuple(replace(target, at=(device, *target.at)) for target in self.targets)
        rule, cut = replace(self, targets=targets, cut=None), self.cut
        if cut is None:
            return [rule]
        if cut.along == "sources":
            return [replace(rule, sources=cut.sources[device])]
        if cut.along == "first":
            return [rule if device == 0 else replace(rule, put=put_zeros)]
        if cut.along == "columns":
            (span,) = cut.spans
            return [rule._of_columns(span, span.of(device, devices))]
        return list(rule._of_rows(cut.spans, device, devices))

    def _of_rows(self, spans: Sequence[Span], device: int, devices: int) -> Iterator[LoadRule]:
        """Yield the rule for a device's piece of each span."""
        begin = row = 0
        for span in spans:
            num_rows = min(span.size, self.num_rows)  # a rule may have some of a piece's rows
            first = begin + span.of(device, devices)
            yield replace(
                self,
                sources=tuple(source.piece(first, num_rows) for source in self.sources),
                targets=tuple(target.from_row(row) for target in self.targets),
                num_rows=num_rows,
            )
            begin, row = begin + span.whole, row + span.size

    def _of_columns(self, span: Span, first: int) -> LoadRule:
        """Return the rule for the columns from `first` on. Where sources have blocks of columns, such as
        those that share a scale, whole blocks are read.
        """
        end = first + span.size
        counts = [source.num_columns for source in self.sources]
        if any(count is None or span.whole % count for count in counts):
            return replace(self, columns=slice(first, end))
        block = max(span.whole // count for count in counts if count)
        begin, stop = first // block * block, -(-end // block) * block
        sources = tuple(
            replace(source, columns=slice(begin * count // span.whole, stop * count // span.whole))
            for source, count in zip(self.sources, counts, strict=True)
            if count
        )
        is_exact = (begin, stop) == (first, end)
        return replace(self, sources=sources, columns=None if is_exact else slice(first - begin, end - begin))


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
    """Everything that a model makes of a checkpoint. A checkpoint, and an update by tensors, may hold nothing
    else but what is harmless or a copy."""

    rules: tuple[LoadRule, ...]
    padding: tuple[Padding, ...] = ()
    harmless: tuple[str, ...] = ()
    """Regular expressions: tensors in whose names one of them is found are allowed, and not read."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor to the name of another one. The tensor may be absent; if it is there, it must hold the
    same bits as the other."""
    folders: tuple[str, ...] = ()
    """Folders of a checkpoint that have tensors in files of their own, whose names begin with the folder in
    the rules."""

    def on_devices(self, devices: int) -> LoadRules:
        """Return the rules for all devices of a mesh."""
        return replace(
            self,
            rules=tuple(
                own for rule in self.rules for i in range(devices) for own in rule.on_device(i, devices)
            ),
            padding=tuple(replace(padding, axis=padding.axis + 1) for padding in self.padding),
        )

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


RulesFor: TypeAlias = Callable[[Collection[str]], LoadRules]
"""The names of an update's tensors to the rules by which they are read."""
StoredAt: TypeAlias = Callable[[ParamPath, tuple[int, ...]], Stored]
"""(path, shape) of a parameter to where the checkpoint has it. The path is that of a state in which nothing
is fused or stacked."""


@runtime_checkable
class HasLoadRules(Protocol):
    """A module with parameters of its own."""

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """Yield the rules of the module at `path` of a model in `dtype`. Each comes with the path that its
        (first) tensor would have if nothing were fused; rules are sorted by these paths.
        """
        ...
