"""The choice of experts and their products in XLA, compared with numpy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.ops import experts as ops
from penstock.runtime.ops.experts import StackedExperts
from tests.support.native.routers import mixed, witness

# Without jit every operation would be compiled by itself.
route = jax.jit(
    ops.route,
    static_argnames=(
        "per_token",
        "score",
        "normalize",
        "scale",
        "jitter",
        "num_groups",
        "top_groups",
        "in_group",
    ),
)
experts = jax.jit(ops.experts, static_argnames=("activation", "limit", "weigh_input"))

HIDDEN, INNER, EXPERTS, CHOSEN, ROWS = 12, 20, 5, 3, 17


SOFTMAX = {"per_token": 4, "score": "softmax", "normalize": True, "scale": 1.0}
GROUPS = {
    "per_token": 3,
    "score": "sigmoid",
    "normalize": True,
    "scale": 2.5,
    "num_groups": 4,
    "top_groups": 2,
}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (SOFTMAX, ()),
        ({**SOFTMAX, "normalize": False}, ("expert_scale",)),
        ({**SOFTMAX, "score": "sigmoid"}, ("correction",)),
        (GROUPS, ()),
        (GROUPS, ("correction", "expert_scale")),
        ({**GROUPS, "score": "softmax", "normalize": False}, ("correction",)),
        ({**GROUPS, "score": "softmax", "normalize": False, "in_group": 1}, ()),
    ],
)
def test_choice_and_weights(options: dict[str, Any], numbers: tuple[str, ...]) -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((8, 16)).astype(np.float32)
    given: dict[str, Any] = {name: rng.standard_normal(16).astype(np.float32) * 0.3 for name in numbers}
    arrays: dict[str, Any] = {name: jnp.asarray(values) for name, values in given.items()}
    ids, weights = route(jnp.asarray(logits), **options, **arrays)
    router = {"correction": None, "expert_scale": None, "num_groups": 1, "top_groups": 1, **options}
    router |= {name: values.tolist() for name, values in given.items()}
    for row, found, shares in zip(logits, np.asarray(ids), np.asarray(weights), strict=True):
        expected_ids, expected = witness(row, router)
        np.testing.assert_array_equal(found, expected_ids)
        np.testing.assert_allclose(shares, expected, rtol=3e-6)


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparsemixer(jitter: float) -> None:
    logits = np.random.default_rng(5).standard_normal((9, 6)).astype(np.float32)
    logits[:2] -= 4  # all of them are negative
    ids, weights = route(
        jnp.asarray(logits), per_token=2, score="sparsemixer", normalize=False, jitter=jitter
    )
    for row, found, shares in zip(logits, np.asarray(ids), np.asarray(weights), strict=True):
        expected_ids, expected = mixed(row, jitter)
        assert found.tolist() == expected_ids
        np.testing.assert_allclose(shares, expected, rtol=3e-6)


def test_logits_whose_scores_are_equal_keep_their_order() -> None:
    """In float32 the sigmoid of both is 1."""
    ids, _ = route(jnp.asarray([[30.0, 0.0, 40.0]]), per_token=1, score="sigmoid", normalize=False)
    assert ids.tolist() == [[2]]


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_row_with_nan_gets_a_weight_that_is_nan_and_different_experts(place: int) -> None:
    logits = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
    logits[1, place] = np.nan
    ids, weights = route(jnp.asarray(logits), per_token=3, score="softmax", normalize=True)
    assert np.isnan(np.asarray(weights)[1]).any()
    assert not np.isnan(np.asarray(weights)[0]).any()
    assert len(set(np.asarray(ids)[1].tolist())) == 3


def activated(activation: str, gate: np.ndarray, up: np.ndarray) -> Any:
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


@pytest.mark.parametrize("activation", ["silu", pytest.param("gelu_tanh", marks=pytest.mark.ci), "gpt_oss"])
@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_get_the_sum_of_their_experts(activation: Any, weigh_input: bool, biased: bool) -> None:
    rng = np.random.default_rng(2)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x, gate_up, down = draw(ROWS, HIDDEN), draw(EXPERTS, 2 * INNER, HIDDEN), draw(EXPERTS, HIDDEN, INNER)
    gate_up_bias, down_bias = draw(EXPERTS, 2 * INNER) * biased, draw(EXPERTS, HIDDEN) * biased
    ids = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(ROWS)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    expected = np.zeros((ROWS, HIDDEN))
    for row in range(ROWS):
        for expert, share in zip(ids[row], weights[row].astype(np.float64), strict=True):
            given_in = x[row].astype(np.float64) * (share if weigh_input else 1)
            both = gate_up[expert] @ given_in + gate_up_bias[expert]
            inner = activated(activation, both[:INNER], both[INNER:])
            expected[row] += (down[expert] @ inner + down_bias[expert]) * (1 if weigh_input else share)
    stacks = [
        StackedExperts(jnp.asarray(weight), None, jnp.asarray(bias) if biased else None)
        for weight, bias in ((gate_up, gate_up_bias), (down, down_bias))
    ]
    got = experts(
        jnp.asarray(x),
        jnp.asarray(ids),
        jnp.asarray(weights),
        *stacks,
        activation=activation,
        limit=0.5,
        weigh_input=weigh_input,
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_a_row_with_nan_spoils_no_other() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, HIDDEN)).astype(np.float32)
    gate_up = StackedExperts(jnp.asarray(rng.standard_normal((EXPERTS, 2 * INNER, HIDDEN)), jnp.float32))
    down = StackedExperts(jnp.asarray(rng.standard_normal((EXPERTS, HIDDEN, INNER)), jnp.float32))
    ids, weights = jnp.asarray([[0, 1], [1, 2], [0, 2], [3, 4]], jnp.int32), jnp.ones((4, 2), jnp.float32)
    clean = np.asarray(experts(jnp.asarray(x), ids, weights, gate_up, down, activation="silu"))
    x[1] = np.nan
    spoiled = np.asarray(experts(jnp.asarray(x), ids, weights, gate_up, down, activation="silu"))
    assert np.isnan(spoiled[1]).all()
    np.testing.assert_array_equal(spoiled[[0, 2, 3]], clean[[0, 2, 3]])
