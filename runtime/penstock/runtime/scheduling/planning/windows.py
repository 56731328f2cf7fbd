"""Decides how many decode steps one plan holds, and which rows take part. No jax."""

from __future__ import annotations

from bisect import bisect_right

from penstock.runtime.scheduling.planning.admission import Admission
from penstock.runtime.scheduling.planning.draft import Draft
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence


class Windows:
    """When all rows decode and no request could enter, a plan may be a window of several decode steps. Pages
    for all of them are reserved first; a window is made shorter rather than preempt a sequence for it.

    Some rows make one token a step: those under a constraint, because the host must make their masks first,
    and those whose hidden states are wanted, because a window keeps none. Where steps are so short that
    windows are worth having, such rows get steps of their own between the windows of the others. Otherwise
    all rows step together, because two steps read the weights twice.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, admission: Admission) -> None:
        self._config = config
        self._roster = roster
        self._admission = admission
        self._plain_steps = 0
        """Decode steps of the other rows since rows that take part in no window last had a step."""

    def choose(self, draft: Draft, most: int) -> None:
        """Sets how many decode steps the plan has, at most `most`, and which rows take part."""
        decodes = self._decodes()
        if decodes is None:
            return
        plain, single = decodes
        if single and not (plain and draft.apart_steps):
            return
        if self._could_enter(draft):
            return
        if not single:
            draft.num_steps = max(self._steps_with_pages(plain, most), 1)
            return
        left = draft.apart_steps - self._plain_steps
        if left < 1:
            if self._steps_with_pages(single, 1):
                self._plain_steps, draft.single_rows = 0, True
            return
        num_steps = self._steps_with_pages(plain, min(most, left))
        if num_steps >= min(left, 2):  # otherwise there is no window, so all rows may step together
            self._plain_steps += num_steps
            draft.num_steps, draft.single_rows = num_steps, False

    def _decodes(self) -> tuple[list[Sequence], list[Sequence]] | None:
        """The running sequences that have a token to make: those for windows, and those that make one token
        a step. None if a running sequence is partly prefilled.
        """
        plain: list[Sequence] = []
        single: list[Sequence] = []
        for seq in self._roster.running:
            if seq.sits_out:
                continue
            if seq.num_computed < seq.prefill_until:
                return None
            if seq.num_computed < seq.max_computed:
                (single if seq.is_single else plain).append(seq)
        return plain, single

    def _could_enter(self, draft: Draft) -> bool:
        """Whether a waiting sequence can enter in this plan."""
        waiting = self._roster.waiting
        while (first := waiting.first(admit=draft.admit)) is not None:
            if self._admission.may_enter(first, draft) is not None:
                return True
            if first.awaits is None:
                return False
        return False

    def _steps_with_pages(self, seqs: list[Sequence], most: int) -> int:
        """How many steps these sequences can make: at most `most`, at most as many as one of them has tokens
        to make, and as many as there are pages for without a preemption (perhaps 0), rounded down to a length
        that windows may have.
        """
        groups = self._roster.groups
        num_steps = min(most, max((seq.max_computed - seq.num_computed for seq in seqs), default=1))
        while num_steps > 0:
            needed = 0
            for seq in seqs:
                end = min(seq.num_computed + num_steps, seq.max_computed)
                # A sequence that decodes has tables of the same length in all groups.
                needed += max(-(-end // groups.page_size) - len(seq.tables[0].pages), 0)
            if all(pool.can_allocate(needed) for pool in groups.pools):
                break
            num_steps -= 1
        if num_steps and (lengths := self._config.window_steps):
            return lengths[bisect_right(lengths, num_steps) - 1]
        return num_steps
