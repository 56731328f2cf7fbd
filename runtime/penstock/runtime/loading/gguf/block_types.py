"""The types of GGUF's tensors: blocks of values that share scales, and what the values are.

A block's values come as float32, rounded after each operation as ggml's reference does it: first the scale of
a group (a float16 by a small integer), then the value, then the minimum. Source of the layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from penstock.runtime.models.quantised import Coded, Codes, NestedCodes, OffsetCodes, PlaceCodes, nested_form
from penstock.runtime.ops.codes import INPUTS, TABLE, TABLE_FORM, CodeForm

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

_SUPER = 256
"""Values of a block of the types with a K, which have scales for groups of 16 or 32 of them."""
_NL = TABLE.astype(np.float32)
"""What the 4 bits of IQ4_NL and IQ4_XS mean."""
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice what the 4 bits of MXFP4 mean. There is no zero with a sign."""


class Nested(NamedTuple):
    """What blocks of the types with a K hold: value = (factor * scale) * code - (factor of minima *
    minimum)."""

    codes: npt.NDArray[np.int8]
    """[n, 256]: from 0 to 15 with 4 bits, else from -32 to 31."""
    scales: npt.NDArray[np.int8]
    """[n, groups]."""
    minima: npt.NDArray[np.int8]
    """[n, groups]."""
    factors: npt.NDArray[np.float16]
    """[n, 2]: of scales and of minima."""

    @property
    def values(self) -> Floats:
        """The values, [n, 256]."""
        factors = self.factors.astype(np.float32)
        scales, minima = factors[:, :1] * self.scales, factors[:, 1:] * self.minima
        return (_by_group(self.codes, scales) - minima[:, :, None]).reshape(-1, _SUPER)


class Places(NamedTuple):
    """What blocks of IQ4_XS hold: value = (factor * scale) * table[code]."""

    codes: Bytes
    """[n, 256]."""
    scales: npt.NDArray[np.int8]
    """[n, 8]."""
    factors: npt.NDArray[np.float16]
    """[n, 1]."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type: how many values a block has, in how many bytes, and how they are read.

    dtype: that of the values as they are read. decode: blocks [n, num_bytes] to values [n, values]; None:
    the bytes are the values. integers: blocks [n, num_bytes] to codes int8 [n, values] of `bits`, of which
    the float16 at the begin of a block is the scale; None: the type has other scales, or offsets. nested:
    blocks to integers of `bits` whose scales are integers, too; such a type has no `decode`. unsigned: blocks
    to codes uint8 [n, values] of `bits`, whose scale is the first float16 of a block, and what is added the
    second. places: blocks to places in the table, with scales int8 [n, groups] and a factor float16 [n, 1].
    """

    name: str
    values: int
    num_bytes: int
    dtype: np.dtype[Any]
    decode: Callable[[Bytes], Floats] | None = None
    integers: Callable[[Bytes], npt.NDArray[np.int8]] | None = None
    bits: int = 8
    nested: Callable[[Bytes], Nested] | None = None
    unsigned: Callable[[Bytes], Bytes] | None = None
    places: Callable[[Bytes], Places] | None = None

    @property
    def form(self) -> CodeForm | None:
        """The bytes that hold codes as they are stored; None: none can."""
        if self.nested is not None:
            return nested_form(self.bits)
        if self.unsigned is not None:
            return CodeForm(self.bits, minima=True)
        if self.places is not None:
            return TABLE_FORM
        return None if self.integers is None else CodeForm(self.bits)

    def codes(self, rows: Bytes) -> Coded | None:
        """Read the codes of rows of whole blocks; None if there are none, or scales that are no numbers."""
        blocks, num_rows = rows.reshape(rows.size // self.num_bytes, self.num_bytes), len(rows)
        if self.nested is not None:
            found = self.nested(blocks)
            return _of_rows(found, num_rows, self.bits) if np.isfinite(found.factors).all() else None
        if self.places is not None:
            codes, of_groups, factors = self.places(blocks)
            if not np.isfinite(factors).all():
                return None
            of_tiles = np.repeat(factors, self.values // INPUTS, axis=1).reshape(num_rows, -1)
            return PlaceCodes(codes.reshape(num_rows, -1), of_groups.reshape(num_rows, -1), of_tiles)
        if self.unsigned is not None:
            both = np.concatenate([_half(blocks, 0), _half(blocks, 2)], axis=1).reshape(num_rows, -1, 2)
            if not np.isfinite(both).all():
                return None
            scales, offsets = np.ascontiguousarray(both[:, :, 0]), np.ascontiguousarray(both[:, :, 1])
            unsigned = self.unsigned(blocks).reshape(num_rows, -1)
            return OffsetCodes(unsigned, self.bits, scales, offsets, group=self.values)
        if self.integers is None:
            return None
        scales = _half(blocks, 0).reshape(num_rows, -1)
        if not np.isfinite(scales).all():
            return None
        numbers = self.integers(blocks).reshape(num_rows, -1)
        return Codes(codes=numbers, bits=self.bits, scales=scales, zeros=None, group=self.values)

    def read(self, rows: Bytes) -> npt.NDArray[Any]:
        """Read the values of rows of whole blocks, uint8 [rows, n * num_bytes] -> [rows, n * values]."""
        with np.errstate(over="ignore", invalid="ignore"):  # scales may be anything; `LoadRule.fill` looks
            blocks = rows.reshape(rows.size // self.num_bytes, self.num_bytes)
            if self.nested is not None:
                values = self.nested(blocks).values
            elif self.decode is not None:
                values = self.decode(blocks)
            else:
                return rows.view(self.dtype)
            return values.reshape(len(rows), rows.shape[1] // self.num_bytes * self.values)


def _of_rows(found: Nested, num_rows: int, bits: int) -> NestedCodes:
    """Return the nested integers of whole rows, in the groups of their form."""
    group = nested_form(bits).group or _SUPER
    repeats = _SUPER // group // found.scales.shape[1]
    scales, minima = (np.repeat(each, repeats, axis=1) for each in (found.scales, found.minima))
    factors = np.repeat(found.factors, _SUPER // INPUTS, axis=0)
    return NestedCodes(
        codes=found.codes.reshape(num_rows, -1),
        bits=bits,
        scales=scales.reshape(num_rows, -1),
        minima=minima.reshape(num_rows, -1),
        factors=factors.reshape(num_rows, -1, 2),
    )


def _half(blocks: Bytes, at: int) -> Floats:
    """Read the float16 at a byte of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, size: int) -> Bytes:
    """Unpack [n, m] -> [n, 2 m]: of each `size` bytes the lower halves, and then the upper ones."""
    return _bits(packed, 4, size)


def _bits(packed: Bytes, width: int, size: int) -> Bytes:
    """Unpack [n, m] -> [n, m * 8 / width]: of each `size` bytes the lowest `width` bits, then the next, and
    so on.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, size) >> shifts & np.uint8((1 << width) - 1)
    return parts.reshape(len(packed), -1)


def _fifth(blocks: Bytes, at: int) -> Bytes:
    """Return the bits of 4 bytes as the fifth bits of 32 values, [n, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _by_group(values: npt.NDArray[Any], scales: Floats) -> Floats:
    """Multiply values [n, 256] by the scale of each group, [n, groups], into
    [n, groups, values of a group].
    """
    groups = scales.shape[1]
    return scales[:, :, None] * values.astype(np.float32).reshape(len(values), groups, -1)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).astype(np.float32) - 8)


def _integers_of_4_bits(blocks: Bytes) -> npt.NDArray[np.int8]:
    """Unpack those of Q4_0."""
    return _nibbles(blocks[:, 2:], 16).astype(np.int8) - np.int8(8)


def _integers_of_5_bits(blocks: Bytes) -> npt.NDArray[np.int8]:
    """Unpack those of Q5_0."""
    return (_nibbles(blocks[:, 6:], 16) | _fifth(blocks, 2)).astype(np.int8) - np.int8(16)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _unsigned_of_4_bits(blocks).astype(np.float32) + _half(blocks, 2)


def _unsigned_of_4_bits(blocks: Bytes) -> Bytes:
    """Unpack those of Q4_1."""
    return _nibbles(blocks[:, 4:], 16)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth(blocks, 2)
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _unsigned_of_5_bits(blocks).astype(np.float32) + _half(blocks, 2)


def _unsigned_of_5_bits(blocks: Bytes) -> Bytes:
    """Unpack those of Q5_1."""
    return _nibbles(blocks[:, 8:], 16) | _fifth(blocks, 4)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _factors(blocks: Bytes, of_scales: int, of_minima: int | None) -> npt.NDArray[np.float16]:
    """Read the two factors at these bytes; a type without minima has 0 for theirs."""
    first = np.ascontiguousarray(blocks[:, of_scales : of_scales + 2]).view(np.float16)
    if of_minima is None:
        return np.concatenate([first, np.zeros_like(first)], axis=1)
    second = np.ascontiguousarray(blocks[:, of_minima : of_minima + 2]).view(np.float16)
    return np.concatenate([first, second], axis=1)


def _q2_k(blocks: Bytes) -> Nested:
    codes, both = _bits(blocks[:, 16:80], 2, 32), blocks[:, :16]
    return Nested(_int8(codes), _int8(both & 15), _int8(both >> 4), _factors(blocks, 80, 82))


def _q3_k(blocks: Bytes) -> Nested:
    low, high = _nibbles(blocks[:, 96:104], 8), _bits(blocks[:, 104:108], 2, 4)
    codes = _bits(blocks[:, 32:96], 2, 32) | _bits(blocks[:, :32], 1, 32) << 2
    factors = _factors(blocks, 108, None)
    return _symmetric(_int8(codes) - np.int8(4), _int8(low | high << 4) - np.int8(32), factors)


def _scales_and_minima(blocks: Bytes) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Unpack those of the 8 groups of Q4_K and Q5_K, [n, 8] each."""
    one, other, rest = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([one & 63, rest & 15 | one >> 6 << 4], axis=1)
    minima = np.concatenate([other & 63, rest >> 4 | other >> 6 << 4], axis=1)
    return _int8(scales), _int8(minima)


def _q4_k(blocks: Bytes) -> Nested:
    scales, minima = _scales_and_minima(blocks)
    return Nested(_int8(_nibbles(blocks[:, 16:], 32)), scales, minima, _factors(blocks, 0, 2))


def _q5_k(blocks: Bytes) -> Nested:
    scales, minima = _scales_and_minima(blocks)
    codes = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 1, 32) << 4
    return Nested(_int8(codes), scales, minima, _factors(blocks, 0, 2))


def _q6_k(blocks: Bytes) -> Nested:
    codes = _nibbles(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].view(np.int8)
    return _symmetric(_int8(codes) - np.int8(32), scales, _factors(blocks, 208, None))


def _int8(values: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Return values below 128 as int8."""
    return values.astype(np.int8)


def _symmetric(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.int8], factors: npt.NDArray[np.float16]
) -> Nested:
    """Return the integers of a type without minima."""
    return Nested(codes, scales, np.zeros_like(scales), factors)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _NL[_nibbles(blocks[:, 2:], 16)]


def _iq4_xs(blocks: Bytes) -> Floats:
    found = _places(blocks)
    scales = found.factors.astype(np.float32) * found.scales
    return _by_group(_NL[found.codes], scales).reshape(-1, _SUPER)


def _places(blocks: Bytes) -> Places:
    """Unpack those of IQ4_XS."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scales = _int8(low | high << 4) - np.int8(32)
    return Places(_nibbles(blocks[:, 8:], 16), scales, np.ascontiguousarray(blocks[:, :2]).view(np.float16))


def _mxfp4(blocks: Bytes) -> Floats:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scales * _E2M1[_nibbles(blocks[:, 1:], 16)]


_FLOAT32 = np.dtype(np.float32)
BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4, _FLOAT32),
    1: BlockType("F16", 1, 2, np.dtype(np.float16)),
    2: BlockType("Q4_0", 32, 18, _FLOAT32, _q4_0, _integers_of_4_bits, bits=4),
    3: BlockType("Q4_1", 32, 20, _FLOAT32, _q4_1, bits=4, unsigned=_unsigned_of_4_bits),
    6: BlockType("Q5_0", 32, 22, _FLOAT32, _q5_0, _integers_of_5_bits),
    7: BlockType("Q5_1", 32, 24, _FLOAT32, _q5_1, unsigned=_unsigned_of_5_bits),
    8: BlockType("Q8_0", 32, 34, _FLOAT32, _q8_0, lambda blocks: blocks[:, 2:].view(np.int8)),
    10: BlockType("Q2_K", _SUPER, 84, _FLOAT32, bits=6, nested=_q2_k),
    11: BlockType("Q3_K", _SUPER, 110, _FLOAT32, bits=6, nested=_q3_k),
    12: BlockType("Q4_K", _SUPER, 144, _FLOAT32, bits=4, nested=_q4_k),
    13: BlockType("Q5_K", _SUPER, 176, _FLOAT32, bits=6, nested=_q5_k),
    14: BlockType("Q6_K", _SUPER, 210, _FLOAT32, bits=6, nested=_q6_k),
    20: BlockType(
        "IQ4_NL", 32, 18, _FLOAT32, _iq4_nl, lambda blocks: _NL.astype(np.int8)[_nibbles(blocks[:, 2:], 16)]
    ),
    23: BlockType("IQ4_XS", _SUPER, 136, _FLOAT32, _iq4_xs, bits=4, places=_places),
    30: BlockType("BF16", 1, 2, np.dtype(jnp.bfloat16)),
    39: BlockType("MXFP4", 32, 17, _FLOAT32, _mxfp4),
}
"""The number that a file has for a type to the type."""
NOT_READ: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
"""The names of types that are known and not read."""
