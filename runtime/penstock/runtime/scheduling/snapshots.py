"""The snapshots of recurrent state: which positions they stand for, and who holds them. No jax: here a
snapshot is only a number.

A model with recurrent layers keeps a state for each slot, which stands for all positions so far. Pages alone
do not restore it, so a sequence can begin with m pages of others only where a snapshot of the state after
these pages was kept. The snapshot has the key of the last of them (`prefix_cache`), because it depends on the
same tokens. It is written in passing, by a step that computes a prompt across the end of that page, and can
be read from the next step on. `Cuts` of `prefills` decides which are written. Windows of decode steps write
none, so the next turn of a conversation computes again what was generated.

Snapshots are counted like pages, in a `PagePool` of their own: one is held while somebody needs it, then kept
for its key until its place is needed; the least recently used one goes first. A sequence holds the snapshot
that it began behind until it has gone on from there, because a token that is put off makes it begin there
again. It also holds the one that its forks will begin behind; that one needs no key, so forks do not depend
on the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.runtime.scheduling.pages import PagePool, Prefix
from penstock.runtime.scheduling.sequence import Recurrence, Sequence


class Snapshots:
    """The snapshots of one engine."""

    def __init__(self, num: int) -> None:
        self._pool = PagePool(num, 1)
        self._written: list[tuple[int, bytes | None]] = []
        """The snapshots that the newest plan writes, which are held, and their keys to be."""
        self._holders: dict[Sequence, None] = {}
        """The sequences that hold snapshots."""

    @property
    def num_used(self) -> int:
        """How many snapshots are held."""
        return self._pool.num_used

    @property
    def num_cached(self) -> int:
        """How many are only kept for their keys."""
        return self._pool.num_cached

    @property
    def num(self) -> int:
        """How many there are room for."""
        return self._pool.num_pages

    # -- finding --

    def find(self, key: bytes) -> int | None:
        """Return the snapshot with this key; None if there is none that can be read."""
        return self._pool.lookup(key)

    def last_end(self, keys: list[bytes], num_pages: int) -> int:
        """Return the largest m up to `num_pages` for which there is a snapshot of the state after the pages
        with the first m of these keys; 0 if there is none.
        """
        while num_pages and self._pool.lookup(keys[num_pages - 1]) is None:
            num_pages -= 1
        return num_pages

    # -- a new plan --

    def begin_plan(self, has_forks: Callable[[Sequence], bool]) -> None:
        """Make readable what the plan before has written, and let go of what no sequence needs any more.
        `has_forks` says of a running sequence whether forks wait to begin with its prompt.
        """
        for entry, key in self._written:
            if key is not None:
                self._pool.publish(entry, key)
            self._pool.release([entry])
        self._written.clear()
        for seq in [*self._holders]:
            kept = seq.recurrence
            if kept.source is not None and seq.num_computed > kept.begin:
                self._pool.release([kept.source])
                kept.source = None
            if kept.for_forks is not None and not (seq.sharing.is_shareable and has_forks(seq)):
                self._pool.release([kept.for_forks])
                kept.for_forks = None
            if kept.source is None and kept.for_forks is None:
                del self._holders[seq]

    # -- sequences --

    def enter(self, seq: Sequence, prefix: Prefix, *, for_forks: bool) -> None:
        """Note that a sequence enters behind this prefix; with `for_forks`, that its forks will too."""
        kept = seq.recurrence
        kept.begin, kept.branch = prefix.num_computed, prefix.num_found
        if prefix.snapshot is not None:
            self._pool.retain([prefix.snapshot])
            kept.source = prefix.snapshot
            self._holders[seq] = None
            if for_forks:
                self._pool.retain([prefix.snapshot])
                kept.for_forks = prefix.snapshot

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence stops running."""
        kept, seq.recurrence = seq.recurrence, Recurrence()
        self._pool.release([entry for entry in (kept.source, kept.for_forks) if entry is not None])
        self._holders.pop(seq, None)

    def source_of(self, seq: Sequence, start: int) -> int | None:
        """Return the snapshot that a row of a sequence reads which begins at `start`; None if it reads
        none.
        """
        kept = seq.recurrence
        return kept.source if start == kept.begin else None

    # -- writing --

    def write(self, key: bytes | None) -> int | None:
        """Take a snapshot for a row of the plan that is being made to write, and return it; None if others
        hold all of them. From the next plan on it can be found by its key, if it has one.
        """
        if not self._pool.can_allocate(1):
            return None
        (entry,) = self._pool.allocate(1)
        self._written.append((entry, key))
        return entry

    def write_again(self, seq: Sequence, key: bytes) -> int | None:
        """Do the same as `write`, but let the sequence give up the snapshot that its last call of this has
        given it, unless somebody holds that. So a long prompt does not displace all others, chunk by chunk.
        """
        kept = seq.recurrence
        if kept.rolling is not None:
            before, entry = kept.rolling
            if self._pool.lookup(before) == entry and not self._pool.num_holders(entry):
                self._pool.forget(entry)
        written = self.write(key)
        kept.rolling = None if written is None else (key, written)
        return written

    def hold_for_forks(self, seq: Sequence, entry: int) -> None:
        """Keep a snapshot that `write` has given a sequence until its forks have begun behind it."""
        self._pool.retain([entry])
        seq.recurrence.for_forks = entry
        self._holders[seq] = None

    def flush(self) -> None:
        """Forget all snapshots, for example because the weights have changed. Sequences that begin behind one
        may still do so.
        """
        self._pool.release([entry for entry, _ in self._written])
        self._written.clear()
        self._pool.forget_keys()

    def check(self, running: Iterable[Sequence]) -> None:
        """Check all invariants against the sequences that run, for tests; the AssertionError says what is
        wrong.
        """
        held = [[entry] for entry, _ in self._written]
        for seq in running:
            kept = seq.recurrence
            mine = [entry for entry in (kept.source, kept.for_forks) if entry is not None]
            held += [[entry] for entry in mine]
            if bool(mine) is not (seq in self._holders):
                raise AssertionError(f"{seq.request_id} holds {mine}, which is noted wrongly")
        if any(seq.slot is None for seq in self._holders):
            raise AssertionError("a sequence that does not run holds snapshots")
        self._pool.check(held)
