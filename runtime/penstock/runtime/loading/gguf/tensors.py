"""The tensors of a GGUF file as a safetensors file of the same model would have them.

llama.cpp stores some weights otherwise than transformers: other names, rows in another order, norms with one
added to them, experts of a layer in one tensor. Here each becomes a `Tensor` of the load rules, whose values
are read, and turned back, a few rows at a time.

A weight whose type has integers with one scale a block, or with scales that are integers, or places in a
table, can stay so on its way to the device: `Stored.codes` reads the same rows as codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.runtime.loading.gguf.block_types import Bytes
from penstock.runtime.loading.gguf.file import TensorInfo
from penstock.runtime.models.quantised import Coded
from penstock.runtime.ops.codes import CodeForm

Made: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor, or one matrix of a stack of them."""

    info: TensorInfo
    shape: tuple[int, ...]
    first_row: int = 0
    """Where it begins, in rows of the stored tensor."""
    order: npt.NDArray[np.intp] | None = None
    """Row r, or number r of a vector, is stored as number order[r]; None: in the same order."""
    columns: npt.NDArray[np.intp] | None = None
    """The same for the values of each row."""
    undo: Callable[[Made], Made] | None = None
    """Undoes what was computed of the values, in float32, when they were stored."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values as they are read."""
        return np.dtype(np.float32) if self.undo else self.info.type.dtype

    def __getitem__(self, part: slice | tuple[slice, ...]) -> npt.NDArray[Any]:
        """Read consecutive rows, or matrices of a stack."""
        if isinstance(part, tuple):
            rows, *others = part
            found: npt.NDArray[Any] = self[rows][(slice(None), *others)]
            return found
        begin, end, step = part.indices(self.shape[0])
        if step != 1:
            raise ValueError("rows are read one after the other")
        values: Made
        if len(self.shape) == 1:
            vector = self.info.type.read(self.info.blocks(self.first_row, self.first_row + 1))[0]
            values = (vector if self.order is None else vector[self.order])[begin:end]
        else:
            each = math.prod(self.shape[1:-1])
            read = self.info.type.read(self.blocks(begin * each, end * each))
            read = read if self.columns is None else read[:, self.columns]
            values = read.reshape(max(0, end - begin), *self.shape[1:])
        return self.undo(values.astype(np.float32)) if self.undo else values

    @property
    def kept(self) -> CodeForm | None:
        """The bytes that can hold its codes as they are (`CodedTensor`)."""
        is_plain = len(self.shape) == 2 and self.columns is None and self.undo is None
        return self.info.type.form if is_plain else None

    def codes(self, rows: slice, form: CodeForm) -> Coded | None:
        """Return consecutive rows as codes that bytes of this form hold as they are (`CodedTensor`)."""
        if self.kept is None or not form.takes(self.kept):
            return None
        begin, end, _ = rows.indices(self.shape[0])
        return self.info.type.codes(self.blocks(begin, end))

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows as they are stored, uint8 [rows, bytes of a row], but in order."""
        if self.order is None:
            return self.info.blocks(self.first_row + begin, self.first_row + end)
        entries = self.order[begin:end]
        if not len(entries):
            return self.info.blocks(0, 0)
        first = int(entries.min())
        found = self.info.blocks(self.first_row + first, self.first_row + int(entries.max()) + 1)
        return found[entries - first]


def whole(info: TensorInfo) -> Stored:
    """Return the tensor as it is."""
    return Stored(info, info.shape)


def less_one(info: TensorInfo) -> Stored:
    """Return a norm that was stored with one added to it."""
    return Stored(info, info.shape, undo=lambda values: values - np.float32(1))


def log_of_negated(info: TensorInfo) -> Stored:
    """Return a logarithm that was stored as minus its exponential."""
    return Stored(info, info.shape, undo=lambda values: np.log(-values))


def turned_back(info: TensorInfo, num_heads: int) -> Stored:
    """Return rows (or biases) of queries or keys of which the two channels of a rotated pair are stored side
    by side; transformers has the first ones of all pairs of a head before the second ones.
    """
    rows = info.shape[0]
    order = np.arange(rows, dtype=np.intp)
    if rows % (2 * num_heads) == 0:  # else the load rules refuse the shape
        order = order.reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return Stored(info, info.shape, order=order)


def grouped(tensor: Stored, groups: int, in_group: int, size: int, *, from_row: int = 0) -> Stored:
    """Return rows of heads that are stored with the first head of every group first, then the second ones,
    and so on; transformers has the heads of a group side by side. size: how many rows a head has. from_row:
    where such rows begin.
    """
    rows = tensor.shape[0]
    if rows != from_row + groups * in_group * size:  # the load rules refuse the shape
        return tensor
    return replace(tensor, order=np.r_[0:from_row, from_row + _by_group(groups, in_group, size)])


def grouped_columns(tensor: Stored, groups: int, in_group: int, size: int) -> Stored:
    """Return the same for what each row multiplies."""
    if tensor.shape[-1] != groups * in_group * size:
        return tensor
    return replace(tensor, columns=_by_group(groups, in_group, size))


def _by_group(groups: int, in_group: int, size: int) -> npt.NDArray[np.intp]:
    """Say for each row of heads by group where it is stored."""
    stored = np.arange(groups * in_group * size, dtype=np.intp).reshape(in_group, groups, size)
    return stored.swapaxes(0, 1).reshape(-1)


def with_middle_axis(tensor: Stored) -> Stored:
    """Return [N, K] as [N, 1, K]."""
    return replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))


def as_row(info: TensorInfo) -> Stored:
    """Return a vector as a matrix of one row."""
    return Stored(info, (1, *info.shape))


def experts_apart(info: TensorInfo) -> list[Stored]:
    """Return the matrices, or the vectors, of a stack."""
    each = math.prod(info.shape[1:-1])
    return [Stored(info, info.shape[1:], first_row=expert * each) for expert in range(info.shape[0])]


class Pieces:
    """A tensor that a function makes piece by piece: of each expert, or of each head."""

    def __init__(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, make: Callable[[int], Made], entries: int = 1
    ) -> None:
        """make: from a piece's number to the piece. entries: how many of the first axis it has."""
        self.shape, self.dtype, self._entries = shape, np.dtype(dtype), entries
        # The rules read a few rows of a piece, and then its next ones. Threads read neighbouring pieces.
        self._make = functools.lru_cache(maxsize=4)(make)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> Made:
        """Make these consecutive entries."""
        if isinstance(part, tuple):
            rows, *others = part
            found: npt.NDArray[Any] = self[rows][(slice(None), *others)]
            return found
        begin, end, step = part.indices(self.shape[0])
        if step != 1:
            raise ValueError("rows are read one after the other")
        if begin >= end:
            return np.empty((0, *self.shape[1:]), self.dtype)
        first = begin // self._entries
        made = [self._make(piece) for piece in range(first, -(-end // self._entries))]
        joined = made[0] if len(made) == 1 else np.concatenate(made)
        return joined[begin - first * self._entries : end - first * self._entries]


def keys_and_values(keys: Stored, values: Stored) -> Pieces:
    """Return DeepSeek's kv_b_proj [heads * (K + V), latent], of keys [heads, latent, K] and values
    [heads, V, latent].
    """
    heads, latent, _ = keys.shape
    entries = keys.shape[2] + values.shape[1]

    def make(head: int) -> Made:
        return np.concatenate([keys[head : head + 1][0].T, values[head : head + 1][0]])

    return Pieces((heads * entries, latent), keys.dtype, make, entries)


def transposed(parts: Sequence[Stored]) -> Pieces:
    """Join matrices [E, N, K] each to one [E, K, N * parts], in which the columns of the parts alternate."""
    count, rows, columns = parts[0].shape

    def make(expert: int) -> Made:
        made = np.empty((columns, rows, len(parts)), parts[0].dtype)
        for i, part in enumerate(parts):
            made[:, :, i] = part[expert : expert + 1][0].T
        return made.reshape(1, columns, -1)

    return Pieces((count, columns, rows * len(parts)), parts[0].dtype, make)


def biases(parts: Sequence[Stored]) -> Pieces:
    """Join vectors [E, N] each to one [E, N * parts], in which the entries of the parts alternate."""
    count, rows = parts[0].shape

    def make(expert: int) -> Made:
        return np.stack([part[expert : expert + 1][0] for part in parts], axis=1).reshape(1, -1)

    return Pieces((count, rows * len(parts)), parts[0].dtype, make)


def mxfp4(parts: Sequence[Stored]) -> tuple[Pieces, Pieces]:
    """Join matrices [E, N, K] each in MXFP4 to the codes [E, N * parts, K / 32, 16] and scales
    [E, N * parts, K / 32] of gpt-oss's safetensors, in which the rows of the parts alternate. A byte of
    theirs has values 2 j and 2 j + 1 of a block, and one of llama.cpp's has j and j + 16.
    """
    count, rows, columns = parts[0].shape
    blocks = columns // 32

    def stored(expert: int) -> Bytes:
        found = [part.blocks(expert * rows, (expert + 1) * rows) for part in parts]
        return np.stack(found, axis=1).reshape(1, rows * len(parts), blocks, 17)

    def codes(expert: int) -> Made:
        packed = stored(expert)[..., 1:]
        low, high = packed & 15, packed >> 4
        return np.concatenate([each[..., 0::2] | each[..., 1::2] << 4 for each in (low, high)], axis=-1)

    def scales(expert: int) -> Made:
        return np.ascontiguousarray(stored(expert)[..., 0])

    shape = (count, rows * len(parts), blocks)
    return Pieces((*shape, 16), np.uint8, codes), Pieces(shape, np.uint8, scales)
