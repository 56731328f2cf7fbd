"""The form on the host of quantised weights: what it means, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.models.quantised import (
    Codes,
    FloatCodes,
    NestedCodes,
    OffsetCodes,
    PlaceCodes,
    quantised,
)
from penstock.runtime.ops.codes import (
    E2M1,
    E4M3,
    E4M3_BY_GROUP,
    MINIMA_FORMS,
    NESTED_FORMS,
    TABLE_FORM,
    CodeForm,
    dequantised,
)
from tests.support.native.codes import nested, places, with_minima

pytestmark = pytest.mark.ci


def test_a_value_is_scale_times_code_less_zero_in_the_order_of_inputs() -> None:
    codes = Codes(
        codes=np.array([[1, 2, 3, 15], [0, 8, 9, 7]], np.uint8),
        bits=4,
        scales=np.array([[0.5, 2.0], [1.0, 0.25]], np.float32),
        zeros=np.array([[1.0, 8.0], [0.0, 7.5]], np.float32),
        group=2,
        order=np.array([2, 0, 1, 3]),
    )
    in_columns = [[0.0, 0.5, -10.0, 14.0], [0.0, 8.0, 0.375, -0.125]]
    by_hand = [[row[1], row[2], row[0], row[3]] for row in in_columns]
    np.testing.assert_array_equal(codes.dequantised(), np.array(by_hand, np.float32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bits": 3}, "bits"),
        ({"codes": np.zeros((2, 4), np.int32)}, "codes"),
        ({"group": 3}, "group"),
        ({"scales": np.zeros((2, 1), np.float32)}, "scales"),
        ({"zeros": np.zeros((2, 2), np.float64)}, "zeros"),
        ({"order": np.array([0, 1, 1, 3])}, "order"),
    ],
)
def test_arrays_that_do_not_agree_are_refused_by_name(change: dict[str, object], says: str) -> None:
    right: dict[str, object] = {
        "codes": np.zeros((2, 4), np.int8),
        "bits": 8,
        "scales": np.ones((2, 2), np.float32),
        "zeros": None,
        "group": 2,
    }
    with pytest.raises(ValueError, match=says):
        Codes(**{**right, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("unsigned", [True, False])
@pytest.mark.parametrize("zeros", ["none", "half", "any"])
def test_packed_codes_mean_the_same(bits: int, unsigned: bool, zeros: str) -> None:
    """Groups of 64 repeat their scales. Where all zeros are half of the codes' range, none are stored."""
    rng = np.random.default_rng(bits)
    half = 1 << (bits - 1)
    codes = rng.integers(0, 2 * half, (48, 192))
    scales = rng.standard_normal((48, 3)).astype(np.float16).astype(np.float32)
    kept = rng.integers(0, 2 * half, scales.shape) if zeros == "any" else np.full(scales.shape, half)
    weight = Codes(
        codes=codes.astype(np.uint8) if unsigned else (codes - half).astype(np.int8),
        bits=bits,
        scales=scales,
        zeros=None if zeros == "none" else (kept - (0 if unsigned else half)).astype(np.float32),
        group=64,
    )
    form = weight.form()
    assert form is not None
    assert form.zeros == (zeros == "any" or (zeros == "none" and unsigned))
    leaf = np.zeros(form.shape(48, 192), np.uint8)
    weight.pack(leaf)
    got = np.asarray(dequantised(jnp.asarray(leaf), 192, jnp.float32))
    np.testing.assert_array_equal(got, weight.dequantised())
    some = weight.of_columns(slice(64, 192))
    np.testing.assert_array_equal(some.dequantised(), weight.dequantised()[:, 64:])
    with pytest.raises(ValueError, match="whole groups"):
        weight.of_columns(slice(32, 96))


def test_codes_that_a_leaf_cannot_hold_are_refused() -> None:
    def weight(bits: int = 4, group: int = 32, order: np.ndarray | None = None) -> Codes:
        scales = np.ones((16, 64 // group), np.float32)
        return Codes(np.zeros((16, 64), np.uint8), bits, scales, None, group, order)

    leaf = np.zeros(CodeForm(4, False).shape(16, 64), np.uint8)
    for unfit in (weight(), weight(bits=8), weight(group=16), weight(order=np.arange(64)[::-1])):
        with pytest.raises(ValueError, match="does not fit"):
            unfit.pack(leaf)


def test_codes_of_4_bits_fit_into_bytes() -> None:
    """Where other tensors of a leaf have 8 bits, with and without zeros."""
    rng = np.random.default_rng(7)
    codes, scales = rng.integers(0, 16, (16, 64)).astype(np.uint8), np.ones((16, 2), np.float32)
    for zeros in (np.full_like(scales, 8), rng.integers(0, 16, scales.shape).astype(np.float32)):
        weight = Codes(codes, 4, scales, zeros, 32)
        for form in (CodeForm(8), CodeForm(8, zeros=True)):
            if not form.zeros and (zeros != 8).any():
                continue
            leaf = np.zeros(form.shape(16, 64), np.uint8)
            weight.pack(leaf)
            got = np.asarray(dequantised(jnp.asarray(leaf), 64, jnp.float32))
            np.testing.assert_array_equal(got, weight.dequantised())


def test_the_parts_of_small_floats() -> None:
    """By hand: 0xB is -1.5, 0x7 is 6; a row's one scale is that of any of its columns."""
    weight = FloatCodes(np.array([[11, 7, 7, 11]], np.uint8), 4, np.array([[2.0, 0.5]], np.float32), 2)
    assert weight.dequantised().tolist() == [[-3.0, 12.0, 3.0, -0.75]]
    assert weight.of_columns(slice(2, 4)).dequantised().tolist() == [[3.0, -0.75]]
    with pytest.raises(ValueError, match="whole groups"):
        weight.of_columns(slice(1, 3))
    one_scale = FloatCodes(weight.codes, 4, np.array([[2.0]], np.float32), 4)
    assert one_scale.of_columns(slice(1, 3)).dequantised().tolist() == [[12.0, 12.0]]
    assert one_scale.in_groups_of(2).scales.tolist() == [[2.0, 2.0]]
    leaf = np.zeros(E4M3.shape(16, 256), np.uint8)
    blocks = FloatCodes(np.zeros((16, 256), np.uint8), 8, np.ones((16, 2), np.float32), 128)
    with pytest.raises(ValueError, match="does not fit"):
        blocks.pack(leaf)


def test_floats_become_the_nearest_small_floats() -> None:
    """ml_dtypes rounds to E2M1 and E4M3, ties to even; scales are those of the OCP's specification, and of
    the largest value.
    """
    weight = np.random.default_rng(8).standard_normal((16, 256)).astype(np.float32)
    weight[0, :9] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, 7.9]
    weight[1] = 0
    groups = weight.reshape(16, 8, 32)
    peaks = np.maximum(np.abs(groups).max(axis=2, keepdims=True), np.finfo(np.float32).tiny)
    powers = np.exp2(np.floor(np.log2(peaks.astype(np.float64))) - 2).astype(np.float32)
    nearest = np.clip(groups / powers, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * powers
    np.testing.assert_array_equal(quantised(weight, E2M1).dequantised(), nearest.reshape(16, 256))
    for form, group in ((E4M3, 256), (E4M3_BY_GROUP, 128)):
        groups = weight.reshape(16, -1, group)
        scales = np.abs(groups).max(axis=2, keepdims=True) / np.float32(448)
        numbers = np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0)
        nearest = numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
        np.testing.assert_array_equal(quantised(weight, form).dequantised(), nearest.reshape(16, 256))


def test_a_nested_value_is_scale_times_code_less_minimum() -> None:
    """By hand, of the first input of each group of 32."""
    codes = np.zeros((1, 64), np.int8)
    codes[0, ::32] = [15, 2]
    factors = np.array([[[0.5, 0.25]]], np.float16)
    weight = NestedCodes(codes, 4, np.array([[3, 63]], np.int8), np.array([[2, 10]], np.int8), factors)
    assert weight.dequantised()[0, [0, 1, 32, 33]].tolist() == [22.0, -0.5, 60.5, -2.5]


@pytest.mark.parametrize("form", NESTED_FORMS, ids=lambda form: f"{form.bits} bits")
def test_packed_nested_codes_mean_the_same(form: CodeForm) -> None:
    """In bytes of their own, and those of 4 bits also in those of 6."""
    weight = nested(np.random.default_rng(form.bits), form, 32, 256)
    for given in NESTED_FORMS:
        leaf = np.zeros(given.shape(32, 256), np.uint8)
        if given.bits < form.bits:
            with pytest.raises(ValueError, match="does not fit"):
                weight.pack(leaf)
            continue
        weight.pack(leaf)
        found = np.asarray(jax.jit(dequantised, static_argnums=(1, 2))(leaf, 256, jnp.float32))
        np.testing.assert_array_equal(found, weight.dequantised())
    some = weight.of_columns(slice(64, 192)).of_rows(np.array([3, 1]))
    np.testing.assert_array_equal(some.dequantised(), weight.dequantised()[[3, 1], 64:192])
    with pytest.raises(ValueError, match="whole parts of 64"):
        weight.of_columns(slice(32, 96))


@pytest.mark.parametrize("size", [0.02, 5e-5])
@pytest.mark.parametrize("form", NESTED_FORMS, ids=lambda form: f"{form.bits} bits")
def test_floats_become_nested_integers_to_half_a_step(form: CodeForm, size: float) -> None:
    """A scale is rounded to a 127th of the largest of 64 inputs, which may cut off the ends of a group by a
    few of its steps where its own scale is much smaller. An output of zeros stays so. Small weights have
    factors of which float16 has few.
    """
    weight = np.random.default_rng(form.bits).standard_normal((32, 256)).astype(np.float32) * np.float32(size)
    weight[5] = 0
    kept = quantised(weight, form).dequantised()
    assert (kept[5] == 0).all()
    spans = np.abs(weight).reshape(32, 4, 64).max(axis=2)
    steps = 2 * spans / 15 if form.bits == 4 else spans / 31
    assert (np.abs(kept - weight).reshape(32, 4, 64) <= 0.75 * steps[:, :, None]).all()
    errors = np.sqrt(((kept - weight) ** 2).mean() / (weight**2).mean())
    assert errors < (0.09 if form.bits == 4 else 0.022)


def test_offsets_and_places_by_hand() -> None:
    codes = np.array([[3, 0] * 16 + [15, 1] * 16], np.uint8)
    scales, offsets = np.array([[0.5, 2.0]], np.float32), np.array([[-1.0, 4.0]], np.float32)
    found = OffsetCodes(codes, 4, scales, offsets, 32).dequantised()
    assert found[0, [0, 1, 32, 33]].tolist() == [0.5, -1.0, 34.0, 6.0]
    with_factor = PlaceCodes(codes, np.array([[-2, 31]], np.int8), np.array([[0.5]], np.float16))
    assert with_factor.dequantised()[0, [0, 1, 32, 33]].tolist() == [65.0, 127.0, 15.5 * 113, 15.5 * -104]


@pytest.mark.parametrize("form", [*MINIMA_FORMS, TABLE_FORM], ids=str)
def test_packed_offsets_and_places_mean_the_same(form: CodeForm) -> None:
    """To the last bit, also in bytes for codes of more bits; parts of whole groups can be taken out."""
    rng = np.random.default_rng(form.bits)
    weight = places(rng, 32, 256) if form.table else with_minima(rng, form, 32, 256)
    for given in (*MINIMA_FORMS, TABLE_FORM):
        leaf = np.zeros(given.shape(32, 256), np.uint8)
        if not given.takes(form):
            with pytest.raises(ValueError, match="does not fit"):
                weight.pack(leaf)
            continue
        weight.pack(leaf)
        assert CodeForm.of(leaf.shape[1], 256) == given
        found = np.asarray(jax.jit(dequantised, static_argnums=(1, 2))(leaf, 256, jnp.float32))
        np.testing.assert_array_equal(found, weight.dequantised())
    some = weight.of_columns(slice(64, 192)).of_rows(np.array([3, 1]))
    np.testing.assert_array_equal(some.dequantised(), weight.dequantised()[[3, 1], 64:192])
    with pytest.raises(ValueError, match="whole"):
        weight.of_columns(slice(16, 96))


@pytest.mark.parametrize("size", [0.02, 5e-5])
@pytest.mark.parametrize("form", [*MINIMA_FORMS, TABLE_FORM], ids=str)
def test_floats_become_offsets_and_places_to_half_a_step(form: CodeForm, size: float) -> None:
    """An output of zeros stays so. The table's steps have 6 to 26 127ths of its larger end; a scale of it is
    rounded to a 127th of the largest of 64 inputs. An offset is rounded to 11 bits.
    """
    weight = np.random.default_rng(form.bits).standard_normal((32, 256)).astype(np.float32) * np.float32(size)
    weight[5] = 0
    kept = quantised(weight, form).dequantised()
    assert (kept[5] == 0).all()
    groups = weight.reshape(32, 8, 32)
    if form.table:
        steps = np.abs(weight).reshape(32, 4, 64).max(axis=2).repeat(2, axis=1) * 26 / 127
    else:
        steps = (groups.max(axis=2) - groups.min(axis=2)) / ((1 << form.bits) - 1)
    bound = (1.0 if form.table else 0.55) * steps + (
        0 if form.table else np.abs(groups).max(axis=2) * 2.0**-11
    )
    assert (np.abs(kept.reshape(groups.shape) - groups) <= bound[:, :, None]).all()


@pytest.mark.parametrize(
    "form", [E2M1, E4M3, E4M3_BY_GROUP, *NESTED_FORMS, *MINIMA_FORMS, TABLE_FORM], ids=str
)
def test_what_is_no_number_stays_none(form: CodeForm) -> None:
    """Of its own output; the others stay numbers."""
    weight = np.ones((16, 128), np.float32)
    weight[3, 40], weight[5, 2] = np.nan, -np.inf
    leaf = np.zeros(form.shape(16, 128), np.uint8)
    with np.errstate(invalid="ignore"):
        quantised(weight, form).pack(leaf)
    sums = np.asarray(dequantised(jnp.asarray(leaf), 128, jnp.float32)).sum(axis=1)
    assert np.isfinite(sums).tolist() == [output not in (3, 5) for output in range(16)]
