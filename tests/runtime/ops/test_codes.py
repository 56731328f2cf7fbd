"""Codes as bytes: where each lies, what XLA makes of them, and the scales that are chosen for floats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.codes import (
    E2M1,
    E4M3,
    E4M3_BY_GROUP,
    FLOAT_FORMS,
    FORMS,
    GROUP,
    MINIMA_FORMS,
    NESTED_FORMS,
    TABLE_FORM,
    CodeForm,
    dequantised,
    matmul_codes,
    pack_codes,
    pack_floats,
    quantise,
    rows_of,
    union,
)
from tests.support.native.codes import nested, places, small_floats, with_minima

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.bits} bits{' and zeros' * form.zeros}")
def test_bytes_lie_as_the_module_says(form: CodeForm) -> None:
    """Output 17 (block 1, place 1) and input 75 (tile 1, group 0, input 11 of it)."""
    rng = np.random.default_rng(form.bits)
    codes = rng.integers(0, 1 << form.bits, (32, 128)).astype(np.uint8)
    scales = np.full((32, 4), 3.0, np.float32)
    scales[17, 2] = 0.375
    zeros = np.full((32, 4), 5.0, np.float32)
    zeros[17, 2] = 6.5
    leaf = np.zeros(form.shape(32, 128), np.uint8)
    pack_codes(leaf, codes, scales, zeros if form.zeros else None)
    tile = leaf[1, form.tile_bytes : 2 * form.tile_bytes].reshape(-1, 64)
    halves = tile[: 1 + form.zeros].view(np.float16)
    assert leaf[1, -64:].view(np.float32)[1] == 2.0  # the power of two below 3
    assert halves[0, 1] == 0.375 / 2
    assert halves[0, 16 + 1] == 3 / 2
    if form.zeros:
        assert halves[1, 1] == 6.5
    lines = tile[1 + form.zeros :]
    if form.bits == 8:
        assert lines[11 // 4, 4 * 1 + 3] == codes[17, 75]
    else:  # input 11 is the fourth of the second line, and input 15 lies above it
        assert lines[1, 4 * 1 + 3] == codes[17, 75] | codes[17, 79] << 4


@pytest.mark.ci
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.bits} bits{' and zeros' * form.zeros}")
def test_xla_multiplies_what_the_codes_stand_for(form: CodeForm) -> None:
    rng = np.random.default_rng(form.bits + 8)
    codes = rng.integers(0, 1 << form.bits, (48, 192)).astype(np.uint8)
    scales = rng.standard_normal((48, 6)).astype(np.float16).astype(np.float32)
    zeros = rng.integers(0, 1 << form.bits, (48, 6)).astype(np.float32)
    leaf = np.zeros(form.shape(48, 192), np.uint8)
    pack_codes(leaf, codes, scales, zeros if form.zeros else None)
    of_all = zeros if form.zeros else np.full_like(zeros, form.middle)
    exact = np.repeat(scales, GROUP, axis=1) * (codes - np.repeat(of_all, GROUP, axis=1).astype(np.float64))
    np.testing.assert_array_equal(np.asarray(dequantised(jnp.asarray(leaf), 192, jnp.float32)), exact)
    x = rng.standard_normal((5, 192)).astype(np.float32)
    got = np.asarray(matmul_codes(jnp.asarray(x), jnp.asarray(leaf)))
    assert np.abs(got - x.astype(np.float64) @ exact.T).max() < 1e-5 * np.abs(exact).sum(axis=1).max()


@pytest.mark.parametrize("form", NESTED_FORMS, ids=lambda form: f"{form.bits} bits")
def test_nested_integers_lie_as_the_module_says(form: CodeForm) -> None:
    """Output 17 (block 1, place 1) and input 91 (tile 1, group 0 of 32 or group 1 of 16, input 27 or 11)."""
    weight = nested(np.random.default_rng(form.bits), form, 32, 128)
    leaf = np.zeros(form.shape(32, 128), np.uint8)
    weight.pack(leaf)
    lines = leaf[1, form.tile_bytes :].reshape(-1, 64)
    assert lines[0].view(np.float16).reshape(2, 16)[:, 1].tolist() == weight.factors[17, 1].tolist()
    code = weight.codes[17]
    if form.bits == 4:
        assert lines[1].view(np.int8)[1] == weight.scales[17, 2]
        assert lines[1].view(np.int8)[32 + 1] == weight.minima[17, 2]
        assert lines[2 + 27 // 8, 4 * 1 + 3] == code[91] | code[95] << 4
        return
    assert lines[1].view(np.int8)[16 * 1 + 1] == weight.scales[17, 5]
    assert lines[2].view(np.int8)[16 * 1 + 1] == weight.minima[17, 5]
    from_0 = code.astype(np.int64) + 32
    group = lines[3 + 3 * 1 :]
    assert group[11 // 8, 4 * 1 + 3] == from_0[91] % 16 | from_0[95] % 16 << 4
    assert group[2, 4 * 1 + 3] == sum(from_0[83 + 4 * i] // 16 << 2 * i for i in range(4))


@pytest.mark.parametrize("form", MINIMA_FORMS, ids=lambda form: f"{form.bits} bits")
def test_integers_with_minima_lie_as_the_module_says(form: CodeForm) -> None:
    """Output 17 (block 1, place 1) and input 75 (tile 1, group 0, input 11 of it)."""
    weight = with_minima(np.random.default_rng(form.bits), form, 32, 128)
    weight.scales[17, 2], weight.offsets[17, 2] = 0.375, 3.0
    leaf = np.zeros(form.shape(32, 128), np.uint8)
    weight.pack(leaf)
    lines = leaf[1, form.tile_bytes :].reshape(-1, 64)
    assert lines[-2].view(np.float32)[1] == 2.0  # the power of two below 3
    assert not lines[-1].any()
    assert lines[0].view(np.float16)[1] == 0.375 / 2
    assert lines[1].view(np.float16)[1] == -3.0 / 2
    if form.bits == 8:
        assert lines[2 + 11 // 4, 4 * 1 + 3] == weight.codes[17, 75]
    else:
        assert lines[2 + 1, 4 * 1 + 3] == weight.codes[17, 75] | weight.codes[17, 79] << 4


def test_places_lie_as_the_module_says() -> None:
    """Output 17 (block 1, place 1) and input 107 (tile 1, group 1, input 11 of it)."""
    weight = places(np.random.default_rng(5), 32, 128)
    leaf = np.zeros(TABLE_FORM.shape(32, 128), np.uint8)
    assert 8 * leaf.size / weight.codes.size == 4.5
    weight.pack(leaf)
    lines = leaf[1, 576:].reshape(-1, 64)
    assert lines[0, :32].view(np.float16)[1] == weight.factors[17, 1]
    assert lines[0, 32:].view(np.int8)[16 * 1 + 1] == weight.scales[17, 3]
    assert lines[1 + 4 * 1 + 1, 4 * 1 + 3] == weight.codes[17, 107] | weight.codes[17, 111] << 4


@pytest.mark.parametrize(
    "form", [*FORMS[1:3], *NESTED_FORMS, MINIMA_FORMS[0], TABLE_FORM, *FLOAT_FORMS[:1]], ids=str
)
def test_some_outputs_are_those_of_the_whole_weight(form: CodeForm) -> None:
    """Beyond the last one it is the last, and before the first the first."""
    leaf = np.random.default_rng(form.bits).integers(0, 64, form.shape(48, 128), np.uint8)
    whole, some = (jax.jit(function, static_argnums=(-2, -1)) for function in (dequantised, rows_of))
    expected = np.asarray(whole(leaf, 128, jnp.float32))[[5, 47, 16, 47, 0, 5]]
    found = some(leaf, np.array([5, 47, 16, 48, -1, 5]), 128, jnp.float32)
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.ci
@pytest.mark.parametrize("form", FLOAT_FORMS, ids=str)
def test_xla_multiplies_what_small_floats_stand_for(form: CodeForm) -> None:
    """ml_dtypes has E2M1, E4M3 and E8M0 of its own."""
    leaf, values = small_floats(np.random.default_rng(form.bits), form, 48, 384)
    assert CodeForm.of(leaf.shape[1], 384) == form
    np.testing.assert_array_equal(np.asarray(dequantised(jnp.asarray(leaf), 384, jnp.float32)), values)
    x = np.random.default_rng(1).standard_normal((5, 384)).astype(np.float32)
    got = np.asarray(matmul_codes(jnp.asarray(x), jnp.asarray(leaf)))
    exact = values.astype(np.float64)
    assert np.abs(got - x.astype(np.float64) @ exact.T).max() < 1e-5 * np.abs(exact).sum(axis=1).max()


def test_small_floats_lie_as_the_module_says() -> None:
    """Output 21 (block 1, q 1, place 1 of 4) and input 75 (tile 1, line 1, its input 3: h 1, odd)."""
    rng = np.random.default_rng(9)
    fours, bytes_ = rng.integers(0, 16, (32, 128), np.uint8), rng.integers(0, 127, (32, 128), np.uint8)
    powers = np.ldexp(np.float32(1), rng.integers(-9, 9, (32, 4))).astype(np.float32)
    leaf = np.zeros(E2M1.shape(32, 128), np.uint8)
    assert 8 * leaf.size / fours.size == 4.25
    pack_floats(leaf, fours, powers)
    tile = leaf[1, 544:1088]
    assert tile[16 * 0 + 5] == 127 + np.log2(powers[21, 2])
    assert tile[32 + 64 * 1 + 16 * 1 + 8 * 1 + 2 * 1 + 1] == fours[21, 75] | fours[21, 79] << 4
    scales = rng.standard_normal((32, 1)).astype(np.float32)
    leaf = np.zeros(E4M3.shape(32, 128), np.uint8)
    pack_floats(leaf, bytes_, scales)
    assert leaf[1, 32 * 37 + 2 * 5 + 1] == bytes_[21, 75]
    assert leaf[1, 128 * 16 :].view(np.float32)[5] == scales[21, 0]


def test_powers_at_the_ends_of_the_range() -> None:
    """2^-125 is the smallest that counts, and infinity makes its group infinite."""
    leaf, codes = np.zeros(E2M1.shape(16, 128), np.uint8), np.full((16, 128), 1, np.uint8)
    pack_floats(leaf, codes, np.tile(np.array([2.0**-126, 2.0**-125, 2.0**125, np.inf], np.float32), (16, 1)))
    got = np.asarray(dequantised(jnp.asarray(leaf), 128, jnp.float32))[3, ::GROUP]
    assert got.tolist() == [0, 2.0**-126, 2.0**124, np.inf]


def test_the_smallest_form_that_takes_all_is_chosen() -> None:
    eight, with_zeros = CodeForm(8), CodeForm(4, zeros=True)
    assert union([CodeForm(4), CodeForm(4)]) == CodeForm(4)
    assert union([CodeForm(4), with_zeros, eight]) == CodeForm(8, zeros=True)
    assert union([E4M3, E4M3]) == E4M3
    assert union([E4M3, E4M3_BY_GROUP]) == E4M3_BY_GROUP
    assert union([E2M1, E4M3]) is None
    assert union(NESTED_FORMS) == NESTED_FORMS[1]
    assert union([NESTED_FORMS[0], CodeForm(4)]) is None
    assert union(MINIMA_FORMS) == MINIMA_FORMS[1]
    assert union([MINIMA_FORMS[0], with_zeros]) is None
    assert union([TABLE_FORM, TABLE_FORM]) == TABLE_FORM
    assert union([TABLE_FORM, eight]) is None
    assert union([E2M1, CodeForm(4)]) is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e4])
def test_scales_of_16_bits_are_kept_exactly(dtype: type, size: float) -> None:
    """Those of bfloat16 also where they are beyond the range of float16."""
    if dtype is np.float16 and size == 1e-30:
        pytest.skip("float16 has no such numbers")
    rng = np.random.default_rng(3)
    scales = (rng.uniform(0.5, 100, (16, 4)) * size / 100).astype(dtype).astype(np.float32)
    leaf = np.zeros(CodeForm(4, False).shape(16, 128), np.uint8)
    pack_codes(leaf, np.full((16, 128), 9, np.uint8), scales, None)
    got = np.asarray(dequantised(jnp.asarray(leaf), 128, jnp.float32))
    np.testing.assert_array_equal(got, np.repeat(scales, GROUP, axis=1))


def squared_errors(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Of each group of 32, with the nearest of 16 codes around 8, in float64."""
    groups, scale = weight.reshape(-1, GROUP).astype(np.float64), scales.reshape(-1, 1).astype(np.float64)
    numbers = np.clip(np.rint(groups / scale), -8, 7)
    errors: np.ndarray = ((numbers * scale - groups) ** 2).sum(axis=1)
    return errors


def test_small_scales_beside_large_ones_are_rounded_where_the_module_says() -> None:
    """The factor of an output whose largest scale is 5 is 4. Below 4 * 2^-14 its scales are multiples of
    4 * 2^-24.
    """
    kept = np.float32(2.0**-12 * (1 + 2.0**-10))
    scales = np.full((16, 4), [5, kept, 5 * 2.0**-24, 6 * 2.0**-24], np.float32)
    leaf = np.empty(CodeForm(4).shape(16, 128), np.uint8)
    pack_codes(leaf, np.full((16, 128), 9, np.uint8), scales, None)
    values = np.asarray(dequantised(jnp.asarray(leaf), 128, jnp.dtype(np.float32)))
    np.testing.assert_array_equal(values[:, ::GROUP], np.full((16, 4), [5, kept, 2.0**-22, 2.0**-21]))


def test_scales_leave_less_squared_error_than_those_of_the_largest_value() -> None:
    """No group has more than with its largest value at -8, and all have a quarter less than with it at 7."""
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((64, 256)).astype(np.float32)
    codes, scales = quantise(weight)
    kept = ((codes.astype(np.float64) - 8) * np.repeat(scales, GROUP, axis=1) - weight) ** 2
    ours = kept.reshape(-1, GROUP).sum(axis=1)
    np.testing.assert_allclose(ours, squared_errors(weight, scales), rtol=1e-3)
    groups = weight.reshape(-1, GROUP)
    peaks = groups[np.arange(len(groups)), np.abs(groups).argmax(axis=1)]
    assert (ours <= squared_errors(weight, peaks / -8) * 1.0001).all()
    assert ours.sum() < 0.75 * squared_errors(weight, np.abs(peaks) / 7).sum()


def test_weights_that_are_not_finite_make_their_outputs_not_finite() -> None:
    weight = np.random.default_rng(5).standard_normal((16, 64)).astype(np.float32)
    weight[3, 40], weight[5, 2], weight[7] = np.nan, -np.inf, 0.0
    codes, scales = quantise(weight)
    leaf = np.zeros(CodeForm(4, False).shape(16, 64), np.uint8)
    pack_codes(leaf, codes, scales, None)
    got = np.asarray(matmul_codes(jnp.ones((1, 64)), jnp.asarray(leaf)))[0]
    assert np.isfinite(got).tolist() == [output not in (3, 5) for output in range(16)]
    assert got[7] == 0
