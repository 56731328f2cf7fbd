"""The native mixtures of experts, compared with numpy in float64, on every instruction set of this machine
and on emulated ones. A row's bits must depend on the row alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.adapters import AdapterPlace, AdapterRows, ExpertAdapters
from penstock.runtime.ops.codes import E2M1, E4M3, GROUP, CodeForm
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.activations import Activation
from penstock.runtime.ops.native.experts import NO_EXPERT, PackedExperts, batched, experts
from penstock.runtime.ops.native.linear import Packed, linear, pack, quantize
from tests.support.native.codes import code_leaf, small_floats
from tests.support.native.kernels import (
    EMULATED_AMX,
    EMULATED_AVX512,
    kernel_params,
    running,
    threads_with_tiles,
)

BF16 = ml_dtypes.bfloat16
HIDDEN, INNER, EXPERTS, CHOSEN = 128, 192, 6, 3

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")
all_formats = pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])


@pytest.fixture(params=kernel_params(), autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def draw(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(BF16)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def packed(weight: np.ndarray, kind: str, bias: np.ndarray | None = None) -> PackedExperts:
    """Pack weights [G, N, K]. Scale and bias stand behind values of other layers."""
    added = None if bias is None else jnp.asarray(np.concatenate([np.full(5, 99, BF16), bias.reshape(-1)]))
    if kind == "int4":
        return PackedExperts(jnp.asarray(np.stack([code_leaf(w) for w in weight])), None, added, 0, 5)
    if kind == "bf16":
        return PackedExperts(jnp.asarray(np.stack([pack(w) for w in weight])), None, added, 0, 5)
    values, scales = zip(*(quantize(w) for w in weight), strict=True)
    scale = np.concatenate([np.full(3, 77, np.float32), *scales])
    tiles = jnp.asarray(np.stack([pack(w) for w in values]))
    return PackedExperts(tiles, jnp.asarray(scale), added, 3, 5)


@pytest.mark.ci
@pytest.mark.parametrize("form", [E2M1, E4M3], ids=str)
def test_experts_in_small_floats_have_the_bits_of_those_in_bfloat16(form: CodeForm) -> None:
    """What experts in bfloat16 give is compared with numpy by the other tests."""
    rng = np.random.default_rng(form.bits)

    def drawn(out: int, inner: int) -> list[PackedExperts]:
        leaves, values = zip(*(small_floats(rng, form, out, inner) for _ in range(EXPERTS)), strict=True)
        whole = np.stack([pack(value.astype(BF16)) for value in values])
        return [PackedExperts(jnp.asarray(np.stack(leaves))), PackedExperts(jnp.asarray(whole))]

    gate_up, down = drawn(2 * INNER, HIDDEN), drawn(HIDDEN, INNER)
    for rows in (1, 40):
        x, (ids, weights) = draw(rng, rows, HIDDEN, scale=0.01), chosen(rng, rows)
        given = (jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights))
        got, expected = (
            np.asarray(experts(*given, *pair, num_rows=jnp.int32(rows), activation="gpt_oss", limit=7.0))
            for pair in zip(gate_up, down, strict=True)
        )
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


def settled(weight: np.ndarray) -> np.ndarray:
    """Weights [G, N, K] that codes of 4 bits stand for exactly: whole numbers from -8 to 7 times 2^-6, and a
    -8 in each group.
    """
    numbers = np.clip(np.rint(wide(weight) * 40), -8, 7)
    numbers[:, :, ::GROUP] = -8
    exact: np.ndarray = (numbers / 64).astype(BF16)
    return exact


class Layer:
    """A random layer of experts, as the kernels read it and as it is."""

    def __init__(self, seed: int, kind: str, *, biases: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.gate_up = draw(rng, EXPERTS, 2 * INNER, HIDDEN, scale=0.1)
        self.down = draw(rng, EXPERTS, HIDDEN, INNER, scale=0.1)
        self.gate_up_bias = draw(rng, EXPERTS, 2 * INNER, scale=0.5 if biases else 0)
        self.down_bias = draw(rng, EXPERTS, HIDDEN, scale=0.5 if biases else 0)
        if kind == "int4":
            self.gate_up, self.down = settled(self.gate_up), settled(self.down)
        self.packed = (
            packed(self.gate_up, kind, self.gate_up_bias if biases else None),
            packed(self.down, kind, self.down_bias if biases else None),
        )

    def expected(
        self,
        x: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
        activation: Activation = "silu",
        limit: float = 0.0,
        weigh_input: bool = False,
        adapters: ExpertAdapters | None = None,
    ) -> np.ndarray:
        """Return what the rows come to in float64, as transformers' modules for experts have it."""
        out = np.zeros((len(x), HIDDEN))
        for row, (chosen, shares) in enumerate(zip(ids, weights.astype(np.float64), strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                given = wide(x[row]) * (share if weigh_input else 1)
                products = wide(self.gate_up[expert]) @ given + wide(self.gate_up_bias[expert])
                if adapters is not None:
                    products += low_rank(adapters.rows, adapters.gate_up, row, expert, given)
                inner = activated(activation, limit, products[:INNER], products[INNER:])
                result = wide(self.down[expert]) @ inner + wide(self.down_bias[expert])
                if adapters is not None:
                    result += low_rank(adapters.rows, adapters.down, row, expert, inner)
                out[row] += result * (1 if weigh_input else share)
        return out


def low_rank(rows: AdapterRows, place: AdapterPlace, row: int, expert: int, given: np.ndarray) -> np.ndarray:
    """Return what a row's adapter adds for one expert, from the layout that `ops.adapters` describes."""
    slot, inputs = int(rows.slots[row]), place.in_size
    of_expert = len(place.parts) * inputs + sum(place.parts)
    begin = (place.begin + expert * of_expert) * rows.rank
    values = wide(rows.pool)[slot, begin : begin + of_expert * rows.rank]
    a, b = np.split(values, [len(place.parts) * inputs * rows.rank])
    each_a = a.reshape(len(place.parts), inputs // 2, rows.rank, 2).transpose(0, 1, 3, 2)
    smalls = [given @ each.reshape(inputs, rows.rank) for each in each_a]
    each_b = np.split(b, np.cumsum(place.parts)[:-1] * rows.rank)
    return np.concatenate(
        [
            small @ each.reshape(-1, rows.rank // 2, 16, 2).transpose(1, 3, 0, 2).reshape(rows.rank, -1)
            for small, each in zip(smalls, each_b, strict=True)
        ]
    )


def adapters_of(slots: np.ndarray) -> ExpertAdapters:
    """Random adapters of all experts in slots 1 and 2, and zeros in slot 0."""
    gate_up = AdapterPlace(5, HIDDEN, (INNER, INNER), EXPERTS, packed=True)
    down = AdapterPlace(5 + gate_up.size, INNER, (HIDDEN,), EXPERTS, packed=True)
    pool = draw(np.random.default_rng(30), 3, 16 * (down.begin + down.size + 2), scale=0.1)
    pool[0] = 0
    return ExpertAdapters(AdapterRows(jnp.asarray(pool), jnp.asarray(slots), 16), gate_up, down)


@pytest.mark.ci
@all_formats
@pytest.mark.parametrize("weigh_input", [False, True])
def test_adapters_of_experts(kind: str, weigh_input: bool) -> None:
    """More rows of one adapter than are computed together, beside rows without one, which keep their bits."""
    rng = np.random.default_rng(31)
    layer, slots = Layer(32, kind), rng.integers(0, 3, 40, np.int32)
    x, (ids, weights) = draw(rng, 40, HIDDEN), chosen(rng, 40)
    adapters, options = adapters_of(slots), {"weigh_input": weigh_input}
    expected = layer.expected(x[:37], ids[:37], weights[:37], adapters=adapters, weigh_input=weigh_input)
    got = run(layer, x, ids, weights, 37, adapters=adapters, **options)
    close(got, expected, kind)
    plain, has_none = run(layer, x, ids, weights, 37, **options), slots[:37] == 0
    np.testing.assert_array_equal(got[has_none].view(np.uint16), plain[has_none].view(np.uint16))
    assert np.abs(wide(got) - wide(plain))[~has_none].max() > expected.std()
    row = int(np.flatnonzero(slots[:37])[-1])
    alone = adapters._replace(rows=adapters.rows._replace(slots=jnp.asarray(slots[row : row + 1])))
    one = slice(row, row + 1)
    np.testing.assert_array_equal(
        run(layer, x[one], ids[one], weights[one], 1, adapters=alone, **options).view(np.uint16),
        got[one].view(np.uint16),
    )


def activated(activation: Activation, limit: float, gate: np.ndarray, up: np.ndarray) -> Any:
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def chosen(rng: np.random.Generator, rows: int, among: int = EXPERTS) -> tuple[np.ndarray, np.ndarray]:
    """Different experts for each row, and weights."""
    ids = np.stack([rng.permutation(among)[:CHOSEN] for _ in range(rows)]).astype(np.int32)
    return ids, rng.uniform(0.1, 1, (rows, CHOSEN)).astype(np.float32)


def run(layer: Layer, x: Any, ids: Any, weights: Any, rows: int, **options: Any) -> np.ndarray:
    given = {"activation": "silu", **options}
    operands = (jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights))
    return np.asarray(experts(*operands, *layer.packed, num_rows=jnp.int32(rows), **given))[:rows]


def close(got: Any, expected: np.ndarray, kind: str) -> None:
    assert np.abs(wide(got) - expected).max() <= (0.05 if kind == "bf16" else 0.25) * expected.std()


@all_formats
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weigh_input": True},
        {"activation": "gelu_tanh"},
        {"activation": "gpt_oss", "limit": 1.0},
    ],
    ids=["silu", "weighed input", "gelu_tanh", "gpt_oss"],
)
def test_rows_get_the_sum_of_their_experts(kind: str, options: dict[str, Any]) -> None:
    """Beside padding that may hold anything, such as experts that do not exist."""
    rng = np.random.default_rng(1)
    layer = Layer(2, kind)
    x, (ids, weights) = draw(rng, 48, HIDDEN), chosen(rng, 48)
    x[37:], ids[37:], weights[37:] = np.nan, -7, np.nan
    expected = layer.expected(x[:37], ids[:37], weights[:37], **options)
    close(run(layer, x, ids, weights, 37, **options), expected, kind)


@all_formats
def test_experts_with_no_row_few_and_all(kind: str) -> None:
    rng = np.random.default_rng(3)
    layer = Layer(4, kind, biases=False)
    x, (ids, weights) = draw(rng, 90, HIDDEN), chosen(rng, 90, among=4)
    ids[:] = np.where(ids == 0, 5, ids)
    ids[:, 0], ids[:, 1:] = 4, np.where(ids[:, 1:] == ids[:, :1], 0, ids[:, 1:])  # expert 4 gets every row
    close(run(layer, x, ids, weights, 90), layer.expected(x, ids, weights), kind)
    one = ids[:1].copy()
    close(run(layer, x[:1], one, weights[:1], 1), layer.expected(x[:1], one, weights[:1]), kind)


@all_formats
@pytest.mark.parametrize("weigh_input", [False, True])
def test_a_choice_of_no_expert_adds_nothing(kind: str, weigh_input: bool) -> None:
    rng = np.random.default_rng(16)
    layer = Layer(17, kind, biases=False)
    x, (ids, weights) = draw(rng, 20, HIDDEN), chosen(rng, 20)
    kept = rng.random(ids.shape) < 0.5
    kept[3], kept[4] = True, False
    expected = layer.expected(x, ids, np.where(kept, weights, 0), weigh_input=weigh_input)
    ids = np.where(kept, ids, np.int32(NO_EXPERT))
    got = run(layer, x, ids, weights, 20, weigh_input=weigh_input)
    close(got, expected, kind)
    assert not got[4].any()


def test_no_rows() -> None:
    x = jnp.ones((4, HIDDEN), jnp.bfloat16)
    ids, weights = jnp.full((4, CHOSEN), 999), jnp.ones((4, CHOSEN))
    assert run(Layer(5, "bf16"), x, ids, weights, 0).shape == (0, HIDDEN)


@all_formats
def test_weights_of_other_experts_are_not_read(kind: str) -> None:
    """They may be anything, and so may their scales and biases."""
    rng = np.random.default_rng(6)
    layer = Layer(7, kind)
    x, (ids, weights) = draw(rng, 20, HIDDEN), chosen(rng, 20, among=CHOSEN)
    clean = run(layer, x, ids, weights, 20)
    layer.gate_up[CHOSEN:], layer.down[CHOSEN:] = np.nan, np.nan
    layer.gate_up_bias[CHOSEN:], layer.down_bias[CHOSEN:] = np.nan, np.nan
    layer.packed = (
        packed(layer.gate_up, kind, layer.gate_up_bias),
        packed(layer.down, kind, layer.down_bias),
    )
    np.testing.assert_array_equal(run(layer, x, ids, weights, 20).view(np.uint16), clean.view(np.uint16))


@all_formats
@pytest.mark.parametrize("weigh_input", [False, True])
def test_a_row_does_not_depend_on_the_others(kind: str, weigh_input: bool) -> None:
    """A row has the same bits alone and at any place beside any number of other rows, so that its experts get
    1, 2, ... and more than 64 rows.
    """
    rng = np.random.default_rng(8)
    layer, most = Layer(9, kind), 200
    x, (ids, weights) = draw(rng, most, HIDDEN), chosen(rng, most)

    @functools.cache
    def program(padded: int) -> Any:
        def compute(x: jax.Array, ids: jax.Array, weights: jax.Array, count: jax.Array) -> jax.Array:
            options: dict[str, Any] = {"activation": "silu", "weigh_input": weigh_input}
            return experts(x, ids, weights, *layer.packed, num_rows=count, **options)

        return jax.jit(compute)

    def bits(rows: np.ndarray) -> np.ndarray:
        padded = -(-len(rows) // 16) * 16
        filled = np.resize(rows, padded)
        result = program(padded)(x[filled], ids[filled], weights[filled], np.int32(len(rows)))
        return np.asarray(result)[: len(rows)].view(np.uint16)

    alone = np.concatenate([bits(np.array([row])) for row in range(most)])
    for count in (2, 5, 16, 33, 40, 97, most):
        rows = rng.permutation(most)[:count]
        np.testing.assert_array_equal(bits(rows), alone[rows], err_msg=f"{count} rows")


def test_a_choice_is_computed_as_linear_computes_it() -> None:
    """The same bits as two linear layers: experts use the same products."""
    rng = np.random.default_rng(10)
    layer = Layer(11, "bf16", biases=False)
    x = draw(rng, 5, HIDDEN)
    gate_up, down = (Packed(jnp.asarray(pack(w[2]))) for w in (layer.gate_up, layer.down))
    count = jnp.int32(5)
    inner = linear(jnp.asarray(x), (gate_up,), num_rows=count, gate="silu")
    expected = linear(inner, (down,), num_rows=count)
    ids, weights = np.full((5, 1), 2, np.int32), np.ones((5, 1), np.float32)
    got = run(layer, x, ids, weights, 5)
    np.testing.assert_array_equal(got.view(np.uint16), np.asarray(expected).view(np.uint16))


@all_formats
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gpt_oss"])
def test_nan_stays_in_its_row(kind: str, activation: Activation) -> None:
    rng = np.random.default_rng(12)
    layer = Layer(13, kind)
    x, (ids, weights) = draw(rng, 30, HIDDEN), chosen(rng, 30)
    options: dict[str, Any] = {"activation": activation, "limit": 7.0}
    clean = run(layer, x, ids, weights, 30, **options)
    x[4, 17], weights[20, 1] = np.nan, np.nan
    dirty = run(layer, x, ids, weights, 30, **options)
    assert np.isnan(dirty[[4, 20]].astype(np.float32)).all()
    others = np.delete(np.arange(30), [4, 20])
    np.testing.assert_array_equal(dirty[others].view(np.uint16), clean[others].view(np.uint16))


@pytest.mark.parametrize("bad", [-2, EXPERTS])
def test_an_expert_that_does_not_exist_fails_the_program(bad: int) -> None:
    rng = np.random.default_rng(14)
    x, (ids, weights) = draw(rng, 3, HIDDEN), chosen(rng, 3)
    ids[2, 1] = bad
    with pytest.raises(jax.errors.JaxRuntimeError, match="an expert that does not exist"):
        run(Layer(15, "bf16"), x, ids, weights, 3)


@pytest.mark.ci
@all_formats
@pytest.mark.parametrize(("rows", "padded"), [(0, 4), (1, 1), (5, 16), (70, 80)])
def test_each_head_has_a_product_of_its_own(kind: str, rows: int, padded: int) -> None:
    rng = np.random.default_rng(16)
    heads, inner, out = 5, 192, 48
    x, weight = draw(rng, padded, heads, inner), draw(rng, heads, out, inner, scale=0.05)
    bias = draw(rng, heads, out)
    weight = settled(weight) if kind == "int4" else weight
    x[rows:] = np.nan
    got = batched(jnp.asarray(x), packed(weight, kind, bias), num_rows=jnp.int32(rows))
    assert got.shape == (padded, heads, out)
    if not rows:
        return
    expected = np.einsum("tgk,gnk->tgn", wide(x[:rows]), wide(weight)) + wide(bias)
    assert np.abs(wide(got[:rows]) - expected).max() <= (0.03 if kind == "bf16" else 0.1) * expected.std()
    for head in range(heads):  # the bits are those of a linear layer, so they do not depend on other rows
        alone = packed(weight[head : head + 1], kind, bias[head : head + 1])
        one = Packed(alone.tiles[0], alone.scale, alone.bias, alone.scale_at, alone.bias_at)
        same = linear(jnp.asarray(x[:, head]), (one,), num_rows=jnp.int32(rows))
        np.testing.assert_array_equal(
            np.asarray(got[:rows, head]).view(np.uint16), np.asarray(same[:rows]).view(np.uint16)
        )


def test_rows_that_take_several_passes_are_as_alone(kernel: str) -> None:
    """There are so many rows that what lies between the products would not fit one pass."""
    if kernel == EMULATED_AMX or kernel in EMULATED_AVX512:
        pytest.skip("emulated kernels would take minutes, and passes do not know the instruction set")
    rng = np.random.default_rng(19)
    rows, layer = 40_000, Layer(20, "bf16")
    ids, weights = (np.resize(values, (rows, CHOSEN)) for values in chosen(rng, 1001))
    x = np.resize(draw(rng, 997, HIDDEN), (rows, HIDDEN))
    together = run(layer, x, ids, weights, rows)
    heads = np.resize(draw(rng, 1009, 64, 64), (10_000, 64, 64))
    weight = packed(draw(rng, 64, 16, 64), "bf16")
    each = np.asarray(batched(jnp.asarray(heads), weight, num_rows=jnp.int32(len(heads))))
    for begin, end in [(0, 3), (19_990, 20_010), (rows - 2, rows)]:
        part = slice(begin, end)
        alone = run(layer, x[part], ids[part], weights[part], end - begin)
        np.testing.assert_array_equal(alone.view(np.uint16), together[part].view(np.uint16))
    for begin, end in [(0, 3), (4_990, 5_010), (9_998, 10_000)]:
        part = slice(begin, end)
        some = np.asarray(batched(jnp.asarray(heads[part]), weight, num_rows=jnp.int32(end - begin)))
        np.testing.assert_array_equal(some.view(np.uint16), each[part].view(np.uint16))


def test_amx_tiles_are_released(kernel: str) -> None:
    if kernel != EMULATED_AMX:
        pytest.skip("only emulated tiles are counted")
    rng = np.random.default_rng(17)
    x, (ids, weights) = draw(rng, 40, HIDDEN), chosen(rng, 40)
    run(Layer(18, "bf16"), x, ids, weights, 40)
    assert threads_with_tiles() == 0
