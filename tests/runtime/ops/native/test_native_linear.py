"""The native linear layers, compared with numpy in float64, on every instruction set of this machine and on
emulated ones. A row's bits must depend on the row alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.codes import (
    FLOAT_FORMS,
    FORMS,
    GROUP,
    MINIMA_FORMS,
    NESTED_FORMS,
    TABLE,
    TABLE_FORM,
    CodeForm,
    pack_codes,
)
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.linear import Packed, can_pack, linear, pack, packed_shape, quantize, unpack
from tests.support.native.codes import code_leaf, nested, places, small_floats, stands_for, with_minima
from tests.support.native.kernels import EMULATED_AMX, kernel_params, running, threads_with_tiles
from tests.support.suite.drawing import few

BF16 = ml_dtypes.bfloat16

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(params=kernel_params(), autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def draw(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(BF16)


KINDS = ("bf16", "int8", "int4")


def packed(weight: np.ndarray, kind: str, bias: np.ndarray | None = None) -> Packed:
    added = None if bias is None else jnp.asarray(bias)
    if kind == "bf16":
        return Packed(jnp.asarray(pack(weight)), None, added)
    if kind == "int4":
        return Packed(jnp.asarray(code_leaf(weight)), None, added)
    values, scale = quantize(weight)
    return Packed(jnp.asarray(pack(values)), jnp.asarray(scale), added)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def close(got: Any, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(wide(got) - expected).max() <= tolerance * expected.std()


# Numbers of rows below, at and beyond a block of 16 and a pair of blocks, with padding rows behind them.
SIZES = [
    (1, 4, 64, 32),
    (3, 4, 192, 48),
    (16, 16, 1024, 96),
    (17, 32, 128, 64),
    (33, 48, 64, 16),
    (70, 80, 320, 80),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "padded", "inner", "out"), few(SIZES, SIZES[::3], ci=SIZES))
def test_products_norm_residual_and_gate(kind: str, rows: int, padded: int, inner: int, out: int) -> None:
    rng = np.random.default_rng(rows * inner + out)
    x, residual = draw(rng, padded, inner), draw(rng, padded, out)
    x[rows:] = np.nan  # padding may hold anything
    first, second, third = (draw(rng, out, inner, scale=0.05) for _ in range(3))
    exact = [wide(weight) for weight in (first, second, third)]
    bias, norm = draw(rng, out), draw(rng, inner) + BF16(1)
    count = jnp.int32(rows)
    real = wide(x[:rows])
    if kind == "int4":
        exact = [stands_for(weight) for weight in exact]
    # int8 rounds twice, to about 1/254 of each row's peak; bf16 rounds norm and result to 2^-9.
    loose, gated = {"bf16": (0.03, 0.06), "int8": (0.08, 0.35), "int4": (0.08, 0.35)}[kind]

    both = linear(
        jnp.asarray(x),
        (packed(first, kind, bias), packed(second, kind), packed(third, kind)),
        num_rows=count,
        norm=jnp.asarray(norm),
        eps=1e-5,
        out_dtype=np.float32,
    )
    normed = real / np.sqrt((real**2).mean(axis=1, keepdims=True) + 1e-5) * wide(norm)
    parts = [normed @ weight.T for weight in exact]
    parts[0] += wide(bias)
    close(both[:rows], np.concatenate(parts, axis=1), loose)

    added = linear(jnp.asarray(x), (packed(first, kind),), num_rows=count, residual=jnp.asarray(residual))
    close(added[:rows], real @ exact[0].T + wide(residual[:rows]), loose)

    mixed = linear(
        jnp.asarray(x), (packed(first, kind, bias), packed(second, kind)), num_rows=count, gate="silu"
    )
    gate = real @ exact[0].T + wide(bias)
    close(mixed[:rows], gate / (1 + np.exp(-gate)) * (real @ exact[1].T), gated)


WITNESSED = [
    *([rows] for rows in (1, 2, 5, 16, 37)),
    *(pytest.param(range(least, least + 10), marks=pytest.mark.sweep) for least in range(1, 71, 10)),
]
"""Numbers of rows that a test tries one after the other."""


@pytest.mark.parametrize("counts", WITNESSED)
def test_products_are_within_the_bound_of_a_chain_of_sums(counts: Iterable[int]) -> None:
    """A sum of k products in float32, each rounded once or twice, is off by at most 2 k 2^-24 of the sum of
    their sizes, to first order.
    """
    for rows in counts:
        rng = np.random.default_rng(rows)
        x, weight = draw(rng, 80, 832), draw(rng, 48, 832, scale=0.05)
        got = linear(
            jnp.asarray(x), (packed(weight, "bf16"),), num_rows=jnp.int32(rows), out_dtype=np.float32
        )
        bound = 2 * 832 * 2.0**-24 * (np.abs(wide(x[:rows])) @ np.abs(wide(weight)).T)
        assert (np.abs(wide(got[:rows]) - wide(x[:rows]) @ wide(weight).T) <= bound).all()


@pytest.mark.parametrize("counts", WITNESSED)
def test_int8_products_are_a_chain_of_whole_numbers_times_the_scales(
    kernel: str, counts: Iterable[int]
) -> None:
    """A group's sum is known exactly; each of its links rounds a few times to 2^-24 of the sizes so far. AMX
    has one group for a row, of numbers of 16 bits, of which the upper and the lower bytes are summed apart.
    """
    for rows in counts:
        rng = np.random.default_rng(rows)
        inner, out = 832, 48
        is_wide = kernel.startswith("amx")
        group, most = (inner, 32512) if is_wide else (GROUP, 127)
        x, (values, scale) = draw(rng, 80, inner), quantize(draw(rng, out, inner, scale=0.05))
        weight = Packed(jnp.asarray(pack(values)), jnp.asarray(scale))
        got = linear(jnp.asarray(x), (weight,), num_rows=jnp.int32(rows), out_dtype=np.float32)
        real = x[:rows].astype(np.float32).reshape(rows, -1, group)
        peaks = np.abs(real).max(axis=2, keepdims=True)
        numbers = np.rint(real * (np.float32(most) / peaks)).astype(np.int64)
        grouped = values.reshape(out, -1, group).astype(np.int64)
        sums = np.einsum("rgi,ogi->rog", numbers, grouped)
        scales = (wide(peaks) / most).swapaxes(1, 2) * wide(scale)[:, None]
        links, sizes = sums * scales, np.abs(sums) * scales
        if is_wide:  # the two sums may have other signs
            upper = numbers + 128 >> 8
            sizes = np.abs(256 * np.einsum("rgi,ogi->rog", upper, grouped)) * scales
            sizes += np.abs(np.einsum("rgi,ogi->rog", numbers - 256 * upper, grouped)) * scales
        bound = (inner // group + 4) * 2.0**-24 * sizes.sum(axis=2)
        assert (np.abs(wide(got[:rows]) - links.sum(axis=2)) <= bound).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.bits} bits{' and zeros' * form.zeros}")
@pytest.mark.parametrize("counts", WITNESSED)
def test_products_of_codes_are_a_chain_of_whole_numbers_times_two_scales(
    form: CodeForm, counts: Iterable[int]
) -> None:
    """A group's sum is known exactly; each of its links rounds four times to 2^-24 of the sizes so far."""
    for rows in counts:
        rng = np.random.default_rng(rows)
        inner, out = 832, 48
        groups = inner // GROUP
        codes = rng.integers(0, 1 << form.bits, (out, inner)).astype(np.uint8)
        scales = (rng.standard_normal((out, groups)) * 0.01).astype(np.float16).astype(np.float32)
        zeros = rng.integers(0, 1 << form.bits, (out, groups)).astype(np.float32)
        if not form.zeros:
            zeros[:] = form.middle
        leaf = np.empty(form.shape(out, inner), np.uint8)
        pack_codes(leaf, codes, scales, zeros if form.zeros else None)
        x = draw(rng, 80, inner)
        x[0, :GROUP] = 0  # a group without a peak
        got = linear(
            jnp.asarray(x), (Packed(jnp.asarray(leaf)),), num_rows=jnp.int32(rows), out_dtype=np.float32
        )
        grouped = x[:rows].astype(np.float32).reshape(rows, groups, GROUP)
        peaks = np.abs(grouped).max(axis=2, keepdims=True)
        inverse = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 0)
        numbers = np.rint(grouped * inverse).astype(np.int64)
        centred = codes.reshape(out, groups, GROUP).astype(np.int64) - zeros.astype(np.int64)[:, :, None]
        links = (
            np.einsum("rgi,ogi->rog", numbers, centred) * wide(scales) * (wide(peaks) / 127).swapaxes(1, 2)
        )
        bound = (groups + 4) * 2.0**-24 * np.abs(links).sum(axis=2)
        assert (np.abs(wide(got[:rows]) - links.sum(axis=2)) <= bound).all()


@pytest.mark.parametrize("form", NESTED_FORMS, ids=lambda form: f"{form.bits} bits")
@pytest.mark.parametrize("counts", WITNESSED)
def test_products_of_nested_codes_are_a_chain_of_whole_numbers_times_scales_less_minima(
    form: CodeForm, counts: Iterable[int]
) -> None:
    """A group's sums of products and of inputs are known exactly. Each link rounds a few times to 2^-24 of
    their sizes, where codes of 6 bits count from -32.
    """
    assert form.group is not None
    for rows in counts:
        rng = np.random.default_rng(rows)
        inner, out = 896, 48
        weight = nested(rng, form, out, inner)
        leaf = np.empty(form.shape(out, inner), np.uint8)
        weight.pack(leaf)
        x = draw(rng, 80, inner)
        x[0, :GROUP] = 0  # a group without a peak
        got = linear(
            jnp.asarray(x), (Packed(jnp.asarray(leaf)),), num_rows=jnp.int32(rows), out_dtype=np.float32
        )
        grouped = x[:rows].astype(np.float32).reshape(rows, -1, GROUP)
        peaks = np.abs(grouped).max(axis=2, keepdims=True)
        inverse = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 0)
        numbers = np.rint(grouped * inverse).astype(np.int64).reshape(rows, -1, form.group)
        of_rows = np.repeat(wide(peaks)[:, :, 0] / 127, GROUP // form.group, axis=1)[:, None]
        factors = np.repeat(wide(weight.factors), 64 // form.group, axis=1)
        scales, minima = factors[:, :, 0] * weight.scales, factors[:, :, 1] * weight.minima
        codes = weight.codes.reshape(out, -1, form.group).astype(np.int64)
        products = np.einsum("rgi,ogi->rog", numbers, codes) * scales
        taken = numbers.sum(axis=2)[:, None] * minima
        sizes = np.abs(products) + np.abs(numbers).sum(axis=2)[:, None] * (
            np.abs(minima) + 64 * np.abs(scales)
        )
        bound = (codes.shape[1] + 6) * 2.0**-24 * (sizes * of_rows).sum(axis=2)
        exact = ((products - taken) * of_rows).sum(axis=2)
        assert (np.abs(wide(got[:rows]) - exact) <= bound).all()


@pytest.mark.parametrize("form", [*MINIMA_FORMS, TABLE_FORM], ids=str)
@pytest.mark.parametrize("counts", WITNESSED)
def test_products_with_minima_and_of_places_are_a_chain_of_whole_numbers(
    form: CodeForm, counts: Iterable[int]
) -> None:
    """As those of nested codes: a group's sums are known exactly, and each link rounds a few times."""
    for rows in counts:
        rng = np.random.default_rng(rows)
        inner, out = 832, 48
        leaf = np.empty(form.shape(out, inner), np.uint8)
        if form.table:
            of_places = places(rng, out, inner)
            of_places.pack(leaf)
            scales = of_places.scales * np.repeat(wide(of_places.factors), 2, axis=1)
            minima, codes = np.zeros_like(scales), TABLE[of_places.codes].astype(np.int64)
        else:
            weight = with_minima(rng, form, out, inner)
            weight.pack(leaf)
            scales, minima, codes = wide(weight.scales), -wide(weight.offsets), weight.codes.astype(np.int64)
        x = draw(rng, 80, inner)
        x[0, :GROUP] = 0  # a group without a peak
        got = linear(
            jnp.asarray(x), (Packed(jnp.asarray(leaf)),), num_rows=jnp.int32(rows), out_dtype=np.float32
        )
        grouped = x[:rows].astype(np.float32).reshape(rows, -1, GROUP)
        peaks = np.abs(grouped).max(axis=2, keepdims=True)
        inverse = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 0)
        numbers = np.rint(grouped * inverse).astype(np.int64)
        of_rows = wide(peaks)[:, None, :, 0] / 127
        products = np.einsum("rgi,ogi->rog", numbers, codes.reshape(out, -1, GROUP)) * scales
        taken = numbers.sum(axis=2)[:, None] * minima
        sizes = (np.abs(products) + np.abs(taken)) * of_rows
        bound = (sizes.shape[2] + 6) * 2.0**-24 * sizes.sum(axis=2)
        exact = ((products - taken) * of_rows).sum(axis=2)
        assert (np.abs(wide(got[:rows]) - exact) <= bound).all()


@pytest.mark.parametrize(
    "form", [FLOAT_FORMS[0], *(pytest.param(form, marks=pytest.mark.ci) for form in FLOAT_FORMS[1:])], ids=str
)
def test_small_floats_have_the_bits_of_the_weight_in_bfloat16(form: CodeForm) -> None:
    """With any number of rows, whose inputs are cut in unequal parts, and an odd number of blocks. What a
    weight in bfloat16 gives is compared with numpy by the other tests.
    """
    rng = np.random.default_rng(form.bits)
    inner, out = 896, 48
    leaves, values = zip(*(small_floats(rng, form, out, inner) for _ in range(2)), strict=True)
    small = [Packed(jnp.asarray(leaf)) for leaf in leaves]
    whole = [Packed(jnp.asarray(pack(value.astype(BF16)))) for value in values]
    for rows in (1, 2, 16, 17, 70, 300):
        x, count = jnp.asarray(draw(rng, rows, inner)), jnp.int32(rows)
        for options in {"out_dtype": np.float32}, {"gate": "silu"}:
            got, expected = (
                np.asarray(linear(x, tuple(weights), num_rows=count, **options)) for weights in (small, whole)
            )
            np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(("rows", "padded"), [(1, 4), (37, 40)])
def test_weights_of_one_call_may_differ_in_their_formats(rows: int, padded: int) -> None:
    """q, k and v of a file may have codes of three kinds, or be floats. Each part has the bits that it has
    alone, and stands where it belongs.
    """
    rng, (num_out, inner) = np.random.default_rng(rows), (48, 256)
    x, norm, bias = draw(rng, padded, inner), draw(rng, inner) + BF16(1), draw(rng, 5 * num_out)
    x[rows:] = np.nan
    floats = [draw(rng, num_out, inner, scale=0.05) for _ in range(2)]
    of_codes = [nested(rng, form, num_out, inner) for form in NESTED_FORMS] + [places(rng, num_out, inner)]
    leaves = [np.zeros(each.form().shape(num_out, inner), np.uint8) for each in of_codes]
    for each, leaf in zip(of_codes, leaves, strict=True):
        each.pack(leaf)
    exact = [*(wide(each.dequantised()) for each in of_codes), *map(wide, floats)]
    first = [*map(jnp.asarray, leaves), jnp.asarray(pack(floats[0]))]
    weights = [
        Packed(leaf, None, jnp.asarray(bias), bias_at=number * num_out) for number, leaf in enumerate(first)
    ]
    int8 = packed(floats[1], "int8", bias)
    weights.append(int8._replace(bias_at=4 * num_out))

    def product(*chosen: int) -> np.ndarray:
        return np.asarray(
            linear(
                jnp.asarray(x),
                tuple(weights[number] for number in chosen),
                num_rows=jnp.int32(rows),
                norm=jnp.asarray(norm),
                eps=1e-5,
                out_dtype=np.float32,
            )
        )[:rows]

    real = wide(x[:rows])
    normed = real / np.sqrt((real**2).mean(axis=1, keepdims=True) + 1e-5) * wide(norm)
    for chosen in ((0, 1, 3), (3, 2), (4, 0, 4), (1, 1, 2)):
        together = product(*chosen)
        np.testing.assert_array_equal(together, np.concatenate([product(one) for one in chosen], axis=1))
        for at, number in enumerate(chosen):
            part = slice(at * num_out, (at + 1) * num_out)
            wanted = normed @ exact[number].T + wide(bias[number * num_out : (number + 1) * num_out])
            close(together[:, part], wanted, 0.08)


def test_a_gate_and_what_it_opens_have_one_format() -> None:
    rng = np.random.default_rng(5)
    weights = packed(draw(rng, 16, 64), "bf16"), packed(draw(rng, 16, 64), "int4")
    with pytest.raises(jax.errors.JaxRuntimeError, match="gated layer differ in their format"):
        linear(jnp.asarray(draw(rng, 1, 64)), weights, num_rows=jnp.int32(1), gate="silu").block_until_ready()


def test_exact_small_integers() -> None:
    """Products of small integers are exact in bf16, so the result must be exact, and a wrong layout is
    found.
    """
    rng = np.random.default_rng(5)
    x, weight = rng.integers(-4, 5, (40, 256)), rng.integers(-4, 5, (48, 256))
    got = linear(
        jnp.asarray(x.astype(BF16)),
        (packed(weight.astype(BF16), "bf16"),),
        num_rows=jnp.int32(40),
        out_dtype=np.float32,
    )
    np.testing.assert_array_equal(np.asarray(got), (x @ weight.T).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(kind: str) -> None:
    """A row has the same bits alone and at any place beside any number of other rows."""
    rng = np.random.default_rng(6)
    # An odd number of blocks, and so many inputs and rows that they are cut in unequal parts.
    inner, out, most = 832, 48, 500
    first, second = (packed(draw(rng, out, inner, scale=0.05), kind, draw(rng, out)) for _ in range(2))
    third = packed(draw(rng, 16, inner), kind)
    x, residual, norm = draw(rng, most, inner), draw(rng, most, out), jnp.asarray(draw(rng, inner))

    @functools.cache
    def programs(padded: int) -> Any:
        def run(rows: jax.Array, added: jax.Array, count: jax.Array) -> list[jax.Array]:
            return [
                linear(rows, (first, second, third), num_rows=count, out_dtype=np.float32),
                linear(rows, (first,), num_rows=count, residual=added),
                linear(rows, (first, second), num_rows=count, norm=norm, eps=1e-5, gate="silu"),
            ]

        return jax.jit(run)

    def run(rows: np.ndarray) -> list[np.ndarray]:
        padded = -(-len(rows) // 16) * 16
        filled = np.resize(rows, padded)
        results = programs(padded)(x[filled], residual[filled], jnp.int32(len(rows)))
        return [np.asarray(result)[: len(rows)].view(np.uint8) for result in results]

    alone = [
        np.concatenate(results)
        for results in zip(*(run(np.array([row])) for row in range(most)), strict=True)
    ]
    for count in (2, 4, 7, 15, 16, 17, 25, 31, 32, 33, 64, 161, most):
        rows = rng.permutation(most)[:count]
        for together, one_by_one in zip(run(rows), alone, strict=True):
            np.testing.assert_array_equal(together, one_by_one[rows], err_msg=f"{count} rows")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_take_several_passes_do_not_depend_on_each_other(kind: str) -> None:
    """There are so many inputs that AMX takes the rows in several passes: the second-level cache cannot hold
    all of them.
    """
    rng = np.random.default_rng(9)
    inner = 16512
    weight, x = packed(draw(rng, 16, inner, scale=0.05), kind), draw(rng, 100, inner)

    def run(begin: int, end: int) -> np.ndarray:
        rows, count = jnp.asarray(np.roll(x, -begin, 0)), jnp.int32(end - begin)
        return np.asarray(linear(rows, (weight,), num_rows=count, out_dtype=np.float32))[: end - begin]

    together = run(0, 100)
    for begin, end in [(0, 1), (20, 27), (5, 21), (35, 99)]:
        np.testing.assert_array_equal(run(begin, end), together[begin:end])


@pytest.mark.parametrize(("inner", "least"), [(192, -128), (4096, 64)])
def test_int8_sums_are_exact(inner: int, least: int) -> None:
    """Groups whose peak is 127 are quantized without a change, so the sums are whole numbers that are known
    exactly. With 4,096 large weights an offset of 128 in the activations would bring the sums beyond 2^24.
    """
    rng = np.random.default_rng(8)
    x = rng.integers(-126, 127, (37, inner))
    x[:, ::GROUP], x[3] = 127, np.resize([127, -127], inner)
    values = rng.integers(least, 128, (32, inner)).astype(np.int8)
    weight = Packed(jnp.asarray(pack(values)), jnp.ones(32, jnp.float32))
    got = linear(jnp.asarray(x.astype(BF16)), (weight,), num_rows=jnp.int32(37), out_dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(got), (x @ values.T.astype(np.int64)).astype(np.float32))


def test_sums_of_int8_with_the_most_inputs_that_are_packed_fit_into_an_int32() -> None:
    """Both bytes of each number of 16 bits have the largest size."""
    most = 1 << 17
    assert can_pack(16, most)
    assert not can_pack(16, most + 64)
    x = np.full((2, most), -1, BF16)
    x[1], x[1, 0] = BF16(-255 / 256), 1
    weight = Packed(jnp.asarray(pack(np.full((16, most), 127, np.int8))), jnp.ones(16, jnp.float32))
    got = linear(jnp.asarray(x), (weight,), num_rows=jnp.int32(2), out_dtype=np.float32)
    expected = 127 * wide(x).sum(axis=1, keepdims=True)
    assert (np.abs(wide(got) - expected) <= 2.0**-12 * np.abs(expected)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_nan_or_infinity_is_not_finite_and_the_others_keep_their_bits(kind: str) -> None:
    """If the row came out finite, it would be served as an answer."""
    rng = np.random.default_rng(10)
    weight, other = (packed(draw(rng, 32, 192, scale=0.05), kind) for _ in range(2))
    norm = jnp.asarray(draw(rng, 192))
    clean = draw(rng, 40, 192)
    spoiled = {0: np.nan, 7: -np.nan, 16: np.inf, 33: -np.inf}
    x = clean.copy()
    for row, value in spoiled.items():
        x[row, row * 3] = value

    def run(rows: np.ndarray, count: int) -> list[np.ndarray]:
        given, num_rows = jnp.asarray(rows), jnp.int32(count)
        results = [
            linear(given, (weight,), num_rows=num_rows, out_dtype=np.float32),
            linear(given, (weight,), num_rows=num_rows, norm=norm, eps=1e-5, out_dtype=np.float32),
            linear(given, (weight,), num_rows=num_rows, residual=given[:, :32]),
            linear(given, (weight, other), num_rows=num_rows, gate="silu"),
        ]
        return [np.asarray(result)[:count].astype(np.float32) for result in results]

    others = [row for row in range(len(x)) if row not in spoiled]
    for dirty, whole, alone in zip(run(x, 40), run(clean, 40), run(x, 1), strict=True):
        np.testing.assert_array_equal(dirty[others], whole[others])
        assert not np.isfinite(dirty[list(spoiled)]).any()
        assert np.isnan(dirty[[0, 7]]).all()
        assert np.isnan(alone).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 40])
def test_amx_tiles_are_released(kernel: str, kind: str, rows: int) -> None:
    """Otherwise the system saves 8 KiB of tiles whenever it switches threads."""
    if kernel != EMULATED_AMX:
        pytest.skip("only emulated tiles are counted")
    rng = np.random.default_rng(11)
    x = jnp.asarray(draw(rng, rows, 64))
    np.asarray(linear(x, (packed(draw(rng, 32, 64), kind),), num_rows=jnp.int32(rows)))
    assert threads_with_tiles() == 0


@pytest.mark.parametrize("dtype", [BF16, np.int8])
def test_packing_is_a_permutation(dtype: type) -> None:
    weight = (
        np.arange(32 * 128)
        .reshape(32, 128)
        .astype(np.int8 if dtype is np.int8 else np.int16)
        .view(np.int8 if dtype is np.int8 else BF16)
    )
    tiles = pack(weight)
    assert tiles.shape == packed_shape(32, 128, int8=dtype is np.int8)
    np.testing.assert_array_equal(unpack(tiles), weight)
    group = 4 if dtype is np.int8 else 2
    # The place of output 17 and input 70: block, tile, group of inputs, output within the block, input within
    # the group.
    per_tile = 16 * group
    assert tiles[1, 70 // per_tile, 70 % per_tile // group, 1, 70 % group] == weight[17, 70]


def test_quantized_weights_are_within_half_a_step() -> None:
    weight = draw(np.random.default_rng(7), 16, 64)
    values, scale = quantize(weight)
    assert np.abs(values * scale[:, None] - wide(weight)).max() <= scale.max() / 2 * 1.0001
    zero, scale = quantize(np.zeros((16, 64), BF16))
    assert not zero.any()
    assert np.isfinite(scale).all()
