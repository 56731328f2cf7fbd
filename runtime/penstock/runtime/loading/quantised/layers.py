"""The tensors of one quantised layer, and the weight that they make as a tensor of floats.

Everything here comes from strangers. So each tensor's dtype and shape are checked before any value is read,
and what is wrong is a ConfigError that names file and tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.quantised.forms import Rows
from penstock.runtime.loading.safetensors_files import TensorEntry
from penstock.runtime.models.quantised import Coded, Codes, FloatCodes, OffsetCodes
from penstock.runtime.ops.codes import GROUP, CodeForm

FLOATS = ("F32", "BF16", "F16")
"""The dtypes that scales have, but for those of FP4."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of a quantised layer, by what their names have behind the layer's."""

    name: str
    tensors: Mapping[str, TensorEntry]
    told: str = ""
    """What a file says of its weight beside the tensors."""

    def __contains__(self, ending: str) -> bool:
        """Say whether the files have this tensor."""
        return ending in self.tensors

    def entry(self, ending: str, *dtypes: str, shape: tuple[int, ...] | None = None) -> TensorEntry:
        """Give a tensor that has one of the dtypes, and the shape if one is given, or else two axes. Raises
        ConfigError.
        """
        if ending not in self.tensors:
            first = min(self.tensors)
            raise ConfigError(
                f"{self.tensors[first].file}: {self.name} is quantised, with {first}, but has no {ending}"
            )
        entry = self.tensors[ending]
        if name_of(entry.dtype) not in dtypes:
            raise self.problem(ending, f"has dtype {name_of(entry.dtype)}, expected {' or '.join(dtypes)}")
        if shape is None and (len(entry.shape) != 2 or 0 in entry.shape):
            raise self.problem(ending, f"has shape {list(entry.shape)}, which is no matrix")
        if shape is not None and entry.shape != shape:
            raise self.problem(ending, f"has shape {list(entry.shape)}, expected {list(shape)}")
        return entry

    def problem(self, ending: str, what: str) -> ConfigError:
        """Make the error that says what is wrong with a tensor."""
        return ConfigError(f"{self.tensors[ending].file}: tensor {self.name}.{ending} {what}")

    def groups(self, ending: str, inputs: int, group: int | None) -> int:
        """Give the size of a group, of all inputs for None. Raises ConfigError if it does not divide them."""
        if group is None:
            return inputs
        if inputs % group:
            raise self.problem(ending, f"has {inputs} inputs, which groups of {group} do not divide")
        return group

    def finite(self, ending: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Give values of a tensor in float32. Raises ConfigError if one is infinite or no number."""
        floats = np.ascontiguousarray(values.astype(np.float32))
        if not np.isfinite(floats).all():
            raise self.problem(ending, "has values that are infinite or no numbers")
        return floats


Read: TypeAlias = Callable[[int, int], Rows]
"""(begin, end) of the outputs -> these rows of a weight."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A layer's weight, which reads as a tensor of float32 [out, in] of the values that it stands for."""

    layer: Layer
    shape: tuple[int, int]
    form: str
    """What it is, for people."""
    read: Read
    """Its rows as they are in the files."""
    kept: CodeForm | None = None
    """The bytes that can hold its codes as they are; None: none can."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the values."""
        return np.dtype(np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the files, with scales and all else."""
        return sum(entry.num_bytes for entry in self.layer.tensors.values())

    def codes(self, rows: slice, form: CodeForm) -> Coded | None:
        """Return consecutive rows as codes that bytes of this form hold as they are (`CodedTensor`)."""
        if self.kept is None or not form.takes(self.kept):
            return None
        begin, end, _ = rows.indices(self.shape[0])
        found = self.read(begin, end)
        if isinstance(found, Codes | OffsetCodes):
            return found.in_groups_of(GROUP)
        if isinstance(found, FloatCodes):
            return found if form.group is None else found.in_groups_of(form.group)
        return None

    def __getitem__(self, part: slice | tuple[slice, ...]) -> npt.NDArray[Any]:
        """Read the values of consecutive rows."""
        if isinstance(part, tuple):
            rows, *others = part
            found: npt.NDArray[Any] = self[rows][(slice(None), *others)]
            return found
        begin, end, step = part.indices(self.shape[0])
        if step != 1:
            raise ValueError("rows are read one after the other")
        if end <= begin:
            return np.zeros((0, self.shape[1]), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.read(begin, end).dequantised()
        if not np.isfinite(values).all():
            first = min(self.layer.tensors)
            raise self.layer.problem(first, "and its scales make values that are infinite or no numbers")
        return values


def kept_as(
    bits: int,
    group: int,
    *of_groups: TensorEntry,
    zeros: bool = False,
    minima: bool = False,
    ordered: bool = False,
) -> CodeForm | None:
    """Return the bytes that hold a weight's codes as they are. None if none can, because a scale belongs to a
    part of a group of theirs, or the inputs of a group lie apart, or `of_groups`, which are the scales and
    the minima, have more bits than theirs.
    """
    if ordered or group % GROUP or any(entry.dtype.itemsize > 2 for entry in of_groups):
        return None
    return CodeForm(bits, zeros, minima=minima)


def unpacked(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Return the codes of 4 or 8 bits that words of 32 bits hold, the first in the low bits: [..., n] ->
    [..., n * 32 / bits].
    """
    as_bytes = np.ascontiguousarray(words).view(np.uint8)
    return as_bytes if bits == 8 else nibbles(as_bytes)


def nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the codes of 4 bits, the first in the low half of a byte: [..., n] -> [..., 2 * n]."""
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*packed.shape[:-1], -1)


def columns(entry: TensorEntry, begin: int, end: int) -> npt.NDArray[Any]:
    """Return columns of a matrix, as rows: [end - begin, rows of the matrix]."""
    found: npt.NDArray[Any] = np.ascontiguousarray(entry.map()[:, begin:end].T)
    return found


def entries_of(entry: TensorEntry) -> npt.NDArray[Any]:
    """Return all of a small tensor, with one axis."""
    return np.asarray(entry.map()).reshape(-1)


def order_of(layer: Layer, ending: str, inputs: int, group: int) -> npt.NDArray[np.intp] | None:
    """Find the order in which the inputs make up groups, of a tensor with the group of each; None if they do
    so one after the other. Raises ConfigError unless each group has `group` inputs.
    """
    of_input = entries_of(layer.entry(ending, "I32", "I64", shape=(inputs,))).astype(np.int64)
    count = inputs // group
    if of_input.min() < 0 or of_input.max() >= count:
        raise layer.problem(ending, f"names groups from {of_input.min()} to {of_input.max()} of {count}")
    if (np.bincount(of_input, minlength=count) != group).any():
        raise layer.problem(ending, f"does not give {group} inputs to each of {count} groups")
    order = np.argsort(of_input, kind="stable").astype(np.intp)
    return None if np.array_equal(order, np.arange(inputs)) else order


def check_lost(layer: Layer, ending: str, codes: Codes) -> Codes:
    """Give the codes. Raises ConfigError if a scale of 0 makes nothing of codes that are not zero."""
    lost = codes.scales == 0
    if lost.any():
        of_group = codes.codes.reshape(len(codes.codes), -1, codes.group)[lost].astype(np.float32)
        zeros = 0.0 if codes.zeros is None else codes.zeros[lost][:, None]
        if (of_group != zeros).any():
            raise layer.problem(ending, "has a scale of 0 where weights are not 0")
    return codes


def share(entry: TensorEntry, rows: slice) -> npt.NDArray[Any]:
    """Return rows of a tensor of scales [out, groups], or the one value that it has for all of them as
    [rows, 1].
    """
    if math.prod(entry.shape) == 1:
        return np.broadcast_to(entries_of(entry), (rows.stop - rows.start, 1))
    found = entry[rows]
    return found.reshape(len(found), -1)
