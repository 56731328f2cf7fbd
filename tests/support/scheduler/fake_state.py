"""Recurrent state on Python lists, for the fake runner: what compiled steps keep by slot and in snapshots.

A state is a digest of all tokens so far, with the number of these tokens. A row must find the state after the
positions before its own where the plan and the rules of `ops.state_copies` say: at the beginning, in a
snapshot, or in one of the two newest states of its slot. Otherwise it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.runtime.scheduling.plan import NO_SNAPSHOT_USE, Plan

State = tuple[int, int]
"""After how many tokens it stands, and the digest of these."""


class FakeState:
    """The states of all slots, and the snapshots."""

    def __init__(self, num_snapshots: int, digest: Callable[[int, int], int]) -> None:
        self._digest = digest
        self._slots: dict[int, list[State | None]] = {}
        """Slot to its two copies."""
        self._passed: dict[int, list[State]] = {}
        """Slot to the states that its last row went through. A token is sampled after each of them."""
        self.snapshots: list[State | None] = [None] * num_snapshots
        self.begun_behind: dict[str, int] = {}
        """Request to the position of the snapshot that its row has read last."""

    def enter(self, slot: int) -> None:
        """Note that what the slot holds is of an earlier request."""
        self._slots[slot] = [None, None]

    def after(self, slot: int, num_tokens: int) -> int:
        """Return the digest of the state of a slot after so many tokens; fails if there is no such state."""
        for state in self._slots[slot]:
            if state is not None and state[0] == num_tokens:
                return state[1]
        raise AssertionError(f"slot {slot} has no state after {num_tokens} tokens")

    def passed(self, slot: int, num_tokens: int) -> int:
        """Return the digest of the state after so many tokens, which the slot's last row went through."""
        (found,) = (state for state in self._passed[slot] if state[0] == num_tokens)
        return found[1]

    def step(
        self,
        plan: Plan,
        rows: Sequence[tuple[int, int, int, Sequence[int]]],
        roots: dict[int, int],
        step: int,
    ) -> None:
        """Compute rows of one step of a plan: the number of each in the plan, its slot, the position of its
        first token, and its tokens. `roots` has the digest before the first token by slot.
        """
        kept: dict[int, State] = {}
        read: set[int] = set()
        for number, slot, start, tokens in rows:
            use = NO_SNAPSHOT_USE if step else plan.snapshots.get(number, NO_SNAPSHOT_USE)
            copies = self._slots[slot]
            if use.source >= 0:
                before, place = self.snapshots[use.source], 0
                assert before is not None, "read a snapshot that was never written"
                assert before[0] == start, f"read a snapshot of {before[0]} tokens at position {start}"
                read.add(use.source)
                self.begun_behind[plan.rows[number].request_id] = start
            elif start == 0:
                before, place = (0, roots[slot]), 0
            else:
                before = (start, self.after(slot, start))
                place = 1 - copies.index(before)
            if use.source >= 0 or start == 0:
                copies[1] = None
            states = [before]
            for token in tokens:
                states.append((states[-1][0] + 1, self._digest(states[-1][1], token)))
            copies[place], self._passed[slot] = states[-1], states
            if use.cut:
                assert use.cut_to not in kept, "two rows write one snapshot"
                kept[use.cut_to] = states[use.cut]
        assert read.isdisjoint(kept), "a snapshot is read and written in one plan"
        for entry, state in kept.items():
            self.snapshots[entry] = state
