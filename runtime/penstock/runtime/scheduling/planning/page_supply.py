"""Gives pages to running sequences, and decides which sequence loses its own when there are none left. No
jax.
"""

from __future__ import annotations

from penstock.runtime.scheduling.plan import PageWrite
from penstock.runtime.scheduling.planning.draft import Draft
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence


class PageSupply:
    """Gives running sequences the pages that their next positions need."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster

    def preempt(self, victim: Sequence, draft: Draft) -> None:
        """Sends a running sequence back to the queue; it gives back its slot and pages."""
        self._roster.preempt(victim)
        draft.preempted.append(victim.request_id)

    def grow(self, seq: Sequence, end: int, draft: Draft) -> bool:
        """Gives a sequence the pages for its positions below `end`, and preempts the last of the running
        sequences until there are enough. False if it cannot have them.

        A victim has no row in this plan: it ranks behind `seq`, and rows are made in order of rank. While an
        earlier plan is in flight, `seq` is left out of this plan and keeps its own pages, because the commit
        may free some.
        """
        roster = self._roster
        num_pages = roster.pool.pages_for(end) - len(seq.pages)
        while not roster.pool.can_allocate(num_pages):
            victim = roster.running[-1]
            if draft.in_flight and victim is seq:
                return False
            self.preempt(victim, draft)
            if victim is seq:
                return False
        assert seq.slot is not None
        pages = roster.pool.allocate(num_pages)
        draft.writes.append(PageWrite(seq.slot, len(seq.pages), tuple(pages)))
        seq.pages += pages
        return True

    def exchange(self, seq: Sequence, draft: Draft) -> bool:
        """Gives a prefill with a sliding window the pages of its next chunk in exchange for those that it
        will not read again. False if it gets none at all.

        There are too few only if other requests hold some of the old pages too. Then the sequence computes a
        shorter chunk, and preempts others for its first token.
        """
        roster, config = self._roster, self._config
        page_size = roster.pool.page_size
        start, num_pages = seq.num_computed, len(seq.pages)
        num_unread = roster.num_unread(start)
        if num_unread > seq.num_dropped:
            roster.drop_pages(seq, num_unread)
        chunk = draft.max_chunk or config.max_num_batched_tokens
        end = min(start + chunk, seq.prefill_until, (num_pages + roster.pool.num_available) * page_size)
        end = max(end, start + 1)
        return end <= num_pages * page_size or self.grow(seq, end, draft)

    def drop_unread(self, window: int) -> None:
        """Gives back the pages that lie before the sliding window of every position still to be computed. A
        dispatched step may use them, but the device runs it first. Pages whose tokens are not all known yet
        are kept, so that they can be published, and so are those that a prefill can exchange.
        """
        page_size = self._roster.pool.page_size
        for seq in self._roster.running:
            start = seq.num_computed
            if len(seq.pages) * page_size < seq.prefill_until:
                continue
            num_pages = max(min(start - window + 1, start - seq.pending), 0) // page_size
            if num_pages > seq.num_dropped:
                self._roster.drop_pages(seq, num_pages)
