"""The native layers in float32, compared with numpy in float64, on every instruction set of this machine. A
row's bits must depend on the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.float32 import can_pack, multiply, multiply_apart
from penstock.runtime.ops.native.linear import pack, unpack
from tests.support.native.kernels import EMULATED_AMX, kernel_params, running, threads_with_tiles
from tests.support.suite.drawing import few

EPS = 1e-6
UNIT = 2.0**-24
"""The largest relative error of one rounding to float32."""

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(params=kernel_params("avx2", "avx512", "amx", EMULATED_AMX, "avx512_emulated"), autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param
        assert request.param != EMULATED_AMX or threads_with_tiles() == 0


class Layer:
    """Drawn operands, and what the layer makes of them in float64."""

    def __init__(self, rng: np.random.Generator, rows: int, out_size: int, in_size: int) -> None:
        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        self.rows, self.out_size = rows, out_size
        self.x, self.weight, self.residual = (
            draw(rows, in_size),
            draw(out_size, in_size),
            draw(rows, out_size),
        )
        self.pool = draw(3 * out_size + 16)
        places = (8, 8 + out_size, 16 + 2 * out_size)
        self.places = dict(zip(("bias_at", "norm_at", "norm_bias_at"), places, strict=True))
        self.tiles = jnp.asarray(pack(self.weight))

    def call(self, first: int = 0, last: int | None = None, padding: int = 0, **options: Any) -> np.ndarray:
        """Compute some of the rows, before so many rows of padding, which may hold anything."""
        rows = slice(first, self.rows if last is None else last)
        x = np.pad(self.x[rows], ((0, padding), (0, 0)), constant_values=np.nan)
        if options.pop("residual", False):
            options["residual"] = np.pad(self.residual[rows], ((0, padding), (0, 0)))
        count = len(x) - padding
        made = multiply(
            jnp.asarray(x), self.tiles, jnp.asarray(self.pool), num_rows=jnp.int32(count), **options
        )
        return np.asarray(made)[:count]

    def apart(self, widths: Sequence[int], bias_at: int | None) -> list[np.ndarray]:
        """Compute the product with its outputs in arrays of these widths, before three rows of padding."""
        x = jnp.asarray(np.pad(self.x, ((0, 3), (0, 0)), constant_values=np.nan))
        pool, rows = jnp.asarray(self.pool), jnp.int32(self.rows)
        made = multiply_apart(x, self.tiles, pool, widths, num_rows=rows, bias_at=bias_at)
        return [np.asarray(part)[: self.rows] for part in made]

    def at(self, name: str) -> np.ndarray:
        begin = self.places[name]
        return self.pool[begin : begin + self.out_size].astype(np.float64)

    def product(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the exact products, and how far a chain of rounded ones may be from them (Higham,
        Accuracy and Stability of Numerical Algorithms, 3.1).
        """
        x, weight = self.x.astype(np.float64), self.weight.astype(np.float64)
        return x @ weight.T, np.abs(x) @ np.abs(weight.T) * x.shape[1] * UNIT * 1.01


# Few and many rows, panels of every size, more rows than a unit has, odd numbers of blocks, and long sums.
SIZES = [(1, 16, 16), (5, 48, 112), (13, 384, 384), (97, 80, 48), (200, 112, 32), (26, 32, 1552)]


@pytest.mark.parametrize(("rows", "out_size", "in_size"), few(SIZES, (SIZES[2], SIZES[3]), ci=SIZES))
def test_every_part_of_the_formula(rows: int, out_size: int, in_size: int) -> None:
    layer = Layer(np.random.default_rng(rows), rows, out_size, in_size)
    exact, error = layer.product()
    assert (np.abs(layer.call(padding=3) - exact) <= error).all()
    with_bias = exact + layer.at("bias_at")
    bias = {"bias_at": layer.places["bias_at"]}
    error = error + 4 * UNIT * (np.abs(exact) + np.abs(layer.residual) + np.abs(with_bias))
    added = layer.call(residual=True, **bias)
    assert (np.abs(added - (with_bias + layer.residual)) <= error).all()
    gelu = np.vectorize(lambda value: value * math.erfc(-value / math.sqrt(2)) / 2)(with_bias)
    # The slope of GELU is at most 1.13, so the error of what it is given grows no more.
    assert (np.abs(layer.call(plain="gelu", **bias) - gelu) <= 1.2 * error + 4e-7 * np.abs(gelu)).all()
    inner = np.sqrt(2 / np.pi) * (with_bias + 0.044715 * with_bias**3)
    by_tanh = with_bias / (1 + np.exp(np.minimum(-2 * inner, 700)))
    assert (
        np.abs(layer.call(plain="gelu_tanh", **bias) - by_tanh) <= 1.2 * error + 4e-6 * np.abs(by_tanh)
    ).all()
    # Layer norm, of the kernel's own sums, because rows of sums that are alike make errors larger.
    sums = added.astype(np.float64)
    centred = sums - sums.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPS)
    norms = {name: layer.places[name] for name in ("norm_at", "norm_bias_at")}
    got = layer.call(residual=True, eps=EPS, offset=1.0, **bias, **norms)
    expected = normed * (1 + layer.at("norm_at")) + layer.at("norm_bias_at")
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)
    bare = layer.call(residual=True, eps=EPS, **bias)
    np.testing.assert_allclose(bare, normed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("widths", [(48,), (16, 32), (32, 48, 16), (16, 16, 64)])
def test_outputs_lie_in_arrays_of_their_own(widths: tuple[int, ...]) -> None:
    """Odd numbers of blocks lie in two arrays at once."""
    layer = Layer(np.random.default_rng(8), 37, sum(widths), 48)
    exact, error = layer.product()
    exact = exact + layer.at("bias_at")
    made = layer.apart(widths, bias_at=layer.places["bias_at"])
    assert [part.shape for part in made] == [(37, width) for width in widths]
    got = np.concatenate(made, axis=1)
    assert (np.abs(got - exact) <= error + 2 * UNIT * np.abs(exact)).all()


@settings(max_examples=12)
@given(
    rows=st.integers(1, 130),
    blocks=st.integers(1, 5),
    in_blocks=st.integers(1, 7),
    plain=st.sampled_from([None, "gelu", "gelu_tanh"]),
    is_normed=st.booleans(),
    data=st.data(),
)
def test_bits_depend_on_the_row_alone(
    rows: int, blocks: int, in_blocks: int, plain: Any, is_normed: bool, data: st.DataObject
) -> None:
    layer = Layer(np.random.default_rng(rows), rows, 16 * blocks, 16 * in_blocks)
    options: dict[str, Any] = {"plain": plain, "residual": True, **layer.places}
    if not is_normed:
        options = {name: option for name, option in options.items() if not name.startswith("norm")}
    options["eps"] = EPS if is_normed else None
    together = layer.call(**options)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, min(rows, first + 20)))
    part = layer.call(first, last, padding=data.draw(st.integers(0, 3)), **options)
    np.testing.assert_array_equal(part.view(np.uint32), together[first:last].view(np.uint32))


def test_a_row_without_numbers_disturbs_no_other() -> None:
    layer = Layer(np.random.default_rng(3), 9, 48, 64)
    options: dict[str, Any] = {"plain": "gelu", "eps": EPS, **layer.places}
    usual = layer.call(**options)
    layer.x[4, 7] = np.nan
    disturbed = layer.call(**options)
    assert np.isnan(disturbed[4]).all()
    np.testing.assert_array_equal(np.delete(disturbed, 4, axis=0), np.delete(usual, 4, axis=0))


def test_sums_are_as_exact_as_those_of_float32() -> None:
    """The witness rounds each product and each sum to float32, as numpy does it."""
    layer = Layer(np.random.default_rng(11), 40, 64, 384)
    exact, _ = layer.product()
    chain = np.zeros(exact.shape, np.float32)
    for i in range(layer.x.shape[1]):
        chain += layer.x[:, i : i + 1] * layer.weight[None, :, i]

    def error(of: np.ndarray) -> float:
        return float(np.sqrt(np.mean((of - exact) ** 2)))

    assert error(layer.call()) < error(chain)


FLOATS = st.floats(2.0**-100, float(np.finfo(np.float32).max), width=32)


@settings(max_examples=20)
@given(
    values=st.lists(st.one_of(FLOATS, FLOATS.map(lambda value: -value), st.just(0.0)), min_size=8),
    place=st.integers(0, 47),
)
# Of the first value the largest piece is 2, and the least is above zero: their sum would have 25 bits.
@example(values=[2 - 511 * 2.0**-23, -2 + 511 * 2.0**-23], place=20)
def test_all_bits_of_a_value_are_multiplied(values: list[float], place: int) -> None:
    """Among zeros, a value times one is that value, whichever of the two is the weight."""
    layer = Layer(np.random.default_rng(1), 16, 16, 48)
    drawn = np.resize(np.array(values, np.float32), 16)
    layer.x[:] = layer.weight[:] = 0
    layer.x[:, place], layer.weight[:, place] = drawn, 1
    layer.tiles = jnp.asarray(pack(layer.weight))
    np.testing.assert_array_equal(layer.call(), np.broadcast_to(drawn[:, None], (16, 16)))
    layer.x[:, place], layer.weight[:, place] = 1, drawn
    layer.tiles = jnp.asarray(pack(layer.weight))
    np.testing.assert_array_equal(layer.call(), np.broadcast_to(drawn, (16, 16)))


def test_numbers_near_the_least() -> None:
    """Below 2^-126 a part of a number, or of a product, may count as zero, and no more than that."""
    least = 2.0**-126
    layer = Layer(np.random.default_rng(5), 20, 32, 64)
    layer.x *= np.float32(2.0**-120) * np.float32(2.0) ** np.arange(0, 20, dtype=np.float32)[:, None]
    layer.x[0] *= np.float32(2.0**-20)  # below the least normal number
    exact, error = layer.product()
    lost = least * (np.abs(layer.weight).sum(axis=1) + 6 * 64)
    assert (np.abs(layer.call() - exact) <= error + 2 * lost).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_infinite_does_not_become_finite(value: float) -> None:
    layer = Layer(np.random.default_rng(7), 18, 48, 80)
    usual = layer.call()
    layer.x[17, 3] = value
    made = layer.call()
    assert not np.isfinite(made[17]).any()
    np.testing.assert_array_equal(made[:17], usual[:17])
    layer.x[17, 3] = 1
    usual = layer.call()
    layer.weight[20, 79] = value
    layer.tiles = jnp.asarray(pack(layer.weight))
    made = layer.call()
    assert not np.isfinite(made[:, 20]).any()
    np.testing.assert_array_equal(np.delete(made, 20, axis=1), np.delete(usual, 20, axis=1))


def test_packing() -> None:
    weight = np.arange(48 * 32, dtype=np.float32).reshape(48, 32)
    tiles = pack(weight)
    # By hand: the weights of one input and 16 outputs lie side by side.
    np.testing.assert_array_equal(tiles.reshape(3, 32, 16)[1, 5], weight[16:32, 5])
    np.testing.assert_array_equal(unpack(tiles), weight)
    assert can_pack(48, 16)
    assert not can_pack(40, 16)
    assert not can_pack(16, 40)


def test_operands_that_do_not_suit_each_other() -> None:
    layer = Layer(np.random.default_rng(1), 2, 16, 32)
    for options, said in (
        ({"bias_at": 49}, "behind the vectors"),
        ({"residual": jnp.zeros((2, 32), jnp.float32)}, "residual is like y"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            multiply(
                jnp.asarray(layer.x), layer.tiles, jnp.asarray(layer.pool), num_rows=jnp.int32(2), **options
            ).block_until_ready()
    for widths, said in (((8, 8), "outputs are multiples of 16"), ((16,) * 4, "no more arrays")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            layer.apart(widths, bias_at=None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="multiples of 16"):
        multiply(
            jnp.asarray(layer.x[:, :16]), layer.tiles, jnp.asarray(layer.pool), num_rows=jnp.int32(2)
        ).block_until_ready()


def test_what_is_absent_needs_no_place_in_the_vectors() -> None:
    """A model without biases may have fewer vectors than one of its layers has outputs."""
    layer = Layer(np.random.default_rng(2), 2, 64, 32)
    got = multiply(jnp.asarray(layer.x), layer.tiles, jnp.zeros((16,), jnp.float32), num_rows=jnp.int32(2))
    exact, error = layer.product()
    assert (np.abs(np.asarray(got) - exact) <= error).all()
