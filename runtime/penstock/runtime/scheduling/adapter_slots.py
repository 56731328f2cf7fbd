"""Which adapters are on the device, and how many running sequences use each. No jax.

An adapter takes a slot when the first sequence that needs it enters, and keeps it while nobody needs the slot
for another. Then one leaves that no running sequence uses and that is not pinned: first those that no name
means any more, and of others the least recently used. Adapters are known by their content, so one that was
replaced has a slot of its own until its last sequence has ended. Reading is safe from any thread; only the
scheduler changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable

NONE = 0
"""The slot of sequences without an adapter."""


class AdapterSlots:
    """The slots 1 to `count`. Adapters go by their digests."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._slots: dict[str, int] = {}  # digest to slot, the least recently used first
        self._users: dict[str, int] = {}
        self.pinned: frozenset[str] = frozenset()
        """The adapters that keep their slots; fewer than there are slots."""
        self.named: frozenset[str] = frozenset()
        """The adapters that a name means."""
        self.num_evicted = 0
        """How often an adapter left its slot for another one while a name meant it."""

    def has(self, digest: str) -> bool:
        """Say whether the adapter is on the device."""
        return digest in self._slots

    def num_users(self, digest: str) -> int:
        """Tell how many running sequences use it."""
        return self._users.get(digest, 0)

    def can_take(self, digest: str) -> bool:
        """Say whether the adapter is on the device, or there is a slot for it."""
        return digest in self._slots or bool(self._free) or self._leaver() is not None

    def take(self, digest: str) -> tuple[int, bool]:
        """Note one more user. Returns the adapter's slot, and whether the adapter must be written there."""
        slot = self._slots.pop(digest, None)
        is_new = slot is None
        if slot is None:
            leaver = None if self._free else self._leaver()
            if leaver is None:
                slot = self._free.pop()
            else:
                slot = self._slots.pop(leaver)
                self.num_evicted += leaver in self.named
        self._slots[digest] = slot
        self._users[digest] = self._users.get(digest, 0) + 1
        return slot, is_new

    def give(self, digest: str) -> bool:
        """Note one user less. Returns whether it was the last."""
        self._users[digest] -= 1
        if self._users[digest]:
            return False
        del self._users[digest]
        return True

    def _leaver(self) -> str | None:
        """Return the adapter that leaves next; None if all are used or pinned."""
        idle = [d for d in self._slots if d not in self._users and d not in self.pinned]
        return min(idle, key=lambda digest: digest in self.named, default=None)

    def check(self, used: Iterable[str]) -> None:
        """Check all invariants against the adapters of the running sequences, for tests."""
        counts: dict[str, int] = {}
        for digest in used:
            counts[digest] = counts.get(digest, 0) + 1
        if counts != self._users:
            raise AssertionError(f"adapters are used {counts} times, not {self._users}")
        if not set(self._users) <= set(self._slots):
            raise AssertionError("an adapter that is used has no slot")
        slots = sorted([*self._free, *self._slots.values()])
        if slots != list(range(1, len(slots) + 1)):
            raise AssertionError(f"the slots of adapters are not each there once: {slots}")
