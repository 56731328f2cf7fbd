"""Decides which snapshots of recurrent state the rows of a plan read and write. No jax.

A row of a prefill may keep the state after one of the pages whose ends it computes. Of these it takes

1. the last page before the end of its prompt, if forks wait to begin there;
2. the page behind which the waiting sequences will be spared most tokens that have stepped aside until this
   page, or a later one, is published;
3. the page up to which the sequence found pages of others when it entered, although it had to begin before
   them, because there was no snapshot: there may be more sequences with this prefix and another ending;
4. the last page before its last token, or of this row if it does not get so far: the whole sequence may come
   again, or go on in another request.
"""

from __future__ import annotations

from penstock.runtime.scheduling.paging.snapshots import Snapshots
from penstock.runtime.scheduling.plan import SnapshotUse
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.sequence import Sequence


class Cuts:
    """Chooses the snapshots of rows, for a model that has some."""

    def __init__(self, roster: Roster, snapshots: Snapshots) -> None:
        self._roster = roster
        self._snapshots = snapshots

    def use(self, seq: Sequence, start: int, end: int) -> SnapshotUse:
        """What the row of a prefill does that computes these positions. To be called once for each row,
        before the pages that it fills are published.
        """
        source = self._snapshots.source_of(seq, start)
        num_pages, entry = self._keep(seq, start, end)
        return SnapshotUse(
            source=-1 if source is None else source,
            cut=0 if entry is None else num_pages * self._roster.groups.page_size - start,
            cut_to=0 if entry is None else entry,
        )

    def _keep(self, seq: Sequence, start: int, end: int) -> tuple[int, int | None]:
        """(the number of the sequence's pages after which the row keeps the state, the snapshot that it
        writes); no snapshot if the row keeps none.
        """
        roster, snapshots = self._roster, self._snapshots
        size = roster.groups.page_size
        before, last = start // size, end // size
        if before == last or not seq.sharing.is_shareable:
            return 0, None
        keys = seq.sharing.keys if roster.cache.serves(seq.request) else []
        for_forks = roster.groups.fork_start(seq) // size
        if before < for_forks <= last and seq.recurrence.for_forks is None and roster.has_forks(seq):
            entry = snapshots.write(keys[for_forks - 1] if keys else None)
            if entry is not None:
                snapshots.hold_for_forks(seq, entry)
            return for_forks, entry
        if not keys:
            return 0, None
        awaited = self._awaited(keys, before, last)
        branch = seq.recurrence.branch
        for num_pages in (awaited, branch if before < branch <= last else 0):
            if num_pages and snapshots.find(keys[num_pages - 1]) is None:
                return num_pages, snapshots.write(keys[num_pages - 1])
        num_pages = min(last, (seq.prefill_until - 1) // size)
        if num_pages == before or snapshots.find(keys[num_pages - 1]) is not None:
            return 0, None
        return num_pages, snapshots.write_again(seq, keys[num_pages - 1])

    def _awaited(self, keys: list[bytes], before: int, last: int) -> int:
        """The number of pages, above `before` and at most `last`, after which a snapshot spares most to the
        sequences that await pages of these; 0 if none is awaited.
        """
        waiting = self._roster.waiting
        best = most = beyond = 0
        if waiting.any_aside:
            for num_pages in range(last, before, -1):
                beyond += waiting.num_aside(keys[num_pages - 1])
                if num_pages * beyond > most:
                    best, most = num_pages, num_pages * beyond
        return best
