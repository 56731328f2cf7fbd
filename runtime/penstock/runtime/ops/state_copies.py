"""Which of the two copies of their slots' state the rows of a step read and write, inside the compiled step.

A row reads the copy that stands after the positions before its own, and writes the other. So what the row's
last step read is still there, and computing that step again gives what it gave.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from penstock.runtime.ops.cache_spec import STATE_COPIES


class Copies(NamedTuple):
    """S slots, R rows; entry c * S + s is copy c of slot s."""

    read: Array  # int32[R], see `AttentionMeta.state_from`
    written: Array  # int32[R], see `AttentionMeta.state_to`
    held: Array  # int32[S], `RowState.held` after the step


def choose_copies(held: Array, slots: Array, starts: Array, q_lens: Array) -> Copies:
    """held int32[S]: after how many positions the slots' copies 0 stand; slots int32[R], S or above for
    padding; starts, q_lens int32[R]: the rows' first positions, and how many.

    A row that starts at 0 reads neither copy, and writes copy 0. Any other starts where one of them stands:
    after its last step, or before it.
    """
    num_slots = held.shape[0]
    fresh = starts == 0
    read = jnp.where(held.at[slots].get(mode="clip") == starts, 0, 1)
    written = jnp.where(fresh, 0, 1 - read)
    past = STATE_COPIES * num_slots
    is_real = slots < num_slots
    return Copies(
        jnp.where(is_real & ~fresh, read * num_slots + slots, past),
        jnp.where(is_real, written * num_slots + slots, past),
        held.at[jnp.where(written == 0, slots, num_slots)].set(starts + q_lens, mode="drop"),
    )
