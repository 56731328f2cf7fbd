"""Weights of 4 or 8 bits with scales: how they lie in memory, and XLA's product.

A weight [out, in] is a leaf uint8 [out / 16, bytes], an entry of which has 16 outputs. Codes are integers,
integers whose scales are integers too, places in a table, or small floats.

**Integers**, with a scale for each 32 inputs. There is a tile for each 64 inputs, and behind them 16 factors
in float32. A tile is, in lines of 64 bytes:

- the scales of its two groups of 32 inputs, float16 [2, 16 outputs];
- their zeros or their minima in the same form, if the weight has any;
- the codes, unsigned. With 4 bits a line has 8 inputs: byte 4 o + i holds input i of output o in its low half
  and input 4 + i in its high half. With 8 bits it has 4 inputs: byte 4 o + i is input i of output o.

value = factor * scale * (code - zero), where a weight without zeros has half of the codes' range; with minima
it is factor * (scale * code - minimum). Behind the factors of a weight with minima is a line of zeros, so
that its size is not that of a weight with zeros. Factors are powers of two, so that the scales of an output
use the range of float16. A scale in float16 or bfloat16 of at least 2^-14 of the output's largest is kept
exactly, and a smaller one to a multiple of 2^-24 of the factor, which is no larger than that largest scale.
Scales in float16 that are all below 2 are exact. The same holds for scales and minima together. A coarser
group of a checkpoint repeats its scale.
The native kernels (`native.linear`) read these bytes line by line, and quantise each row's groups of 32
activations to int8.

**Nested integers**, as GGUF's types with a K have them: value = (factor * scale) * code - (factor of minima *
minimum), where scales and minima are integers of 8 bits, and factors are float16. A group of 32 inputs shares
a scale and a minimum with codes of 4 bits, from 0 to 15, and one of 16 with codes of 6 bits, from -32 to 31.
A tile for each 64 inputs is, in lines of 64 bytes:

- the factors of scales and those of minima, float16 [2, 16 outputs];
- the scales [groups, 16 outputs], and the minima in the same form: with two groups they share a line, with
  four they have one each;
- with 4 bits the codes as above. With 6 bits each group has two such lines with the lower 4 bits of code +
  32, and a line with the upper ones: byte 4 o + i has those of inputs i, 4 + i, 8 + i and 12 + i of output o,
  the first in its lowest bits.

The kernels treat them as other integers.

**Places in a table**, as GGUF's IQ4_XS has them: value = (factor * scale) * table[code], with codes of 4
bits, scales that are integers of 8 bits for each 32 inputs, and factors in float16. The table is `TABLE`. A
tile for each 64 inputs is a line with the factors, float16 [16 outputs], and the scales, [2 groups, 16
outputs]; and then the codes as those of integers.

**Small floats**, value = scale * float. The kernels make bfloat16 of some at a time, in a cache, and multiply
that; so results are those of the weight in bfloat16, bit for bit.

- E2M1, of 4 bits, with a scale for each 32 inputs (MXFP4): a tile for each 64 inputs has the scales, uint8
  [2, 16 outputs], of which b means 2^(b - 127), and then 8 lines of codes. A line has 8 inputs: byte
  16 q + 8 h + t has in its low half input 2 h + t % 2 of output 4 q + t / 2, and in its high half input
  4 + 2 h + t % 2.
- E4M3, of 8 bits, with a scale for each 128 inputs or one for all: for each pair of inputs 32 bytes, of which
  byte 2 o + i is input i of output o, and behind all inputs that share a scale 16 scales in float32.

XLA's product makes floats of the whole weight, and keeps activations as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.ops.products import matmul_transposed

GROUP = 32
"""Inputs that share a scale of integers and of E2M1."""
OUTPUTS, INPUTS = 16, 64
"""What a tile has."""
_LINE = 64
_QUANTISED_AT_ONCE = 1 << 16
"""How many weights are quantised at once, so that intermediate values stay in the second-level cache."""
_SHRINKS = (1.0, 0.95, 0.9, 0.84, 0.77)
"""The parts of the scale of the largest value that are tried: smaller ones cut off the largest values, and
round the others less."""


@dataclass(frozen=True, slots=True)
class CodeForm:
    """What the bytes of a weight hold."""

    bits: int
    """Of a code: 4 or 8, or 4 or 6 of nested integers."""
    zeros: bool = False
    """Whether each group has a zero of its own."""
    floats: bool = False
    """Whether codes are small floats, E2M1 or E4M3, and not integers."""
    nested: bool = False
    """Whether codes are integers whose scales are integers, too."""
    minima: bool = False
    """Whether each group of integers has a minimum of its own, which is taken off behind the scale."""
    table: bool = False
    """Whether codes are places in `TABLE`, whose scales are integers."""
    group: int | None = GROUP
    """How many inputs share a scale; None: all of them."""

    @property
    def middle(self) -> int:
        """The zero of integers without zeros."""
        return 1 << (self.bits - 1)

    @property
    def tile_bytes(self) -> int:
        """Bytes of 64 inputs of 16 outputs, with their part of what stands behind each 128 inputs."""
        codes = 2 * self.bits * _LINE
        if not self.floats:
            return codes + _LINE * self.scale_lines
        if self.bits == 4:
            return codes + _LINE // 2
        return codes if self.group is None else codes + _LINE * INPUTS // self.group

    @property
    def scale_lines(self) -> int:
        """Lines of a tile of integers before its codes."""
        return self.bits // 2 if self.nested else 1 + self.zeros + self.minima

    @property
    def end_bytes(self) -> int:
        """Bytes behind all inputs."""
        if self.nested or self.table:
            return 0
        if self.floats:
            return _LINE if self.group is None else 0
        return _LINE * (1 + self.minima)

    def shape(self, out_size: int, in_size: int) -> tuple[int, int]:
        """Return the shape of the leaf of a weight [out_size, in_size] that `fits`."""
        return out_size // OUTPUTS, in_size // INPUTS * self.tile_bytes + self.end_bytes

    def fits(self, out_size: int, in_size: int) -> bool:
        """Say whether the bytes can hold a weight [out_size, in_size]."""
        # With one tile nested integers of 4 bits would have the size of others with zeros.
        inputs = 2 * INPUTS if self.nested else max(INPUTS, self.group or 0)
        return out_size % OUTPUTS == 0 and in_size % inputs == 0

    def takes(self, other: CodeForm) -> bool:
        """Say whether these bytes can hold all that bytes of the other form can."""
        if self.floats or other.floats:
            is_coarser = other.group in (self.group, None)
            return self.floats == other.floats and self.bits == other.bits and is_coarser
        is_alike = (self.nested, self.minima, self.table) == (other.nested, other.minima, other.table)
        return is_alike and self.bits >= other.bits and self.zeros >= other.zeros

    @classmethod
    def of(cls, num_bytes: int, in_size: int) -> CodeForm:
        """Find the form of a weight with `in_size` inputs whose 16 outputs take so many bytes.

        Raises ValueError if there is none.
        """
        for form in (*INTEGER_FORMS, *FLOAT_FORMS):
            if form.fits(OUTPUTS, in_size) and form.shape(OUTPUTS, in_size)[1] == num_bytes:
                return form
        raise ValueError(f"no form has {num_bytes} bytes for {in_size} inputs of {OUTPUTS} outputs")


FORMS = tuple(CodeForm(bits, zeros) for bits in (4, 8) for zeros in (False, True))
"""Those of integers with one factor for all inputs."""
NESTED_FORMS = (CodeForm(4, nested=True), CodeForm(6, nested=True, group=16))
MINIMA_FORMS = (CodeForm(4, minima=True), CodeForm(8, minima=True))
TABLE_FORM = CodeForm(4, table=True)
INTEGER_FORMS = (*FORMS, *NESTED_FORMS, *MINIMA_FORMS, TABLE_FORM)
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""What codes that are places in a table stand for: the values of GGUF's IQ4_NL and IQ4_XS."""
MOST_NESTED = 127
"""The largest scale and the largest minimum of nested integers."""
_MIDDLE_OF_6_BITS = 32
E2M1 = CodeForm(4, floats=True)
E4M3 = CodeForm(8, floats=True, group=None)
E4M3_BY_GROUP = CodeForm(8, floats=True, group=128)
FLOAT_FORMS = (E2M1, E4M3_BY_GROUP, E4M3)
MOST_POWER, _LEAST_POWER = np.float32(2.0**125), np.float32(2.0**-125)
"""The scales with which all values of E2M1 are normal numbers."""
MOST_E4M3_SCALE = np.float32(2.0**119)
"""Times the largest float of E4M3 it is a finite bfloat16."""
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each code of E2M1."""
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The value of each byte of E4M3; two are no numbers, and none is infinite."""


def union(forms: Iterable[CodeForm]) -> CodeForm | None:
    """Find the smallest form that takes all of these; None: there is none."""
    found = tuple(forms)
    takers = (
        form for form in (*INTEGER_FORMS, E2M1, E4M3, E4M3_BY_GROUP) if all(form.takes(one) for one in found)
    )
    return next(takers, None)


def pack_codes(
    leaf: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.float32] | None,
) -> None:
    """Write unsigned integers [N, K], and scales and zeros [N, K / 32], to the leaf of a weight [N, K], whose
    shape says the form. A form without zeros takes None.
    """
    num_out, num_in = codes.shape
    form = CodeForm.of(leaf.shape[1], num_in)
    blocks, tiles = num_out // OUTPUTS, num_in // INPUTS
    factors = factors_of(scales)
    lines = leaf[:, :-_LINE].reshape(blocks, tiles, -1, _LINE)
    _put_halves(lines[:, :, 0], scales / factors[:, None])
    if zeros is not None:
        _put_halves(lines[:, :, 1], zeros)
    lines[:, :, form.scale_lines :] = _lines_of_words(
        codes if form.bits == 8 else _halves_of_bytes(codes), tiles
    )
    leaf[:, -_LINE:] = factors.reshape(blocks, OUTPUTS).view(np.uint8)


def pack_with_minima(
    leaf: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    minima: NDArray[np.float32],
) -> None:
    """Write unsigned integers [N, K], and scales and minima [N, K / 32], to the leaf of a weight [N, K],
    whose shape says the form.
    """
    num_out, num_in = codes.shape
    form = CodeForm.of(leaf.shape[1], num_in)
    blocks, tiles = num_out // OUTPUTS, num_in // INPUTS
    factors = factors_of(np.concatenate([scales, minima], axis=1))
    lines = leaf[:, : -2 * _LINE].reshape(blocks, tiles, -1, _LINE)
    _put_halves(lines[:, :, 0], scales / factors[:, None])
    _put_halves(lines[:, :, 1], minima / factors[:, None])
    of_bytes = codes if form.bits == 8 else _halves_of_bytes(codes)
    lines[:, :, form.scale_lines :] = _lines_of_words(of_bytes, tiles)
    leaf[:, -2 * _LINE : -_LINE] = factors.reshape(blocks, OUTPUTS).view(np.uint8)
    leaf[:, -_LINE:] = 0


def pack_places(
    leaf: NDArray[np.uint8], codes: NDArray[np.uint8], scales: NDArray[np.int8], factors: NDArray[np.float16]
) -> None:
    """Write places in the table [N, K], with scales [N, K / 32] and factors [N, K / 64], to the leaf of a
    weight [N, K] of that form.
    """
    num_out, num_in = codes.shape
    blocks, tiles = num_out // OUTPUTS, num_in // INPUTS
    lines = leaf.reshape(blocks, tiles, -1, _LINE)
    of_tiles = np.ascontiguousarray(factors.reshape(blocks, OUTPUTS, tiles).transpose(0, 2, 1))
    lines[:, :, 0, : _LINE // 2] = of_tiles.view(np.uint8)
    of_groups = scales.reshape(blocks, OUTPUTS, tiles, 2).transpose(0, 2, 3, 1)
    lines[:, :, 0, _LINE // 2 :] = np.ascontiguousarray(of_groups).view(np.uint8).reshape(blocks, tiles, -1)
    lines[:, :, 1:] = _lines_of_words(_halves_of_bytes(codes), tiles)


def pack_nested(
    leaf: NDArray[np.uint8],
    codes: NDArray[np.int8],
    scales: NDArray[np.int8],
    minima: NDArray[np.int8],
    factors: NDArray[np.float16],
) -> None:
    """Write nested integers [N, K], with scales and minima [N, K / group] and factors [N, K / 64, 2], to the
    leaf of a weight [N, K], whose shape says the form.
    """
    num_out, num_in = codes.shape
    form = CodeForm.of(leaf.shape[1], num_in)
    blocks, tiles = num_out // OUTPUTS, num_in // INPUTS
    lines = leaf.reshape(blocks, tiles, -1, _LINE)
    _put_halves(lines[:, :, 0], factors.reshape(num_out, -1))
    both = np.stack([scales.reshape(num_out, tiles, -1), minima.reshape(num_out, tiles, -1)], axis=2)
    of_tiles = both.reshape(blocks, OUTPUTS, tiles, -1).transpose(0, 2, 3, 1)
    lines[:, :, 1 : form.scale_lines] = (
        np.ascontiguousarray(of_tiles).view(np.uint8).reshape(blocks, tiles, -1, _LINE)
    )
    if form.bits == 4:
        lines[:, :, form.scale_lines :] = _lines_of_words(_halves_of_bytes(codes.view(np.uint8)), tiles)
        return
    unsigned = (codes + np.int8(_MIDDLE_OF_6_BITS)).view(np.uint8)
    low = _halves_of_bytes(unsigned & np.uint8(15)).reshape(num_out, -1, 8)  # of each group of 16
    of_words = (unsigned >> 4).reshape(num_out, -1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    groups = np.concatenate([low, np.bitwise_or.reduce(of_words, axis=2)], axis=2)
    lines[:, :, form.scale_lines :] = _lines_of_words(groups.reshape(num_out, -1), tiles)


def _halves_of_bytes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Put codes of 4 bits [N, K] into bytes [N, K / 2]: of each eight the first four in the low halves."""
    fours = codes.reshape(len(codes), -1, 2, 4)
    packed = np.bitwise_or(fours[:, :, 0], np.left_shift(fours[:, :, 1], 4, dtype=np.uint8))
    return packed.reshape(len(codes), -1)


def _lines_of_words(of_outputs: NDArray[np.uint8], tiles: int) -> NDArray[np.uint8]:
    """Turn the bytes [N, any] of each output into lines [N / 16, tiles, lines, 64], in which four bytes of an
    output lie beside those of the next.
    """
    words = np.ascontiguousarray(of_outputs).view(np.uint32)
    blocks = len(words) // OUTPUTS
    of_tiles = np.ascontiguousarray(words.reshape(blocks, OUTPUTS, tiles, -1).transpose(0, 2, 3, 1))
    return of_tiles.view(np.uint8).reshape(blocks, tiles, -1, _LINE)


def pack_floats(leaf: NDArray[np.uint8], codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
    """Write small floats [N, K], and scales [N, groups], to the leaf of a weight [N, K], whose shape says the
    form. Those of E2M1 are powers of two up to 2^125; what has one below 2^-125 counts as 0, and what has
    one that is no such number as infinite.
    """
    num_out, num_in = codes.shape
    form = CodeForm.of(leaf.shape[1], num_in)
    blocks = num_out // OUTPUTS
    if form.bits == 4:
        codes = np.where(np.repeat(scales < _LEAST_POWER, GROUP, axis=1), np.uint8(0), codes)
        is_usual = scales <= MOST_POWER
        codes = np.where(np.repeat(is_usual, GROUP, axis=1), codes, np.uint8(2))
        scales = np.where(is_usual, scales, np.float32(np.inf))
    # [blocks, pairs of inputs, outputs * 2]
    pairs = codes.reshape(blocks, OUTPUTS, -1, 2).transpose(0, 2, 1, 3).reshape(blocks, -1, 2 * OUTPUTS)
    if form.bits == 8:
        inputs = form.group or num_in
        groups = leaf.reshape(blocks, num_in // inputs, -1)
        groups[:, :, :-_LINE] = pairs.reshape(blocks, num_in // inputs, -1)
        of_outputs = np.ascontiguousarray(scales.reshape(blocks, OUTPUTS, -1).transpose(0, 2, 1))
        groups[:, :, -_LINE:] = of_outputs.view(np.uint8).reshape(blocks, -1, _LINE)
        return
    tiles = leaf.reshape(blocks, num_in // INPUTS, -1)
    exponents = (scales.view(np.uint32) >> 23).astype(np.uint8).reshape(blocks, OUTPUTS, -1, 2)
    tiles[:, :, : 2 * OUTPUTS] = exponents.transpose(0, 2, 3, 1).reshape(blocks, -1, 2 * OUTPUTS)
    # Of the four pairs of a line, the first two are the low halves, and of each 16 bytes a pair has 8.
    of_lines = pairs.reshape(blocks, -1, 2, 2, 4, 8)
    both = np.bitwise_or(of_lines[:, :, 0], np.left_shift(of_lines[:, :, 1], 4, dtype=np.uint8))
    tiles[:, :, 2 * OUTPUTS :] = both.transpose(0, 1, 3, 2, 4).reshape(blocks, num_in // INPUTS, -1)


def _put_halves(lines: NDArray[np.uint8], values: NDArray[np.float32] | NDArray[np.float16]) -> None:
    """Write values [N, K / 32] in float16 to a line [N / 16, K / 64, 64] of each tile."""
    blocks, tiles, _ = lines.shape
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).reshape(blocks, OUTPUTS, tiles, 2).transpose(0, 2, 3, 1)
    lines[...] = np.ascontiguousarray(halves).view(np.uint8).reshape(lines.shape)


def factors_of(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return for each output the power of two that brings its largest scale to at least 1 and less than 2. It
    is 1 where that is 0 or not finite.
    """
    largest = np.abs(scales).max(axis=1)
    usual = np.isfinite(largest) & (largest > 0)
    _, exponents = np.frexp(np.where(usual, largest, np.float32(1)))
    factors: NDArray[np.float32] = np.ldexp(np.float32(1), np.maximum(exponents - 1, -126)).astype(np.float32)
    return factors


def quantise(weight: NDArray[np.generic]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise weight [N, K] -> codes of 4 bits [N, K] around 8, and scales [N, K / 32].

    Of a few scales for each group, the one is taken that leaves the least squared error. The value of the
    largest size becomes -8, because there is no +8; so a scale may be negative. If a weight is not finite,
    neither is its group's scale.
    """
    num_out, num_in = weight.shape
    codes = np.empty((num_out, num_in), np.uint8)
    scales = np.empty((num_out, num_in // GROUP), np.float32)
    rows = max(1, _QUANTISED_AT_ONCE // num_in)
    for begin in range(0, num_out, rows):
        part = slice(begin, begin + rows)
        # Sums over a group are sums over the first axis, which numpy vectorises.
        groups = np.ascontiguousarray(weight[part].reshape(-1, GROUP).T.astype(np.float32))
        found = _best_scales(groups)
        scales[part] = found.reshape(-1, num_in // GROUP)
        numbers = _rounded(groups, found, np.empty_like(groups))
        codes[part] = (numbers + np.float32(8)).astype(np.uint8).T.reshape(-1, num_in)
    return codes, scales


def _rounded(
    groups: NDArray[np.float32], scales: NDArray[np.float32], out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Compute the codes of groups [32, n], from -8 to 7, with scales [n]; 0 where a scale is 0 or not
    finite.
    """
    usable = np.isfinite(scales) & (scales != 0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        np.multiply(groups, np.where(usable, np.float32(1) / scales, np.float32(0)), out=out)
    if not usable.all():
        np.nan_to_num(out, copy=False, nan=0.0)
    np.rint(out, out=out)
    return np.clip(out, np.float32(-8), np.float32(7), out=out)


def _best_scales(groups: NDArray[np.float32]) -> NDArray[np.float32]:
    """Find the scales of groups [32, n] that leave the least squared error."""
    highest, lowest = groups.max(axis=0), groups.min(axis=0)
    peak = np.where(highest > -lowest, highest, lowest) / np.float32(-8)
    best: NDArray[np.float32] = peak
    most = np.zeros_like(peak)
    numbers, work = np.empty_like(groups), np.empty_like(groups)
    for shrink in _SHRINKS:
        _rounded(groups, peak * np.float32(shrink), numbers)
        with np.errstate(divide="ignore", invalid="ignore"):
            products = np.multiply(groups, numbers, out=work).sum(axis=0)
            squares = np.multiply(numbers, numbers, out=work).sum(axis=0)
            fitted = products / squares  # the best scale for these codes
            gain = products * fitted  # and how much squared error it takes off
            better = gain > most
        most, best = np.where(better, gain, most), np.where(better, fitted, best)
    return best


def dequantised(leaf: jax.Array, in_size: int, dtype: jnp.dtype) -> jax.Array:
    """Return the weight [N, K] that a leaf stands for; it is computed in float32."""
    form = CodeForm.of(leaf.shape[1], in_size)
    if form.floats:
        return _of_floats(leaf, in_size, form).reshape(-1, in_size).astype(dtype)

    def all_outputs(number: int, size: int) -> jax.Array:
        of_outputs = leaf.reshape(len(leaf), -1, number, OUTPUTS, size).transpose(0, 3, 1, 2, 4)
        return of_outputs.reshape(len(leaf) * OUTPUTS, -1, number, size)

    return _of_integers(all_outputs, in_size, form).astype(dtype)


def rows_of(leaf: jax.Array, outputs: jax.Array, in_size: int, dtype: jnp.dtype) -> jax.Array:
    """Return some outputs [T] of the weight that a leaf stands for, [T, K], without a look at the others, but
    for small floats, of which all 16 of an entry are computed. Outputs beyond the last are that one.
    """
    form = CodeForm.of(leaf.shape[1], in_size)
    outputs = jnp.clip(outputs, 0, leaf.shape[0] * OUTPUTS - 1)
    entries, places = outputs // OUTPUTS, outputs % OUTPUTS
    if form.floats:
        values = _of_floats(leaf[entries], in_size, form).reshape(-1, OUTPUTS, in_size)
        return jnp.take_along_axis(values, places[:, None, None], axis=1)[:, 0].astype(dtype)

    def these(number: int, size: int) -> jax.Array:
        found: jax.Array = leaf.reshape(len(leaf), -1, number, OUTPUTS, size)[entries, :, :, places]
        return found

    return _of_integers(these, in_size, form).astype(dtype)


def _of_floats(leaf: jax.Array, in_size: int, form: CodeForm) -> jax.Array:
    """Return the values [blocks, 16, K] of small floats."""
    blocks = leaf.shape[0]
    if form.bits == 8:
        groups = leaf.reshape(blocks, in_size // (form.group or in_size), -1)
        scales = jax.lax.bitcast_convert_type(
            groups[:, :, -_LINE:].reshape(*groups.shape[:2], -1, 4), jnp.float32
        )
        values = jnp.asarray(E4M3_VALUES)[groups[:, :, :-_LINE].reshape(*groups.shape[:2], -1, OUTPUTS, 2)]
        of_groups = values * scales[:, :, None, :, None]  # [blocks, groups, pairs, outputs, 2]
        return of_groups.transpose(0, 3, 1, 2, 4)
    tiles = leaf.reshape(blocks, in_size // INPUTS, -1)
    exponents = tiles[:, :, : 2 * OUTPUTS].astype(jnp.uint32).reshape(blocks, -1, OUTPUTS)  # of groups
    scales = jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)
    codes = tiles[:, :, 2 * OUTPUTS :].reshape(blocks, -1, 4, 2, 4, 2)  # of lines: [q, h, o, i]
    both = jnp.stack([codes & np.uint8(15), codes >> 4], axis=2)  # [blocks, lines, 2, q, h, o, i]
    values = jnp.asarray(E2M1_VALUES)[both].transpose(0, 3, 5, 1, 2, 4, 6)  # [blocks, q, o, lines, 2, h, i]
    of_groups = values.reshape(blocks, OUTPUTS, -1, GROUP)
    return of_groups * scales.transpose(0, 2, 1)[:, :, :, None]


_BytesOf: TypeAlias = Callable[[int, int], jax.Array]
"""(number, size) to what outputs have of each line, if it is [number, 16 outputs, size] bytes: uint8
[outputs, lines, number, size]."""


def _of_integers(bytes_of: _BytesOf, in_size: int, form: CodeForm) -> jax.Array:
    """Return the values [outputs, K] of integers."""
    tiles, first = in_size // INPUTS, form.scale_lines

    def of_tiles(number: int, size: int) -> jax.Array:
        found = bytes_of(number, size)[:, : tiles * form.tile_bytes // _LINE]
        return found.reshape(len(found), tiles, -1, number, size)

    def of_groups(values: jax.Array) -> jax.Array:
        """Repeat values [outputs, tiles, groups of a tile] for each input of a group."""
        return jnp.repeat(values, INPUTS // values.shape[2], axis=2)

    words = of_tiles(1, 4)[:, :, first:, 0]  # [outputs, tiles, lines, 4]
    halves = jax.lax.bitcast_convert_type(of_tiles(2, 2)[:, :, :first], jnp.float16).astype(jnp.float32)
    if form.nested:
        scales, minima = _scales_and_minima(of_tiles(4, 1)[:, :, 1:first, :, 0], halves[:, :, 0])
        codes = _nibbles(words) if form.bits == 4 else _of_6_bits(words)
        values = codes.astype(jnp.float32) * of_groups(scales) - of_groups(minima)
        return values.reshape(-1, in_size)
    codes = _nibbles(words) if form.bits == 4 else words.reshape(*words.shape[:2], INPUTS)
    if form.table:
        of_places = jax.lax.bitcast_convert_type(of_tiles(4, 1)[:, :, 0, 2:, 0], jnp.int8)
        scales = of_places.astype(jnp.float32) * halves[:, :, 0, :1]
        return (jnp.asarray(TABLE)[codes].astype(jnp.float32) * of_groups(scales)).reshape(-1, in_size)
    factors = jax.lax.bitcast_convert_type(
        bytes_of(1, 4)[:, tiles * form.tile_bytes // _LINE, 0], jnp.float32
    )
    scales = halves[:, :, 0] * factors[:, None, None]
    if form.minima:
        minima = halves[:, :, 1] * factors[:, None, None]
        return (codes.astype(jnp.float32) * of_groups(scales) - of_groups(minima)).reshape(-1, in_size)
    zeros = of_groups(halves[:, :, 1]) if form.zeros else np.float32(form.middle)
    return ((codes.astype(jnp.float32) - zeros) * of_groups(scales)).reshape(-1, in_size)


def _scales_and_minima(numbers: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiply the numbers uint8 [outputs, tiles, lines, 4] of nested integers by factors [outputs, tiles,
    2]. Return scales and minima, float32 [outputs, tiles, groups of a tile].
    """
    signed = jax.lax.bitcast_convert_type(numbers, jnp.int8).astype(jnp.float32)
    both = signed.reshape(*signed.shape[:2], 2, -1) * factors[:, :, :, None]
    return both[:, :, 0], both[:, :, 1]


def _nibbles(words: jax.Array) -> jax.Array:
    """Return the codes of 4 bits of lines [outputs, tiles, lines, 4]: [outputs, tiles, lines * 8]."""
    both = jnp.stack([words & np.uint8(15), words >> 4], axis=3)
    return both.reshape(*words.shape[:2], -1)


def _of_6_bits(words: jax.Array) -> jax.Array:
    """Return the codes of 6 bits, from -32 to 31, of the lines of a tile: int8 [outputs, tiles, 64]."""
    groups = words.reshape(*words.shape[:2], 4, 3, 4)
    low = _nibbles(groups[:, :, :, :2].reshape(*words.shape[:2], 8, 4))
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 1, 4, 1)
    high = (groups[:, :, :, 2:] >> shifts) & np.uint8(3)
    codes = low | high.reshape(low.shape) << 4
    return codes.astype(jnp.int8) - np.int8(_MIDDLE_OF_6_BITS)


def matmul_codes(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """Compute x [T, in] times the weight [out, in] of a leaf, in x's dtype, transposed: float32 [T, out]."""
    return matmul_transposed(x, dequantised(leaf, x.shape[1], x.dtype))
