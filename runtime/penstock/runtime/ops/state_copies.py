"""Which entries of the arrays of state the rows of a step read and write, inside the compiled step.

A row reads the copy of its slot that stands after the positions before its own, and writes the other. So what
the row's last step read is still there, and computing that step again gives what it gave. A row that begins
behind a snapshot reads that instead of a copy, and a row may write a second entry, a snapshot.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from penstock.runtime.ops.cache_spec import STATE_COPIES


class SnapshotRows(NamedTuple):
    """What the rows of a step do with the N snapshots; R rows."""

    source: Array  # int32[R] the snapshot that the row goes on from; -1: none
    cut: Array  # int32[R] see `AttentionMeta.state_cut`
    cut_to: Array  # int32[R] the snapshot that becomes the state after these tokens; only where cut > 0

    def only_at(self, rows: Array) -> SnapshotRows:
        """Return the same for the rows where this bool[R] is true; the others neither read nor write a
        snapshot.
        """
        return self._replace(source=jnp.where(rows, self.source, -1), cut=jnp.where(rows, self.cut, 0))


class Copies(NamedTuple):
    """S slots, R rows, N snapshots; entry c * S + s is copy c of slot s, and entry STATE_COPIES * S + n is
    snapshot n.
    """

    read: Array  # int32[R], see `AttentionMeta.state_from`
    written: Array  # int32[R], see `AttentionMeta.state_to`
    held: Array  # int32[S], `RowState.held` after the step
    cut: Array | None = None  # int32[R], see `AttentionMeta.state_cut`
    cut_to: Array | None = None  # int32[R], see `AttentionMeta.state_cut_to`


def choose_copies(
    held: Array,
    slots: Array,
    starts: Array,
    q_lens: Array,
    snapshots: SnapshotRows | None = None,
    num_snapshots: int = 0,
) -> Copies:
    """Choose the copies that rows read and write. held int32[S]: after how many positions the slots' copies 0
    stand; slots int32[R], S or above for padding; starts, q_lens int32[R]: the rows' first positions, and how
    many. `snapshots` None: there are none in these arrays.

    A row that starts at 0, or behind a snapshot, reads neither copy of its slot, and writes copy 0. Any other
    starts where one of them stands: after its last step, or before it.
    """
    num_slots = held.shape[0]
    behind = starts < 0 if snapshots is None else snapshots.source >= 0
    fresh = starts == 0
    read = jnp.where(held.at[slots].get(mode="clip") == starts, 0, 1)
    written = jnp.where(fresh | behind, 0, 1 - read)
    past = STATE_COPIES * num_slots + num_snapshots
    is_real = slots < num_slots
    sources = read * num_slots + slots
    cut = cut_to = None
    if snapshots is not None:
        sources = jnp.where(behind, STATE_COPIES * num_slots + snapshots.source, sources)
        cut = jnp.where(is_real, snapshots.cut, 0)
        cut_to = jnp.where(cut > 0, STATE_COPIES * num_slots + snapshots.cut_to, past)
    return Copies(
        jnp.where(is_real & ~fresh, sources, past),
        jnp.where(is_real, written * num_slots + slots, past),
        held.at[jnp.where(written == 0, slots, num_slots)].set(starts + q_lens, mode="drop"),
        cut,
        cut_to,
    )
