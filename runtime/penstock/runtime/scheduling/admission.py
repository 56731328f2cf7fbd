"""Which waiting sequence may begin to run, on which shared pages, and which ones make room for it; and which
sequence loses its pages when there are none left. No jax.

`Admission` decides the former, and `PageSupply` the latter.
"""

from __future__ import annotations

from penstock.runtime.scheduling.pages import Prefix
from penstock.runtime.scheduling.plan import Draft, PageCopy, PageWrite
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence
from penstock.runtime.scheduling.waiting import ADAPTER_SLOT, FEATURE_SLOT, NEXT_STEP


class PageSupply:
    """Gives running sequences the pages that their next positions need."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster

    def preempt(self, victim: Sequence, draft: Draft) -> None:
        """Send a running sequence back to the queue; it gives back its slot and pages."""
        self._roster.preempt(victim)
        draft.preempted.append(victim.request_id)

    def grow(self, seq: Sequence, end: int, draft: Draft) -> bool:
        """Give a sequence the pages for its positions below `end`, and preempts the last of the running
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
        """Give a prefill with a sliding window the pages of its next chunk in exchange for those that it
        will not read again. False if it gets none at all.

        There are too few only if other requests hold some of the old pages too. Then the sequence computes a
        shorter chunk, and preempts others for its first token, or for an image there that must not be cut.
        """
        groups, start = self._roster.groups, seq.num_computed
        groups.drop_unread(seq, start)
        chunk = draft.max_chunk or self._config.max_num_batched_tokens
        least = start + 1
        if self._config.whole_image_tokens:
            least = next((item.end for item in seq.request.media if item.start <= start < item.end), least)
        end = max(min(start + chunk, seq.prefill_until, groups.reachable(seq)), least)
        return end <= seq.covered or self.grow(seq, end, draft)


class Admission:
    """The moves of the first sequence in line: it enters, it waits, or it steps aside until something that it
    needs has happened.
    """

    def __init__(self, roster: Roster, supply: PageSupply) -> None:
        self._roster = roster
        self._supply = supply

    def may_enter(self, seq: Sequence, draft: Draft) -> Prefix | None:
        """Return the prefix with which the first sequence in line can enter now; None if it cannot enter. In
        that case it has stepped aside if others may pass it; if it has not, no other sequence may enter
        either.
        """
        roster = self._roster
        # A sequence that was preempted while its token was in flight must not sample that position again.
        if seq.pending or not roster.num_free_slots or seq.request_id in draft.preempted:
            return None
        if self._awaits_feature_slot(seq) or self._awaits_adapter_slot(seq):
            return None
        prefix = self.find_prefix(seq, draft)
        return prefix if prefix is not None and roster.can_enter(seq, prefix) else None

    def enter(self, seq: Sequence, prefix: Prefix, draft: Draft) -> None:
        """Start a waiting sequence on the prefix that `may_enter` has found."""
        slot = self._roster.enter(seq, prefix)
        for group, table in enumerate(seq.tables):
            if prefix.partial:
                draft.copies.append(PageCopy(prefix.partial[group], table.pages[prefix.num_pages], group))
            draft.writes.append(PageWrite(slot, 0, tuple(table.pages), group))
        draft.entered.append((slot, seq.request))
        weights = seq.request.adapter_weights
        if weights is not None:
            seq.adapter_slot, is_new = self._roster.adapters.take(weights.digest)
            draft.adapter_slots[slot] = seq.adapter_slot
            if is_new:
                draft.adapter_loads.append((seq.adapter_slot, weights))
        if seq.feature_slot is not None:
            draft.feature_slots[slot] = seq.feature_slot
        if seq.request.sampling.has_penalties and len(seq.token_ids) > seq.num_prompt:
            draft.generated_before[slot] = tuple(seq.token_ids[seq.num_prompt :])
        if seq.scheduled_ns == 0:
            seq.scheduled_ns = draft.now_ns
            seq.cached_prompt_tokens = seq.num_computed
            if seq.request.fork_of is not None or self._roster.cache.serves(seq.request):
                self._roster.counts.prefix_queried_tokens += seq.num_prompt
                self._roster.counts.prefix_hit_tokens += seq.num_computed

    def make_room(self, draft: Draft) -> None:
        """Preempt running sequences of lower priority for the first sequence in line, if their pages and
        slots are enough for it.
        """
        roster = self._roster
        running = roster.running
        while True:
            first = roster.waiting.first(admit=draft.admit)
            if first is None or first.pending or not running or running[-1].rank[0] <= first.rank[0]:
                return
            if self._awaits_feature_slot(first) or self._awaits_adapter_slot(first):
                continue
            prefix = self.find_prefix(first, draft)
            if prefix is not None:
                break
        if roster.can_enter(first, prefix):
            return
        victims = [seq for seq in running if seq.rank[0] > first.rank[0]]
        lacks_feature_slot = not roster.has_feature_slot_for(first)
        holders = [seq for seq in victims if seq.needs_feature_slot]
        staying = running[: len(running) - len(victims)]
        roster.groups.hold(prefix)  # pages that it shares with a victim must not count as gained
        if roster.groups.would_have_room(first, prefix, victims, staying):
            if lacks_feature_slot:
                self._supply.preempt(
                    holders[-1], draft
                )  # wherever that ranks: only such a sequence can give one
            while not roster.can_enter(first, prefix):
                self._supply.preempt(running[-1], draft)
        roster.groups.let_go(prefix)

    def _awaits_feature_slot(self, seq: Sequence) -> bool:
        """Say whether the first sequence in line needs a feature slot and has stepped aside because there is
        none. It stays in line if a sequence of lower priority has one, because `make_room` takes that as soon
        as there are pages.
        """
        roster = self._roster
        if roster.has_feature_slot_for(seq):
            return False
        if any(other.needs_feature_slot and other.rank[0] > seq.rank[0] for other in roster.running):
            return False
        roster.waiting.step_aside(seq, FEATURE_SLOT)
        return True

    def _awaits_adapter_slot(self, seq: Sequence) -> bool:
        """Say whether the first sequence in line has stepped aside because its adapter can have no slot, or
        because one before it waits for a slot: it might take the next one that is free for ever.
        """
        if self._roster.has_adapter_slot_for(seq):
            return False
        self._roster.waiting.step_aside(seq, ADAPTER_SLOT)
        return True

    def find_prefix(self, seq: Sequence, draft: Draft) -> Prefix | None:
        """Return the pages that the first sequence in line can reuse: those of its source if it is a fork,
        else the longest cached prefix. None if running sequences will compute more of its prompt: then it has
        stepped aside until they have. A fork whose source has kept no snapshot of its state, because others
        held all of them, is no different from any other sequence.
        """
        roster = self._roster
        source = roster.source_of(seq)
        if source is not None:
            is_kept = source.recurrence.for_forks is not None
            if source.num_computed < roster.groups.fork_start(source) and not is_kept:
                roster.waiting.step_aside(seq, source)
                return None
            prefix = roster.groups.fork(source)
            # A copy is made, and a snapshot is read, before the step writes.
            is_early = bool(prefix.partial) or (roster.has_state and not is_kept)
            if is_early and source in draft.chunked:
                roster.waiting.step_aside(seq, NEXT_STEP)
                return None
            if is_kept or not roster.has_state:
                return prefix
        prefix = roster.cache.match(seq)
        key = roster.cache.promised(seq, prefix.num_pages)
        if key is None:
            return prefix
        roster.waiting.step_aside(seq, key)
        return None
