"""The kernel for experts on TPUs, interpreted on a CPU and compared with numpy in float64; and which weights
it takes. The interpreter copies blocks as a TPU does, and finds races.

Weights of experts that no row chose are NaN, or their scales where they are int8, and so are rows without an
expert.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from penstock.runtime.ops.experts import StackedExperts
from penstock.runtime.ops.native.activations import Activation
from penstock.runtime.ops.native.experts import NO_EXPERT
from penstock.runtime.ops.products import has_outputs_last
from penstock.runtime.ops.tpu import experts as kernel
from penstock.runtime.ops.tpu.experts import grouped_product, tpu_experts

BF16 = jnp.dtype(jnp.bfloat16)
interpreter: Any = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
INTERPRET = pltpu.InterpretParams(detect_races=True)
compute = jax.jit(
    functools.partial(tpu_experts, interpret=INTERPRET),
    static_argnames=("activation", "limit", "weigh_input"),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small tiles and pieces, so that few rows and outputs have several, as large steps do."""
    monkeypatch.setattr(kernel, "MOST_TILE", 32)
    monkeypatch.setattr(kernel, "PIECE_BYTES", 128 * 128 * 2)


def draw(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(BF16)


def draw_int8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-127, 128, shape, np.int8)


@pytest.mark.parametrize(
    ("inputs", "outputs", "outputs_last", "is_int8"),
    [
        pytest.param(128, 320, False, False, id="pieces of 128 outputs and a part of one"),
        pytest.param(192, 256, True, False, id="pieces, and outputs last", marks=pytest.mark.ci),
        pytest.param(24, 40, True, False, id="less than a tile of memory", marks=pytest.mark.ci),
        pytest.param(320, 48, False, False, id="inputs in parts of a tile", marks=pytest.mark.sweep),
        pytest.param(128, 320, False, True, id="int8", marks=pytest.mark.sweep),
        pytest.param(192, 256, True, True, id="int8, outputs last", marks=pytest.mark.sweep),
    ],
)
@settings(max_examples=4, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_groups_of_any_size(
    inputs: int, outputs: int, outputs_last: bool, is_int8: bool, data: st.DataObject, seed: int
) -> None:
    """Of 100 rows in tiles of 32, the last of which is not whole; also groups without rows, and one with all
    rows.
    """
    num_rows, num_groups = 100, 4
    edges = st.sampled_from([0, 1, 31, 32, 33, num_rows])
    left, sizes = num_rows, []
    for _ in range(num_groups):
        sizes.append(min(left, data.draw(edges | st.integers(0, num_rows))))
        left -= sizes[-1]
    rng = np.random.default_rng(seed)
    x = draw(rng, num_rows, inputs, scale=0.02 if is_int8 else 1)
    weight = (draw_int8 if is_int8 else draw)(rng, num_groups, outputs, inputs)
    assert has_outputs_last(jnp.asarray(weight)) == outputs_last
    group = np.repeat(np.arange(num_groups), sizes)
    expected = np.einsum("ni,noi->no", x[: len(group)].astype(np.float64), weight.astype(np.float64)[group])
    if not is_int8:
        weight[np.array(sizes) == 0] = np.nan
    x[len(group) :] = np.nan
    got = grouped_product(
        jnp.asarray(x), jnp.asarray(weight), jnp.asarray(sizes, jnp.int32), interpret=INTERPRET
    )
    np.testing.assert_allclose(got[: len(group)], expected, rtol=1e-4, atol=1e-3)
    assert not interpreter.races.races_found


def activated(activation: Activation, gate: np.ndarray, up: np.ndarray, limit: float) -> Any:
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


class Layer:
    """Experts' weights, and what numpy makes of them."""

    def __init__(
        self, rng: np.random.Generator, experts: int, hidden: int, inner: int, *, is_int8: bool = False
    ) -> None:
        shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
        self.scales: list[np.ndarray] | None = None
        if is_int8:
            self.gate_up, self.down = (draw_int8(rng, *shape) for shape in shapes)
            self.scales = [
                (rng.uniform(0.5, 2, shape[:2]) / (64 * shape[2] ** 0.5)).astype(np.float32)
                for shape in shapes
            ]
        else:
            self.gate_up, self.down = (draw(rng, *shape, scale=shape[2] ** -0.5) for shape in shapes)
        self.biases = [draw(rng, *shape[:2]) for shape in shapes]

    def stacks(self, *, biased: bool) -> Iterator[StackedExperts]:
        scales: Sequence[np.ndarray | None] = self.scales or (None, None)
        for weight, scale, bias in zip((self.gate_up, self.down), scales, self.biases, strict=True):
            yield StackedExperts(
                jnp.asarray(weight),
                None if scale is None else jnp.asarray(scale),
                jnp.asarray(bias) if biased else None,
            )

    def forget(self, ids: np.ndarray) -> None:
        """Make NaN of the experts that are not among these."""
        others = np.setdiff1d(np.arange(len(self.down)), ids)
        for each in (*(self.scales or (self.gate_up, self.down)), *self.biases):
            each[others] = np.nan

    def expected(
        self,
        x: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
        *,
        biased: bool,
        activation: Activation,
        limit: float,
        weigh_input: bool,
    ) -> np.ndarray:
        inner, out = self.down.shape[2], np.zeros(x.shape)
        gate_up, down = self.gate_up.astype(np.float64), self.down.astype(np.float64)
        if self.scales is not None:
            gate_up, down = (
                one * scale[:, :, None] for one, scale in zip((gate_up, down), self.scales, strict=True)
            )
        of_both, of_out = (bias.astype(np.float64) * biased for bias in self.biases)
        for row in range(len(x)):
            for expert, share in zip(ids[row], weights[row].astype(np.float64), strict=True):
                if expert != NO_EXPERT:
                    given_in = x[row].astype(np.float64) * (share if weigh_input else 1)
                    both = gate_up[expert] @ given_in + of_both[expert]
                    made = down[expert] @ activated(activation, both[:inner], both[inner:], limit)
                    out[row] += (made + of_out[expert]) * (1 if weigh_input else share)
        return out


@st.composite
def choices(draw: st.DrawFn, rows: int, per_token: int, experts: int) -> np.ndarray:
    """Different experts of each row, of few or of all; some rows, or places of a row, have none."""
    among = draw(st.integers(per_token, experts))
    of_row = st.lists(st.integers(0, among - 1), min_size=per_token, max_size=per_token, unique=True)
    ids = np.array(draw(st.lists(of_row, min_size=rows, max_size=rows)), np.int32)
    real = draw(st.integers(0, rows))
    ids[real:] = NO_EXPERT
    kept = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    ids[~np.array(kept), 0] = NO_EXPERT
    return ids


@pytest.mark.ci
@pytest.mark.parametrize(
    ("activation", "biased", "weigh_input", "is_int8"),
    [
        ("silu", False, False, False),
        ("gpt_oss", True, False, False),
        ("silu", True, True, False),
        ("silu", True, False, True),
    ],
)
@settings(max_examples=4, deadline=None)
@given(ids=choices(9, 3, 6), seed=st.integers(0, 2**31))
def test_rows_get_the_sum_of_their_experts(
    activation: Activation, biased: bool, weigh_input: bool, is_int8: bool, ids: np.ndarray, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layer, x = Layer(rng, 6, 64, 40, is_int8=is_int8), draw(rng, 9, 64)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    how: dict[str, Any] = {"activation": activation, "limit": 0.5, "weigh_input": weigh_input}
    expected = layer.expected(x, ids, weights, biased=biased, **how)
    layer.forget(ids)
    x[(ids == NO_EXPERT).all(axis=1)] = np.nan
    got = compute(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights), *layer.stacks(biased=biased), **how)
    # Inputs and what stands between the products are rounded to bfloat16, by 2^-9.
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0.02, atol=0.05)
    assert not interpreter.races.races_found


@pytest.mark.ci
@settings(max_examples=3, deadline=None)
@given(ids=choices(9, 3, 6), row=st.integers(0, 8), seed=st.integers(0, 2**31))
def test_a_row_has_the_same_bits_beside_others_and_alone(ids: np.ndarray, row: int, seed: int) -> None:
    """Where it is the first row."""
    rng = np.random.default_rng(seed)
    layer, x = Layer(rng, 6, 64, 40), draw(rng, 9, 64)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    how: dict[str, Any] = {"activation": "silu", "limit": 0.5, "weigh_input": False}
    stacks = list(layer.stacks(biased=True))
    together = compute(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights), *stacks, **how)
    others, alone, shares = np.full_like(x, np.nan), np.full_like(ids, NO_EXPERT), np.zeros_like(weights)
    others[0], alone[0], shares[0] = x[row], ids[row], weights[row]
    by_itself = compute(jnp.asarray(others), jnp.asarray(alone), jnp.asarray(shares), *stacks, **how)
    assert np.asarray(together)[row].tobytes() == np.asarray(by_itself)[0].tobytes()
    assert not interpreter.races.races_found


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Collect the bytes that the interpreter copies from the device's large memory, for each argument of a
    kernel.
    """
    get, found = interpreter.get, dict[str, int]()

    def counting(*given: Any, **named: Any) -> Any:
        token, block = get(*given, **named)
        if (name := named.get("input_name")) is not None:
            found[name] = found.get(name, 0) + block.nbytes
        return token, block

    monkeypatch.setattr(interpreter, "get", counting)
    return found


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rows", "per_token", "experts", "is_int8"),
    [
        (16, 8, 128, False),
        pytest.param(40, 4, 8, False, marks=pytest.mark.sweep),
        pytest.param(16, 8, 128, True, marks=pytest.mark.sweep),
    ],
    ids=["decode step", "chunk", "int8"],
)
def test_the_weights_of_chosen_experts_are_copied_once(
    copied: dict[str, int], rows: int, per_token: int, experts: int, is_int8: bool
) -> None:
    """And nothing of the others. A decode step's 128 choices are in tiles of 16 rows, and the chunk's 160 of
    32. A tile is copied once for each piece of outputs, of which gate and up have 2, and down has 1.
    """
    tile = 16 if experts == 128 else 32
    hidden, inner = 128, 96
    rng = np.random.default_rng(rows)
    layer, x = Layer(rng, experts, hidden, inner, is_int8=is_int8), draw(rng, rows, hidden)
    ids = np.array([rng.permutation(experts)[:per_token] for _ in range(rows)], np.int32)
    ids[ids == 5] = NO_EXPERT
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    how: dict[str, Any] = {"activation": "silu", "limit": 0.0, "weigh_input": False}
    expected = layer.expected(x, ids, weights, biased=False, **how)
    layer.forget(ids)
    got = compute(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights), *layer.stacks(biased=False), **how)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0.02, atol=0.05)
    chosen = len(np.setdiff1d(ids, [NO_EXPERT]))
    assert chosen < experts
    # The second piece of gate and up has room for 128 outputs, and 64 are there.
    assert copied["weight_ref"] == chosen * (2 * 128 * hidden + hidden * inner) * (1 if is_int8 else 2)
    tiles = -(-int((ids != NO_EXPERT).sum()) // tile)
    assert not interpreter.races.races_found
    assert copied["x_ref"] == tiles * tile * (2 * hidden + inner) * BF16.itemsize


@pytest.mark.parametrize(
    ("dtype", "hidden", "kind", "launches"),
    [
        ("bfloat16", 64, "bfloat16", 2),
        ("bfloat16", 2880, "bfloat16", 2),
        ("bfloat16", 64, "int8", 2),
        ("bfloat16", 68, "int8", 0),
        ("bfloat16", 68, "bfloat16", 0),
        ("bfloat16", 2**15, "bfloat16", 0),  # a tile of rows and 128 outputs are more than the chip holds
        ("float32", 64, "float32", 0),
    ],
)
def test_which_weights_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, dtype: str, hidden: int, kind: str, launches: int
) -> None:
    monkeypatch.undo()

    def stack(*shape: int) -> StackedExperts:
        scale = jax.ShapeDtypeStruct(shape[:2], jnp.float32) if kind == "int8" else None
        return StackedExperts(jax.ShapeDtypeStruct(shape, jnp.dtype(kind)), scale)  # type: ignore[arg-type]

    arguments = (
        jax.ShapeDtypeStruct((4, hidden), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((4, 2), jnp.int32),
        jax.ShapeDtypeStruct((4, 2), jnp.float32),
        stack(5, 256, hidden),
        stack(5, hidden, 128),
    )
    traced = jax.jit(tpu_experts, static_argnames="activation").trace(*arguments, activation="silu")
    text = str(traced.lower(lowering_platforms=("tpu",)).as_text())
    assert text.count("@tpu_custom_call") == launches
