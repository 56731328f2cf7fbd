"""Decides which prompts are computed in a step, and how much of each. No jax."""

from __future__ import annotations

from collections import deque

from penstock.runtime.scheduling.pacing import LEAST_TOKENS
from penstock.runtime.scheduling.plan import NO_SNAPSHOT_USE, PlanRow
from penstock.runtime.scheduling.planning.admission import Admission
from penstock.runtime.scheduling.planning.cuts import Cuts
from penstock.runtime.scheduling.planning.draft import Draft
from penstock.runtime.scheduling.planning.pictures import Pictures
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence

_LONG = 4
"""A prompt that would take more than this many whole steps shares them with those behind it."""
_SHARE = 4
"""One part in this many of a step is kept for the prompts behind a long one."""
_FLOOR = 32
"""A long prompt behind another long one gets one part in this many of a step."""


class Prefills:
    """Shares the prompt tokens of a step among the sequences that are partly prefilled and those that enter.

    The first prompt that would take more than _LONG steps leaves a part of each step to the prompts behind
    it, so that these need not wait for all of it. Long prompts among these get little; the others get what
    they need, in order of rank. The long prompt gets what is left.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, admission: Admission) -> None:
        self._config = config
        self._roster = roster
        self._admission = admission
        self._pictures = Pictures(roster, config.max_encode_patches)
        snapshots = roster.snapshots
        self._cuts = None if snapshots is None else Cuts(roster, snapshots)
        self._blocked: Sequence | None = None
        """The first sequence in line, if it could not enter in the last step."""

    def add(self, draft: Draft, prefills: list[Sequence]) -> None:
        """Adds chunks of `prefills`, which are running sequences, and of the sequences that enter, in order
        of rank.
        """
        waiting = self._roster.waiting
        whole = budget = self._budget(draft, len(prefills))
        self._blocked = None
        most = draft.max_chunk or budget
        parts: list[tuple[Sequence, int]] = []
        """The sequences that get a chunk, and where it begins."""
        underway = deque(prefills)
        entering, shared = True, False
        while budget > 0:
            candidate = waiting.first(admit=draft.admit) if entering else None
            if candidate is not None and not (underway and underway[0].rank < candidate.rank):
                prefix = self._admission.may_enter(candidate, draft)
                if prefix is not None and not self._pictures.can_begin(candidate, prefix.num_computed, draft):
                    prefix = None
                if prefix is None:
                    entering = candidate.awaits is not None  # if it did not step aside, no other may enter
                    self._blocked = None if entering else candidate
                    continue
                self._admission.enter(candidate, prefix, draft)
                seq = candidate
            elif underway:
                seq = underway.popleft()
            else:
                break
            count = budget
            if seq.prefill_until - seq.num_computed > _LONG * whole:
                if shared:
                    count = max(whole // _FLOOR, 1)
                elif underway or (entering and waiting):
                    count = budget - budget // _SHARE
                shared = True
            start = seq.num_computed
            taken = self._advance(seq, min(count, budget, most), draft)
            if taken:  # none if a picture that comes next cannot be encoded in this plan
                parts.append((seq, start))
                draft.chunked.add(seq)
                budget -= taken
        for seq, start in parts:  # share out what was kept for other prompts and not used
            if budget > 0:
                budget -= self._advance(seq, min(budget, start + most - seq.num_computed), draft)
        for seq, start in parts:
            if start < seq.recompute_until:
                again = min(seq.num_computed, seq.recompute_until) - start
                self._roster.counts.recomputed_tokens += again
            if seq.request.media:
                draft.pictures += self._pictures.rows(seq, start, seq.num_computed, len(draft.rows))
            if self._cuts is not None:
                # Nobody can use the row's pages before the next step, when its snapshot can be read too.
                use = self._cuts.use(seq, start, seq.num_computed)
                if use != NO_SNAPSHOT_USE:
                    draft.snapshots[len(draft.rows)] = use
                self._publish(seq)
            _add_row(draft, seq, start)

    def _budget(self, draft: Draft, num_prefills: int) -> int:
        """Returns the prompt tokens of this step: what the decodes leave and, if there are decodes, at most
        what `draft.prefill_budget` allows.

        `draft.prefill_budget` is meant for one prompt. For n prompts it is multiplied by the square root of
        n: as a group they lose more by waiting, and the machine by running half empty, than the decodes lose.
        A sequence that stepped aside, or that stands behind one that lacks pages, does not count. Where steps
        are padded, the budget is the largest that needs no padding, but at least LEAST_TOKENS, so that the
        step can be measured.
        """
        num_decodes = len(draft.rows)
        budget = self._config.max_num_batched_tokens - num_decodes
        if not num_decodes or draft.prefill_budget is None:
            return budget
        waiting, num_prompts = self._roster.waiting, num_prefills
        first = waiting.first(admit=draft.admit)
        if first is not None and first is not self._blocked:
            num_prompts += min(waiting.num_in_line(admit=draft.admit), self._roster.num_free_slots)
        wanted = int(max(draft.prefill_budget, 1) * max(num_prompts, 1) ** 0.5)
        if wanted >= budget:
            return budget
        wanted += num_decodes
        sizes = [size for size in self._config.step_sizes if size >= num_decodes + LEAST_TOKENS]
        if sizes:
            wanted = max((size for size in sizes if size <= wanted), default=sizes[0])
        return min(budget, wanted - num_decodes)

    def _advance(self, seq: Sequence, most: int, draft: Draft) -> int:
        """Adds up to `most` tokens to the next chunk of a prefill. Returns how many it added."""
        start = seq.num_computed
        # With a sliding window, perhaps fewer positions than `prefill_until` have pages.
        end = min(start + most, seq.prefill_until, seq.covered)
        if seq.request.media:
            end = self._pictures.reach(seq, start, end, draft)
        seq.num_computed = end
        if self._cuts is None:
            self._publish(seq)
        return end - start

    def _publish(self, seq: Sequence) -> None:
        """Lets others share what a prefill has computed."""
        roster, end = self._roster, seq.num_computed
        if end >= seq.sharing.publish_at:
            roster.cache.publish(seq, end)
        if end >= roster.groups.fork_start(seq):
            roster.waiting.happened(seq)  # its forks can share the prompt now


def _add_row(draft: Draft, seq: Sequence, start: int) -> None:
    """Adds the row of a prefill's chunk, from `start` to where the sequence has advanced. The last chunk
    samples the next token, unless the request ends with its prompt.
    """
    assert seq.slot is not None
    end = seq.num_computed
    samples = end == seq.prefill_until and seq.request.reading is None
    seq.pending += samples
    bans = int(samples and end <= seq.bans_until)
    if seq.of_prompt.is_wanted and start < seq.num_prompt:
        row = len(draft.rows)
        draft.prompts[row] = seq
        pooled = seq.of_prompt.plan_pooling(start, end)
        if pooled is not None:
            draft.pooled[row] = pooled
    draft.rows.append(
        PlanRow(seq.request_id, seq.slot, start, end - start, tuple(seq.token_ids[start:end]), samples, bans)
    )
    draft.sampling.append(seq if samples else None)
