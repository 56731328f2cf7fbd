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
        while not roster.groups.can_grow(seq, end):
            victim = roster.running[-1]
            if draft.in_flight and victim is seq:
                return False
            self.preempt(victim, draft)
            if victim is seq:
                return False
        assert seq.slot is not None
        for group, first, pages in roster.groups.grow(seq, end):
            draft.writes.append(PageWrite(seq.slot, first, pages, group))
        return True

    def exchange(self, seq: Sequence, draft: Draft) -> bool:
        """Gives a prefill with a sliding window the pages of its next chunk in exchange for those that it
        will not read again. False if it gets none at all.

        There are too few only if other requests hold some of the old pages too. Then the sequence computes a
        shorter chunk, and preempts others for its first token.
        """
        groups, start = self._roster.groups, seq.num_computed
        groups.drop_unread(seq, start)
        chunk = draft.max_chunk or self._config.max_num_batched_tokens
        end = max(min(start + chunk, seq.prefill_until, groups.reachable(seq)), start + 1)
        return end <= seq.covered or self.grow(seq, end, draft)
