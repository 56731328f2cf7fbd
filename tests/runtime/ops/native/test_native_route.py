"""The native choice of experts, compared with numpy in float64 for the routers of transformers' models."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.experts import route
from tests.support.native.routers import is_decided, mixed, routers, softmax, top, witness

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


def run(logits: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    logits = jnp.asarray(logits, jnp.float32)
    ids, weights = route(logits, num_rows=jnp.int32(len(logits)), **options)
    return np.asarray(ids), np.asarray(weights)


@settings(deadline=None, max_examples=60)
@given(routers())
def test_choice_and_weights(router: dict[str, Any]) -> None:
    logits = router["logits"]
    options = {name: value for name, value in router.items() if name != "logits"}
    for name in ("correction", "expert_scale"):  # they stand behind those of other layers
        if options[name] is not None:
            options[name] = jnp.asarray([1e9, 1e9, *options[name]], jnp.float32)
            options[f"{name}_at"] = 2
    ids, weights = run(logits, **options)
    for row, found, shares in zip(logits, ids, weights, strict=True):
        assume(is_decided(row, router))
        expected_ids, expected = witness(row, router)
        np.testing.assert_array_equal(found, expected_ids)
        np.testing.assert_allclose(shares, expected, rtol=2e-6)


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparsemixer(jitter: float) -> None:
    logits = np.random.default_rng(5).standard_normal((90, 16)).astype(np.float32)
    logits[:9] -= 4  # all of them are negative
    ids, weights = run(logits, per_token=2, score="sparsemixer", normalize=False, jitter=jitter)
    for row, found, shares in zip(logits, ids, weights, strict=True):
        expected_ids, expected = mixed(row, jitter)
        assert found.tolist() == expected_ids
        np.testing.assert_allclose(shares, expected, rtol=2e-6)


def test_softmax_over_the_chosen_logits() -> None:
    """gpt-oss and Granite define their weights so, Mixtral and Qwen by normalising: it is the same."""
    logits = np.random.default_rng(1).standard_normal((7, 32)).astype(np.float32) * 4
    ids, weights = run(logits, per_token=4, score="softmax", normalize=True)
    for row, found, shares in zip(logits, ids, weights, strict=True):
        np.testing.assert_array_equal(found, top(row, 4))
        np.testing.assert_allclose(shares, softmax(row[found].astype(np.float64)), rtol=2e-6)


def test_logits_whose_scores_are_equal_keep_their_order() -> None:
    """Llama 4 chooses by logits; in float32 the sigmoid of both is 1."""
    ids, weights = run([[30.0, 0.0, 40.0]], per_token=1, score="sigmoid", normalize=False)
    assert ids.tolist() == [[2]]
    assert weights.tolist() == [[1.0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("place", [0, 6, 15])
def test_a_row_with_nan_gets_a_weight_that_is_nan(
    score: str, normalize: bool, num_groups: int, place: int
) -> None:
    """It must still choose different experts that exist, and the other rows are as without it."""
    logits = np.random.default_rng(2).standard_normal((3, 16)).astype(np.float32)
    options = {"per_token": 3, "score": score, "normalize": normalize, "num_groups": num_groups}
    clean_ids, clean = run(logits, **options)
    logits[1, place] = np.nan
    ids, weights = run(logits, **options)
    assert np.isnan(weights[1]).any()
    assert len(set(ids[1])) == 3
    assert ((ids >= 0) & (ids < 16)).all()
    np.testing.assert_array_equal(ids[[0, 2]], clean_ids[[0, 2]])
    np.testing.assert_array_equal(weights[[0, 2]], clean[[0, 2]])
    logits[1] = np.nan
    ids, weights = run(logits, **options)
    assert np.isnan(weights[1]).all()
    assert len(set(ids[1])) == 3


def test_rows_do_not_depend_on_each_other_and_padding_is_not_read() -> None:
    logits = np.random.default_rng(3).standard_normal((300, 128)).astype(np.float32)
    options: dict[str, Any] = {"per_token": 8, "score": "softmax", "normalize": True}
    ids, weights = run(logits, **options)
    for row in (0, 31, 32, 33, 299):
        alone = run(logits[row : row + 1], **options)
        np.testing.assert_array_equal(alone[0][0], ids[row])
        np.testing.assert_array_equal(alone[1][0].view(np.uint32), weights[row].view(np.uint32))
    part_ids, part = route(jnp.asarray(logits), num_rows=jnp.int32(40), **options)
    np.testing.assert_array_equal(np.asarray(part_ids)[:40], ids[:40])
    np.testing.assert_array_equal(np.asarray(part)[:40], weights[:40])
    for none in (0, -1):
        route(jnp.full((4, 128), jnp.nan), num_rows=jnp.int32(none), **options)[0].block_until_ready()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 3}, "num_groups: 16 experts cannot be divided into 3"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups: 5 is not between 1 and the 4"),
        ({"top_groups": 0}, "top_groups"),
        ({"num_groups": 4, "top_groups": 1, "per_token": 5}, "per_token: 5 is not between 1 and the 4"),
        ({"per_token": 0}, "per_token"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(np.zeros((1, 16)), **{"per_token": 2, "score": "softmax", "normalize": True, **options})
