"""Which tokens the first stage of a pipeline reads: those after the oldest choice that will do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from penstock.runtime.execution.pipeline import LastTokens


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_step_reads_the_tokens_after_the_latest_choice_for_its_rows() -> None:
    """Padding rows have a slot behind the last one."""
    tokens = LastTokens(3, SingleDeviceSharding(jax.devices()[0]))
    assert tokens.give(slots(0, 1, 2)).tolist() == [0, 0, 0]
    tokens.take(slots(0, 2, 3), jnp.array([7, 0, 9], jnp.int32))
    tokens.take(slots(1), jnp.array([7, 8, 9], jnp.int32))
    assert tokens.give(slots(2, 3)).tolist() == [7, 0, 9]
    assert tokens.give(slots(0)).tolist() == [7, 0, 9]
    assert tokens.give(slots(0, 1)).tolist() == [7, 8, 9]
    tokens.take(slots(0), jnp.array([5, 8, 9], jnp.int32))
    assert tokens.give(slots(1, 2)).tolist() == [7, 8, 9]
    assert tokens.give(slots(0)).tolist() == [5, 8, 9]


def test_old_choices_are_forgotten() -> None:
    tokens = LastTokens(2, SingleDeviceSharding(jax.devices()[0]))
    tokens.take(slots(1), jnp.array([0, 4], jnp.int32))
    for token in range(9):
        tokens.take(slots(0), jnp.array([token, 4], jnp.int32))
    assert tokens.give(slots(1)).tolist() == [6, 4]
    assert tokens.give(slots(0)).tolist() == [8, 4]
