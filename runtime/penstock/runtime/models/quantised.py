"""The form on the host of a quantised weight, whatever checkpoint it came from, and how it is packed.

Readers of checkpoints make it (`LoadRule.decode`), and `pack` writes it as the bytes of `ops.codes`. What it
means is `Codes.dequantised`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.ops.codes import (
    E2M1_VALUES,
    E4M3_VALUES,
    GROUP,
    INPUTS,
    MOST_E4M3_SCALE,
    MOST_NESTED,
    MOST_POWER,
    TABLE,
    TABLE_FORM,
    CodeForm,
    factors_of,
    pack_codes,
    pack_floats,
    pack_nested,
    pack_places,
    pack_with_minima,
    quantise,
)

_E4M3_MOST = np.float32(448)


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised weight of a linear layer as its checkpoint has it: value = scale * (code - zero)."""

    codes: NDArray[np.uint8] | NDArray[np.int8]
    """[out, in], one code per element (not packed)."""
    bits: int
    """4 or 8: codes are from 0 to 2**bits - 1 in uint8, or from -2**(bits - 1) in int8."""
    scales: NDArray[np.float32]
    """[out, in // group]."""
    zeros: NDArray[np.float32] | None
    """[out, in // group]; None: 0."""
    group: int
    """How many inputs share a scale; all of them for one scale a row."""
    order: NDArray[np.intp] | None = None
    """Column i of the codes belongs to input order[i]; None: to input i."""

    def __post_init__(self) -> None:
        """Check that the arrays agree, because whoever packs them trusts their shapes."""
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {self.bits}")
        if self.codes.ndim != 2 or self.codes.dtype not in (np.uint8, np.int8):
            raise ValueError(
                f"codes must be uint8 or int8 [out, in], not {self.codes.dtype} {list(self.codes.shape)}"
            )
        num_out, num_in = self.codes.shape
        if self.group < 1 or num_in % self.group:
            raise ValueError(f"group {self.group} does not divide the {num_in} inputs")
        expected = (num_out, num_in // self.group)
        for name, values in (("scales", self.scales), ("zeros", self.zeros)):
            if values is not None and (values.shape != expected or values.dtype != np.float32):
                raise ValueError(
                    f"{name} must be float32 {list(expected)}, not {values.dtype} {list(values.shape)}"
                )
        if self.order is not None and not np.array_equal(np.sort(self.order), np.arange(num_in)):
            raise ValueError(f"order must name each of the {num_in} inputs once")

    def dequantised(self) -> NDArray[np.float32]:
        """Compute the weight that the codes stand for, float32 [out, in], its columns in order of inputs."""
        num_out, num_in = self.codes.shape
        values = self.codes.astype(np.float32).reshape(num_out, -1, self.group)
        if self.zeros is not None:
            values -= self.zeros[:, :, None]
        values *= self.scales[:, :, None]
        columns = values.reshape(num_out, num_in)
        if self.order is None:
            return columns
        ordered = np.empty_like(columns)
        ordered[:, self.order] = columns
        return ordered

    def of_columns(self, columns: slice) -> Codes:
        """Return the part of consecutive inputs, which begins and ends with a group.

        Raises ValueError if it does not, or if the inputs are in another order.
        """
        begin, end, _ = columns.indices(self.codes.shape[1])
        if self.order is not None or begin % self.group or end % self.group:
            raise ValueError(f"inputs {begin} to {end} are not whole groups of {self.group} neighbours")
        groups = slice(begin // self.group, end // self.group)
        return replace(
            self,
            codes=self.codes[:, columns],
            scales=self.scales[:, groups],
            zeros=None if self.zeros is None else self.zeros[:, groups],
        )

    def of_rows(self, rows: NDArray[np.intp]) -> Codes:
        """Return these outputs."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def in_groups_of(self, group: int) -> Codes:
        """Return the same weight with smaller groups, whose size divides that of its own."""
        repeats = self.group // group
        zeros = None if self.zeros is None else np.repeat(self.zeros, repeats, axis=1)
        return replace(self, scales=np.repeat(self.scales, repeats, axis=1), zeros=zeros, group=group)

    def form(self) -> CodeForm | None:
        """Return the form of the bytes that hold this weight without a change of its codes; None: there is
        none.

        Zeros are not needed where all of them are half of the codes' range.
        """
        if self.order is not None or self.group % GROUP:
            return None
        zeros = self._unsigned_zeros()
        return CodeForm(self.bits, bool((zeros != 1 << (self.bits - 1)).any()))

    def pack(self, leaf: NDArray[np.uint8]) -> None:
        """Write the codes to the leaf of a weight (`ops.codes`).

        Raises ValueError if the leaf's form cannot hold them.
        """
        needed, given = self.form(), CodeForm.of(leaf.shape[1], self.codes.shape[1])
        if needed is None or not given.takes(needed):
            raise ValueError(f"a weight that needs {needed} does not fit into {given}")
        codes = self.codes
        if codes.dtype == np.int8:
            codes = (codes.astype(np.int16) + needed.middle).astype(np.uint8)
        if not given.zeros:  # codes of 4 bits may lie in bytes of 8, around the middle of those
            codes = codes + np.uint8(given.middle - needed.middle)
        repeats = self.group // GROUP
        zeros = np.repeat(self._unsigned_zeros(), repeats, axis=1) if given.zeros else None
        pack_codes(leaf, codes.astype(np.uint8, copy=False), np.repeat(self.scales, repeats, axis=1), zeros)

    def _unsigned_zeros(self) -> NDArray[np.float32]:
        """Return the zeros of codes that are counted from 0."""
        zeros = np.zeros_like(self.scales) if self.zeros is None else self.zeros
        return zeros if self.codes.dtype == np.uint8 else zeros + np.float32(1 << (self.bits - 1))


@dataclass(frozen=True, slots=True)
class FloatCodes:
    """A quantised weight of a linear layer whose codes are small floats: value = scale * float."""

    codes: NDArray[np.uint8]
    """[out, in], one code per element: of E2M1, or bytes of E4M3 without those that are no numbers."""
    bits: int
    """4 for E2M1, or 8 for E4M3."""
    scales: NDArray[np.float32]
    """[out, in / group], rounded up: the last group may be shorter."""
    group: int
    """How many inputs share a scale; all of them for one scale a row."""

    @property
    def is_in_range(self) -> bool:
        """Whether each scale can be multiplied by all values of its kind of float."""
        most = MOST_POWER if self.bits == 4 else MOST_E4M3_SCALE
        return bool((np.abs(self.scales) <= most).all())

    def dequantised(self) -> NDArray[np.float32]:
        """Compute the weight that the codes stand for, float32 [out, in]."""
        values: NDArray[np.float32] = (E2M1_VALUES if self.bits == 4 else E4M3_VALUES)[self.codes]
        if self.scales.shape[1] == 1:
            values *= self.scales
        else:
            values *= np.repeat(self.scales, self.group, axis=1)[:, : values.shape[1]]
        return values

    def of_columns(self, columns: slice) -> FloatCodes:
        """Return the part of consecutive inputs, which begins and ends with a group, unless a row has one
        scale.

        Raises ValueError if it does not.
        """
        num_in = self.codes.shape[1]
        begin, end, _ = columns.indices(num_in)
        codes = self.codes[:, columns]
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes, group=end - begin)
        if begin % self.group or (end % self.group and end != num_in):
            raise ValueError(f"inputs {begin} to {end} are not whole groups of {self.group}")
        return replace(self, codes=codes, scales=self.scales[:, begin // self.group : -(-end // self.group)])

    def of_rows(self, rows: NDArray[np.intp]) -> FloatCodes:
        """Return these outputs."""
        return replace(self, codes=self.codes[rows], scales=self.scales[rows])

    def in_groups_of(self, group: int) -> FloatCodes:
        """Return the same weight with smaller groups, whose size divides that of its own."""
        num_groups = -(-self.codes.shape[1] // group)
        repeats = num_groups if self.scales.shape[1] == 1 else self.group // group
        return replace(self, scales=np.repeat(self.scales, repeats, axis=1)[:, :num_groups], group=group)

    def form(self) -> CodeForm | None:
        """Return the form of the bytes that hold this weight without a change of its codes; None: there is
        none.
        """
        return float_form(self.bits, None if self.scales.shape[1] == 1 else self.group)

    def pack(self, leaf: NDArray[np.uint8]) -> None:
        """Write the codes to the leaf of a weight (`ops.codes`).

        Raises ValueError if the leaf's form cannot hold them.
        """
        needed, given = self.form(), CodeForm.of(leaf.shape[1], self.codes.shape[1])
        if needed is None or not given.takes(needed):
            raise ValueError(f"a weight that needs {needed} does not fit into {given}")
        there = self if given.group is None else self.in_groups_of(given.group)
        pack_floats(leaf, there.codes, there.scales)


@dataclass(frozen=True, slots=True)
class NestedCodes:
    """A quantised weight of a linear layer whose scales are integers, too: value = (factor * scale) * code -
    (factor of minima * minimum).
    """

    codes: NDArray[np.int8]
    """[out, in]: from 0 to 15, or from -32 to 31."""
    bits: int
    """4, with groups of 32 inputs that share a scale and a minimum, or 6, with groups of 16."""
    scales: NDArray[np.int8]
    """[out, in / group]."""
    minima: NDArray[np.int8]
    """[out, in / group]."""
    factors: NDArray[np.float16]
    """[out, in / 64, 2]: of scales and of minima."""

    def dequantised(self) -> NDArray[np.float32]:
        """Compute the weight that the codes stand for, float32 [out, in]."""
        groups = self.scales.shape[1] // self.factors.shape[1]  # of those that share factors
        factors = np.repeat(self.factors.astype(np.float32), groups, axis=1)
        scales, minima = factors[:, :, 0] * self.scales, factors[:, :, 1] * self.minima
        values = self.codes.astype(np.float32).reshape(*scales.shape, -1)
        values *= scales[:, :, None]
        values -= minima[:, :, None]
        return values.reshape(self.codes.shape)

    def of_columns(self, columns: slice) -> NestedCodes:
        """Return the part of consecutive inputs, which begins and ends with those that share factors.

        Raises ValueError if it does not.
        """
        num_in = self.codes.shape[1]
        begin, end, _ = columns.indices(num_in)
        if begin % INPUTS or end % INPUTS:
            raise ValueError(f"inputs {begin} to {end} are not whole parts of {INPUTS}")
        groups = slice(*(at * self.scales.shape[1] // num_in for at in (begin, end)))
        return replace(
            self,
            codes=self.codes[:, columns],
            scales=self.scales[:, groups],
            minima=self.minima[:, groups],
            factors=self.factors[:, begin // INPUTS : end // INPUTS],
        )

    def of_rows(self, rows: NDArray[np.intp]) -> NestedCodes:
        """Return these outputs."""
        of_groups = self.scales[rows], self.minima[rows], self.factors[rows]
        return NestedCodes(self.codes[rows], self.bits, *of_groups)

    def form(self) -> CodeForm:
        """Return the form of the bytes that hold this weight without a change of its codes."""
        return nested_form(self.bits)

    def pack(self, leaf: NDArray[np.uint8]) -> None:
        """Write the codes to the leaf of a weight (`ops.codes`).

        Raises ValueError if the leaf's form cannot hold them.
        """
        needed, given = self.form(), CodeForm.of(leaf.shape[1], self.codes.shape[1])
        if not given.takes(needed):
            raise ValueError(f"a weight that needs {needed} does not fit into {given}")
        repeats = needed.group // given.group if needed.group and given.group else 1
        scales, minima = (np.repeat(values, repeats, axis=1) for values in (self.scales, self.minima))
        pack_nested(leaf, self.codes, scales, minima, self.factors)


@dataclass(frozen=True, slots=True)
class OffsetCodes:
    """A quantised weight with a float to add for each group: value = scale * code + offset."""

    codes: NDArray[np.uint8] | NDArray[np.int8]
    """[out, in]."""
    bits: int
    """4 or 8."""
    scales: NDArray[np.float32]
    """[out, in / group]."""
    offsets: NDArray[np.float32]
    """As the scales."""
    group: int

    def dequantised(self) -> NDArray[np.float32]:
        """Compute the weight that the codes stand for, float32 [out, in]."""
        values = self.codes.astype(np.float32).reshape(len(self.codes), -1, self.group)
        values *= self.scales[:, :, None]
        values += self.offsets[:, :, None]
        return values.reshape(self.codes.shape)

    def of_columns(self, columns: slice) -> OffsetCodes:
        """Return the part of consecutive inputs, which begins and ends with a group.

        Raises ValueError if it does not.
        """
        begin, end, _ = columns.indices(self.codes.shape[1])
        if begin % self.group or end % self.group:
            raise ValueError(f"inputs {begin} to {end} are not whole groups of {self.group}")
        groups = slice(begin // self.group, end // self.group)
        of_groups = self.scales[:, groups], self.offsets[:, groups]
        return OffsetCodes(self.codes[:, columns], self.bits, *of_groups, self.group)

    def of_rows(self, rows: NDArray[np.intp]) -> OffsetCodes:
        """Return these outputs."""
        of_groups = self.scales[rows], self.offsets[rows]
        return OffsetCodes(self.codes[rows], self.bits, *of_groups, self.group)

    def in_groups_of(self, group: int) -> OffsetCodes:
        """Return the same weight with smaller groups, whose size divides that of its own."""
        repeats = self.group // group
        scales, offsets = (np.repeat(values, repeats, axis=1) for values in (self.scales, self.offsets))
        return OffsetCodes(self.codes, self.bits, scales, offsets, group)

    def form(self) -> CodeForm | None:
        """Return the form of the bytes that hold this weight without a change of its codes; None: there is
        none.
        """
        is_held = self.codes.dtype == np.uint8 and self.group % GROUP == 0
        return CodeForm(self.bits, minima=True) if is_held else None

    def pack(self, leaf: NDArray[np.uint8]) -> None:
        """Write the codes to the leaf of a weight (`ops.codes`).

        Raises ValueError if the leaf's form cannot hold them.
        """
        needed, given = self.form(), CodeForm.of(leaf.shape[1], self.codes.shape[1])
        if needed is None or not given.takes(needed):
            raise ValueError(f"a weight that needs {needed} does not fit into {given}")
        there = self.in_groups_of(GROUP)
        pack_with_minima(leaf, there.codes.view(np.uint8), there.scales, -there.offsets)


@dataclass(frozen=True, slots=True)
class PlaceCodes:
    """A quantised weight whose codes are places in `ops.codes.TABLE`: value = (factor * scale) *
    table[code].
    """

    codes: NDArray[np.uint8]
    """[out, in], from 0 to 15."""
    scales: NDArray[np.int8]
    """[out, in / 32]."""
    factors: NDArray[np.float16]
    """[out, in / 64]."""

    def dequantised(self) -> NDArray[np.float32]:
        """Compute the weight that the codes stand for, float32 [out, in]."""
        scales = np.repeat(self.factors.astype(np.float32), INPUTS // GROUP, axis=1) * self.scales
        values = TABLE.astype(np.float32)[self.codes].reshape(*scales.shape, GROUP)
        values *= scales[:, :, None]
        return values.reshape(self.codes.shape)

    def of_columns(self, columns: slice) -> PlaceCodes:
        """Return the part of consecutive inputs, which begins and ends with those that share a factor.

        Raises ValueError if it does not.
        """
        begin, end, _ = columns.indices(self.codes.shape[1])
        if begin % INPUTS or end % INPUTS:
            raise ValueError(f"inputs {begin} to {end} are not whole parts of {INPUTS}")
        groups, tiles = (slice(begin // size, end // size) for size in (GROUP, INPUTS))
        return PlaceCodes(self.codes[:, columns], self.scales[:, groups], self.factors[:, tiles])

    def of_rows(self, rows: NDArray[np.intp]) -> PlaceCodes:
        """Return these outputs."""
        return PlaceCodes(self.codes[rows], self.scales[rows], self.factors[rows])

    def form(self) -> CodeForm:
        """Return the form of the bytes that hold this weight without a change of its codes."""
        return TABLE_FORM

    def pack(self, leaf: NDArray[np.uint8]) -> None:
        """Write the codes to the leaf of a weight (`ops.codes`).

        Raises ValueError if the leaf's form cannot hold them.
        """
        given = CodeForm.of(leaf.shape[1], self.codes.shape[1])
        if not given.takes(TABLE_FORM):
            raise ValueError(f"a weight that needs {TABLE_FORM} does not fit into {given}")
        pack_places(leaf, self.codes, self.scales, self.factors)


def nested_form(bits: int) -> CodeForm:
    """Return the form of the bytes that hold nested integers of 4 or 6 bits."""
    return CodeForm(bits, nested=True, group=GROUP if bits == 4 else 16)


Coded: TypeAlias = Codes | FloatCodes | NestedCodes | OffsetCodes | PlaceCodes
"""A weight that can be packed as it is, if a form fits it."""


def float_form(bits: int, group: int | None) -> CodeForm | None:
    """Return the form of the bytes that hold floats of 4 bits with scales that are powers of two, or of 8
    bits, of which so many inputs share a scale; None for all. None: there is none.
    """
    if bits == 4:
        return CodeForm(4, floats=True) if group is None or group % GROUP == 0 else None
    if group is None:
        return CodeForm(8, floats=True, group=None)
    return CodeForm(8, floats=True, group=128) if group % 128 == 0 else None


def quantised(weight: NDArray[np.generic], form: CodeForm) -> Coded:
    """Make codes of this form of a weight [N, K] in floats."""
    if form.floats:
        return _small_floats(weight.astype(np.float32), form)
    if form.nested:
        return _nested(weight.astype(np.float32), form)
    if form.minima:
        return _with_offsets(weight.astype(np.float32), form)
    if form.table:
        return _places(weight.astype(np.float32))
    if form.bits == 4:
        codes, scales = quantise(weight)
        return Codes(codes=codes, bits=4, scales=scales, zeros=np.full_like(scales, 8), group=GROUP)
    groups = weight.astype(np.float32).reshape(len(weight), -1, GROUP)
    scales = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = np.rint(np.nan_to_num(groups / scales[:, :, None], posinf=0.0, neginf=0.0))
    signed = np.clip(numbers, -127, 127).astype(np.int8).reshape(weight.shape)
    return Codes(codes=signed, bits=8, scales=scales, zeros=None, group=GROUP)


def _nested(weight: NDArray[np.float32], form: CodeForm) -> NestedCodes:
    """Find nested integers of a weight [N, K]: those of 4 bits reach from the least value of a group, or from
    0, to the largest, and those of 6 bits as far on both sides of 0.
    """
    num_out, num_in = weight.shape
    groups = weight.reshape(num_out, -1, form.group or INPUTS)
    if form.bits == 4:
        least, most = 0, 15
        wanted_minima = np.maximum(-groups.min(axis=2), np.float32(0))
        wanted_scales = (groups.max(axis=2) + wanted_minima) / np.float32(most)
    else:
        least, most = -32, 31
        wanted_minima = np.zeros(groups.shape[:2], np.float32)
        wanted_scales = np.abs(groups).max(axis=2) / np.float32(most)
    tiles = num_in // INPUTS
    scales, scale_factors, real_scales = _whole(wanted_scales, tiles)
    minima, minimum_factors, real_minima = _whole(wanted_minima, tiles)
    numbers = np.rint(_divided(groups + real_minima[:, :, None], real_scales))
    codes = np.clip(numbers, least, most).astype(np.int8).reshape(weight.shape)
    factors = np.stack([scale_factors, minimum_factors], axis=2)
    return NestedCodes(codes, form.bits, scales, minima, factors)


def _with_offsets(weight: NDArray[np.float32], form: CodeForm) -> OffsetCodes:
    """Find integers of a weight [N, K] that reach from the least value of each group to the largest, with
    scales and offsets as the leaf has them.
    """
    groups, most = weight.reshape(len(weight), -1, GROUP), np.float32((1 << form.bits) - 1)
    lowest, highest = groups.min(axis=2), groups.max(axis=2)
    with np.errstate(over="ignore", invalid="ignore"):
        factors = factors_of(np.concatenate([lowest, (highest - lowest) / most], axis=1))[:, None]
        offsets = (lowest / factors).astype(np.float16).astype(np.float32) * factors
        scales = ((highest - offsets) / most / factors).astype(np.float16).astype(np.float32) * factors
        numbers = np.rint(_divided(groups - offsets[:, :, None], scales))
    codes = np.clip(numbers, 0, most).astype(np.uint8).reshape(weight.shape)
    return OffsetCodes(codes, form.bits, scales, offsets, GROUP)


def _places(weight: NDArray[np.float32]) -> PlaceCodes:
    """Find the nearest places in the table of a weight [N, K]. The largest value of a group is the table's
    end of the larger size, which is negative; so a scale may be, too.
    """
    groups = weight.reshape(len(weight), -1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    wanted = largest / np.float32(TABLE[0])
    scales, factors, real_scales = _whole(np.abs(wanted), weight.shape[1] // INPUTS)
    signs = np.where(wanted < 0, -1, 1).astype(np.int8)
    numbers = _divided(groups, real_scales * signs)
    middles = (TABLE[:-1].astype(np.float32) + TABLE[1:]) / np.float32(2)
    codes = np.searchsorted(middles, numbers).astype(np.uint8).reshape(weight.shape)
    return PlaceCodes(codes, scales * signs, factors)


def _whole(
    wanted: NDArray[np.float32], tiles: int
) -> tuple[NDArray[np.int8], NDArray[np.float16], NDArray[np.float32]]:
    """Find whole numbers for [N, groups] that are not negative, their factors [N, tiles], and the products of
    both. A factor is not finite where one of its group's numbers is not. It is rounded up: small ones, which
    float16 has in coarse steps, would else become 0, or cut off the largest numbers.
    """
    of_tiles = wanted.reshape(len(wanted), tiles, -1)
    least = of_tiles.max(axis=2) / np.float32(MOST_NESTED)
    with np.errstate(over="ignore"):
        factors = least.astype(np.float16)
        factors = np.where(factors < least, np.nextafter(factors, np.float16(np.inf)), factors)
    numbers = np.clip(np.rint(_divided(of_tiles, factors.astype(np.float32))), 0, MOST_NESTED).astype(np.int8)
    with np.errstate(invalid="ignore"):
        products = numbers * factors.astype(np.float32)[:, :, None]
    return numbers.reshape(wanted.shape), factors, products.reshape(wanted.shape)


def _small_floats(weight: NDArray[np.float32], form: CodeForm) -> FloatCodes:
    """Find the nearest small floats of a weight [N, K]. A scale of E4M3 makes the largest value of its group
    the largest float. One of E2M1 is a power of two as the OCP's specification chooses it: it gives the
    largest value the exponent of the largest float, so that a value may be cut off.
    """
    group = form.group or weight.shape[1]
    groups = weight.reshape(len(weight), -1, group)
    peaks = np.abs(groups).max(axis=2)
    if form.bits == 8:
        scales = (peaks / _E4M3_MOST).astype(np.float32)
        numbers = np.clip(_divided(groups, scales), -_E4M3_MOST, _E4M3_MOST)
        codes = numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return FloatCodes(codes.reshape(weight.shape), 8, scales, group)
    _, exponents = np.frexp(peaks)  # a peak is below 2 ** exponent, and E2M1 has numbers below 2 ** 3
    scales = np.ldexp(np.float32(1), np.clip(exponents - 3, -125, 125)).astype(np.float32)
    scales[~np.isfinite(peaks)] = np.nan
    numbers = _divided(groups, scales)
    middles = (E2M1_VALUES[:7] + E2M1_VALUES[1:8]) / np.float32(2)
    sizes = np.searchsorted(middles, np.abs(numbers))
    # A number in the middle goes to the float whose last bit is 0.
    is_middle = (sizes < 7) & (np.append(middles, np.inf)[sizes] == np.abs(numbers))
    sizes += is_middle & (sizes % 2 == 1)
    codes = (sizes + 8 * np.signbit(numbers)).astype(np.uint8)
    return FloatCodes(codes.reshape(weight.shape), 4, scales, group)


def _divided(groups: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide groups [N, n, size] by their scales; 0 where that is no number."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotients = groups / scales[:, :, None]
    return np.where(np.isfinite(quotients), quotients, np.float32(0)).astype(np.float32, copy=False)
