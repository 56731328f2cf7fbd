"""Writes the tensors of an adapter to where the computation reads them, see `ops.adapters`. What native
kernels read in bfloat16, which is nearly all of it, is packed by native code, and the rest by numpy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import AdapterFormatError
from penstock.runtime.loading.safetensors_files import TensorEntry
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.adapter_packing import BLOCK, CODES, IN_MEMORY, Packing, pack
from penstock.runtime.ops.native.linear import BLOCK_OUT
from penstock.runtime.requests.adapter import AdapterBlock, AdapterValues, integers_like, zeros

_NEARLY_FULL: Final = 0.75
"""An adapter that fills so much of its place is kept with the zeros of the rest. Then it costs the engine's
thread no time when it goes to the device."""
_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor, and the block of an adapter that it becomes on one device."""

    tensor: str
    device: int
    begin: int
    """Where the block's first row begins there."""
    width: int
    """How far its rows are from each other there."""
    is_b: bool
    is_packed: bool
    rank: int
    scaling: float
    """By what the numbers are multiplied."""
    taken: slice | NDArray[np.intp]
    """Which outputs of B, or which inputs of A."""
    expert: int = 0
    num_experts: int = 1
    """How many experts share the tensor. The rows of A are sorted by expert, and the columns of B by rank and
    then by expert."""

    @property
    def count(self) -> int:
        """How many outputs or inputs there are."""
        return self.taken.stop - self.taken.start if isinstance(self.taken, slice) else len(self.taken)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the block."""
        if not self.is_packed:
            return (self.rank, self.count) if self.is_b else (self.count, self.rank)
        if self.is_b:
            return self.count // BLOCK_OUT, BLOCK_OUT * (self.rank + self.rank % 2)
        return self.count // 2, 2 * self.rank


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of an adapter: arrays, or places in an open file."""

    file: int
    """The file's descriptor, or IN_MEMORY."""
    arrays: Mapping[str, NDArray[np.generic]]
    entries: Mapping[str, TensorEntry]

    @classmethod
    def in_file(cls, descriptor: int, entries: Mapping[str, TensorEntry]) -> Tensors:
        """Have those of a file. They are read, not mapped: a file that another program makes shorter would
        end this process.
        """
        return cls(descriptor, {}, entries)

    @classmethod
    def in_memory(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Tensors:
        """Have arrays. Copied are only those whose numbers do not lie one behind the other, or begin with
        their highest byte.
        """
        own = {
            name: np.ascontiguousarray(array, array.dtype.newbyteorder("=")) for name, array in arrays.items()
        }
        return cls(IN_MEMORY, own, {})

    def at(self, name: str) -> int:
        """Tell a tensor's address, or its place in the file."""
        if self.file == IN_MEMORY:
            address: int = self.arrays[name].__array_interface__["data"][0]
            return address
        return self.entries[name].offset

    def read(self, name: str) -> NDArray[np.generic]:
        """Return a tensor. AdapterFormatError if the file has become shorter."""
        if self.file == IN_MEMORY:
            return self.arrays[name]
        entry = self.entries[name]
        data = os.pread(self.file, entry.num_bytes, entry.offset)
        if len(data) != entry.num_bytes:
            raise _became_shorter(name)
        return np.frombuffer(data, entry.dtype).reshape(entry.shape)


@dataclass(frozen=True, slots=True)
class _Block:
    """Where a part's block lies in the memory of an adapter, in numbers."""

    part: Part
    at: int
    stride: int

    def within(self, memory: NDArray[Any]) -> NDArray[Any]:
        """Return the block."""
        rows, columns = self.part.shape
        end = self.at + rows * self.stride
        return memory[self.at : end].reshape(rows, self.stride)[:, :columns]


class Packer:
    """Packs adapters whose tensors have the same names, shapes and dtypes."""

    def __init__(
        self,
        parts: Sequence[Part],
        described: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        devices: int,
        size: int,
        dtype: np.dtype[Any],
    ) -> None:
        """Take `described`, the shapes and dtypes of the tensors. `devices`, `size` and `dtype` are those of
        `AdapterValues`.
        """
        self._devices, self._size, self._dtype = devices, size, dtype
        compact, blocks = 0, list[_Block]()
        for part in parts:
            rows, columns = part.shape
            blocks.append(_Block(part, compact, columns))
            compact += rows * columns + rows * columns % 2  # pairs begin at a number of pairs
        self._compact = compact
        self._is_placed = compact >= _NEARLY_FULL * devices * size
        if self._is_placed:
            blocks = [_Block(part, part.device * size + part.begin, part.width) for part in parts]
        self._blocks = blocks
        # An engine that uses the kernels has loaded them; for another one nothing is compiled here.
        is_native = dtype == _BFLOAT16 and library.loaded() is not None
        self._natively: list[_Block] = []
        self._by_numpy: dict[str, list[_Block]] = {}
        for block in blocks:
            if is_native and _can_pack(block.part):
                self._natively.append(block)
            else:
                self._by_numpy.setdefault(block.part.tensor, []).append(block)
        with np.errstate(over="ignore"):  # an infinite scaling makes numbers that are found
            before = ["", *(block.part.tensor for block in self._natively)]
            table = [
                _row(block, *described[block.part.tensor], is_first=block.part.tensor != last)
                for block, last in zip(self._natively, before, strict=False)
            ]
            self._table = np.array(table, BLOCK)

    def pack(self, tensors: Tensors) -> AdapterValues:
        """Pack all parts. AdapterFormatError names a tensor whose numbers are not finite, or not in the
        model's dtype; OSError for a file that cannot be read.
        """
        integers = integers_like(self._dtype)
        if not self._is_placed:
            memory = np.empty(self._compact, integers)
            self._write(memory, tensors)
            kept = tuple(
                AdapterBlock(part.device, part.begin, part.width, block.within(memory).view(self._dtype))
                for block in self._blocks
                for part in (block.part,)
            )
            return AdapterValues(self._devices, self._size, self._dtype, kept)
        placed = zeros((self._devices, self._size), integers)
        self._write(placed.reshape(-1), tensors)
        whole = placed.view(self._dtype)
        whole = whole if self._devices > 1 else whole[0]
        return AdapterValues(self._devices, self._size, self._dtype, placed=whole)

    def _write(self, memory: NDArray[Any], tensors: Tensors) -> None:
        if self._natively:
            self._write_natively(memory, tensors)
        for name, blocks in self._by_numpy.items():
            scaling = blocks[0].part.scaling
            values = _scaled(name, tensors.read(name), scaling, self._dtype).view(memory.dtype)
            for block in blocks:
                _write_one(block.part, values, block.within(memory))

    def _write_natively(self, memory: NDArray[Any], tensors: Tensors) -> None:
        table = self._table.copy()
        table["source"] = [tensors.at(block.part.tensor) for block in self._natively]
        table["target"] += memory.__array_interface__["data"][0]
        outcome, bad, error = pack(tensors.file, table)
        if outcome is Packing.PACKED:
            return
        if outcome is Packing.NO_MEMORY:
            raise MemoryError
        name = self._natively[bad].part.tensor
        if outcome is Packing.NOT_FINITE:
            raise _not_finite(name)
        if outcome is Packing.TOO_LARGE:
            raise _too_large(name, _BFLOAT16)
        raise OSError(error, os.strerror(error)) if error else _became_shorter(name)


def _can_pack(part: Part) -> bool:
    """Say whether native code can pack a part: it takes neighbours."""
    return part.is_packed and part.num_experts == 1 and isinstance(part.taken, slice)


def _row(block: _Block, shape: tuple[int, ...], dtype: np.dtype[Any], *, is_first: bool) -> tuple[float, ...]:
    """Return a row of BLOCK, with 0 for where the tensor begins, and a target that counts from where the
    adapter's memory begins. `is_first`: whether the block before is of another tensor.
    """
    part = block.part
    assert isinstance(part.taken, slice)
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    tensor = (0, num_bytes, CODES[dtype.newbyteorder("=")], shape[1])
    taken = (part.is_b, part.rank, part.taken.start, part.count)
    return (*tensor, *taken, block.at * _BFLOAT16.itemsize, block.stride, part.scaling, is_first)


def _write_one(part: Part, values: NDArray[Any], target: NDArray[Any]) -> None:
    """Write a part of a tensor, whose numbers are integers here."""
    own = _taken(part, values)
    if not part.is_packed:
        target[...] = own.T
    elif part.is_b:
        even = np.pad(own, ((0, 0), (0, 1))) if part.rank % 2 else own
        blocks = _pairs(even).reshape(-1, BLOCK_OUT, even.shape[1] // 2).transpose(0, 2, 1)
        target[...] = np.array(blocks, order="C").reshape(len(blocks), -1).view(values.dtype)
    else:
        target[...] = np.array(_pairs(own).T, order="C").view(values.dtype)


def _taken(part: Part, values: NDArray[Any]) -> NDArray[Any]:
    """Return the rows of B, or the columns of A, that a part has."""
    if part.is_b:
        taken: NDArray[Any] = values[part.taken, part.expert :: part.num_experts]
    else:
        taken = values.reshape(part.num_experts, part.rank, -1)[part.expert][:, part.taken]
    return taken


def _pairs(matrix: NDArray[Any]) -> NDArray[Any]:
    """Return integers that are pairs of neighbours in a row: numpy moves these faster than two numbers."""
    return np.ascontiguousarray(matrix).view(f"u{2 * matrix.dtype.itemsize}")


def _scaled(
    name: str, tensor: NDArray[np.generic], factor: float, dtype: np.dtype[Any]
) -> NDArray[np.generic]:
    """Return a tensor times a factor in the model's dtype. AdapterFormatError if that is not finite."""
    values = tensor
    if values.dtype != dtype or factor != 1.0:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
            values = (values.astype(np.float32) * np.float32(factor)).astype(dtype)
    if not _is_finite(values):
        raise _too_large(name, dtype) if _is_finite(tensor) else _not_finite(name)
    return values


def _is_finite(values: NDArray[np.generic]) -> bool:
    """Say whether no value is NaN or infinite."""
    if values.dtype != _BFLOAT16:
        return bool(np.isfinite(values).all())
    # ml_dtypes takes four times as long as numpy does for integers of this size.
    sizes = values.view(np.uint16) & np.uint16(0x7FFF)
    return not sizes.size or bool(sizes.max() < 0x7F80)


def _not_finite(name: str) -> AdapterFormatError:
    return AdapterFormatError("it has NaN or infinity", tensor=name)


def _too_large(name: str, dtype: np.dtype[Any]) -> AdapterFormatError:
    return AdapterFormatError(f"its numbers, times the scaling, are too large for {dtype}", tensor=name)


def _became_shorter(name: str) -> AdapterFormatError:
    return AdapterFormatError("the file became shorter while it was read", tensor=name)
