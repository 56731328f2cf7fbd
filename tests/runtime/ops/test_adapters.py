"""What adapters add by XLA, compared with numpy in float64, also where the matrices of all tokens would take
too much memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.ops import adapters
from penstock.runtime.ops.adapters import AdapterPlace, AdapterRows, delta

RANK, PLACE = 4, AdapterPlace(2, 6, (3, 5), num_experts=3)


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_tokens_in_turn_have_the_products_of_numpy(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_MOST_GATHERED", at_once * PLACE.in_size * RANK)
    rng = np.random.default_rng(at_once)
    pool = rng.standard_normal((4, (PLACE.begin + PLACE.size) * RANK)).astype(np.float32)
    slots, experts = rng.integers(0, 4, 10), rng.integers(0, 3, 10)
    x = rng.standard_normal((10, PLACE.in_size)).astype(np.float32)
    rows = AdapterRows(
        jnp.asarray(pool), jnp.asarray(slots, jnp.int32), RANK, jnp.asarray(experts, jnp.int32)
    )
    made = jax.jit(lambda x: delta(x, rows, PLACE))(x)
    wanted = np.zeros((10, sum(PLACE.parts)))
    for token in range(10):
        own, column = PLACE.of_expert(int(experts[token])), 0
        units = pool[slots[token]].astype(np.float64).reshape(-1, RANK)
        for part, size in enumerate(PLACE.parts):
            a = units[own.a_at(part) : own.a_at(part) + PLACE.in_size]
            b = units[own.b_at(part) : own.b_at(part) + size].reshape(RANK, size)
            wanted[token, column : column + size] = x[token] @ a @ b
            column += size
    np.testing.assert_allclose(np.asarray(made), wanted, rtol=1e-4, atol=1e-4)
