"""Which tokens the first stage of a pipeline reads: those after the oldest choice that will do. And that all
stages have their weights on the device, or none.
"""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.pipeline import LastTokens, PipelineState


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_step_reads_the_tokens_after_the_latest_choice_for_its_rows() -> None:
    """Padding rows have a slot behind the last one."""
    tokens = LastTokens(3, SingleDeviceSharding(jax.devices()[0]), num_turns=2)
    assert tokens.give(slots(0, 1, 2)).tolist() == [0, 0, 0]
    tokens.take(slots(0, 2, 3), jnp.array([7, 0, 9], jnp.int32))
    tokens.take(slots(1), jnp.array([7, 8, 9], jnp.int32))
    assert tokens.give(slots(2, 3)).tolist() == [7, 0, 9]
    assert tokens.give(slots(0)).tolist() == [7, 0, 9]
    assert tokens.give(slots(0, 1)).tolist() == [7, 8, 9]
    tokens.take(slots(0), jnp.array([5, 8, 9], jnp.int32))
    assert tokens.give(slots(1, 2)).tolist() == [7, 8, 9]
    assert tokens.give(slots(0)).tolist() == [5, 8, 9]


def test_weights_stay_where_they_are_if_those_of_a_stage_cannot_be_moved() -> None:
    state, first = object.__new__(PipelineState), mock.Mock()
    first.offload_weights.side_effect = OSError("the host has no memory")
    state.before = (first,)
    with (
        mock.patch.object(DeviceState, "offload_weights", return_value=5),
        mock.patch.object(DeviceState, "restore_weights") as restore_last,
        pytest.raises(OSError, match="no memory"),
    ):
        state.offload_weights()
    assert (restore_last.call_count, first.restore_weights.call_count) == (1, 1)


@pytest.mark.parametrize("num_turns", [2, 3])
def test_old_choices_are_forgotten(num_turns: int) -> None:
    """There are as many steps between two of a slot as there are turns."""
    tokens = LastTokens(2, SingleDeviceSharding(jax.devices()[0]), num_turns=num_turns)
    tokens.take(slots(1), jnp.array([0, 4], jnp.int32))
    for token in range(9):
        tokens.take(slots(0), jnp.array([token, 4], jnp.int32))
    assert tokens.give(slots(1)).tolist() == [8 - num_turns, 4]
    assert tokens.give(slots(0)).tolist() == [8, 4]
