"""What adapters add by XLA, compared with numpy in float64, also where the matrices of all tokens would take
too much memory.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from penstock.runtime.ops import adapters
from penstock.runtime.ops.adapters import AdapterPlace, AdapterRows, delta

RANK, PLACE = 8, AdapterPlace(2, 192, (96, 160), num_experts=3)


@pytest.mark.parametrize("at_once", [1, 23, 100])
def test_tokens_in_turn_have_the_products_of_numpy_and_the_bits_of_all_together(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_MOST_GATHERED", at_once * 192 * RANK)
    rng = np.random.default_rng(at_once)
    pool = rng.standard_normal((4, (PLACE.begin + PLACE.size) * RANK)).astype(np.float32)
    slots, experts = rng.integers(0, 4, 40), rng.integers(0, 3, 40)
    x = rng.standard_normal((40, PLACE.in_size)).astype(np.float32)

    def run(x: jax.Array, pool: jax.Array, slots: jax.Array, experts: jax.Array) -> jax.Array:
        return delta(x, AdapterRows(pool, slots, RANK, experts), PLACE)

    in_turn, together = (jax.jit(lambda *args: run(*args)) for _ in range(2))
    given = x, pool, slots.astype(np.int32), experts.astype(np.int32)
    made = in_turn(*given)
    wanted = np.zeros((40, sum(PLACE.parts)))
    for token in range(40):
        own, column = PLACE.of_expert(int(experts[token])), 0
        units = pool[slots[token]].astype(np.float64).reshape(-1, RANK)
        for part, size in enumerate(PLACE.parts):
            a = units[own.a_at(part) : own.a_at(part) + PLACE.in_size]
            b = units[own.b_at(part) : own.b_at(part) + size].reshape(RANK, size)
            wanted[token, column : column + size] = x[token] @ a @ b
            column += size
    np.testing.assert_allclose(np.asarray(made), wanted, rtol=1e-4, atol=1e-3)
    monkeypatch.undo()
    np.testing.assert_array_equal(np.asarray(together(*given)), np.asarray(made))
