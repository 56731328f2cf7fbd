"""Makes plans: which rows run next, and on which pages. No jax.

`Windows` decides how many decode steps one plan holds, and which rows take part; tokens are proposed only for
plans of one step (`proposals`). All else is about `Planner`.

Sequences are ranked: by arrival, or under the policy "priority" by priority and then arrival. In every step,
decodes (one token a row) and prefill chunks share one token budget:

1. All running decodes come first. A decode that needs a page and finds none preempts the running sequence
   that is last in rank, which may be itself. The victim gives back its pages and slot and keeps its tokens,
   which are prefilled when it comes back (`admission.PageSupply`).
2. The rest of the budget goes, in order of rank, to sequences that are partly prefilled (`prefills`) and to
   waiting ones (`admission`).

A waiting sequence enters when all of this is free: a slot; budget; pages for all its known tokens, except
those that it shares; some pages more that the running sequences will soon need (`PageGroup.headroom`); and a
feature slot, of which there may be fewer than slots, if it has penalties or a bias. No other sequence
overtakes it, so large requests cannot starve. In two cases, however, it steps aside and lets others pass
(`waiting`):

- It lacks a feature slot. Sequences that need none pass it. When a feature slot is given back it stands in
  line again, before all others that want one.
- It waits for a prefix that a running prefill is about to publish (`prefix_cache`). It stands in line again
  when the last page that both have in common is published, or never will be. A fork (`Request.fork_of`: an
  output after the first) waits in this way for a running output of its request to compute the prompt. It then
  enters with all of the prompt but the last token: it shares the full pages, and copies the page that it will
  write. Copies are made before a step writes, so their sources were written by an earlier step.

Under "priority", if the first sequence in line lacks slots or pages, it preempts running sequences of lower
priority before the step is made: the last in rank or, for a feature slot, the last that has one. While
decodes run, the prompt tokens of a step may have a smaller budget than the rest of the step (`Pacer`).

Why every request finishes (under "priority": once no more requests of higher priority arrive). Consider the
active sequence that is first in rank:

- It runs. It can take every page from the sequences behind it, and `Scheduler.prepare` refuses what would not
  fit even then. There is budget for it, because max_num_batched_tokens >= max_num_seqs and a sequence that is
  prefilled has no decode in the same step.
- It waits for slots or pages. No sequence behind it enters, so the running ones end or are preempted until
  its slots and pages are free. (If it lacks a feature slot, others do enter, but none of them takes one, and
  when one is given back no more enter.) When no sequence runs, no headroom is kept.
- It waits for a promised page. A sequence of no lower priority is being prefilled. In each step the first of
  the prefills moves on, and only finitely many rank before the one that made the promise. If that one is
  preempted or ends, the promise falls and the first in rank computes the page itself. A fork waits in the
  same way for the output that computes its prompt.

In a group of layers with a sliding window (`pages`), a prefill enters with as many pages as it can use at a
time, and exchanges those that it will not read again for the next ones, before decodes of lower rank get
theirs. If other requests hold some of its old pages too, it gets fewer new ones and computes less; if it gets
none at all, it takes one as a decode does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

from penstock.runtime.scheduling.admission import Admission, PageSupply
from penstock.runtime.scheduling.plan import Draft, PlanRow
from penstock.runtime.scheduling.prefills import Prefills
from penstock.runtime.scheduling.proposals import Proposals
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence, Status
from penstock.runtime.scheduling.text_windows import TextWindows
from penstock.runtime.scheduling.waiting import NEXT_STEP


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
        """Set how many decode steps the plan has, at most `most`, and which rows take part."""
        decodes = self._decodes()
        if decodes is None:
            return
        plain, single = decodes
        if single and not (plain and draft.apart_steps):
            return
        if self.could_enter(draft):
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
        """Return the running sequences that have a token to make: those for windows, and those that make one
        token a step. None if a running sequence is partly prefilled.
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

    def could_enter(self, draft: Draft) -> bool:
        """Say whether a waiting sequence can enter in this plan."""
        waiting = self._roster.waiting
        while (first := waiting.first(admit=draft.admit)) is not None:
            if self._admission.may_enter(first, draft) is not None:
                return True
            if first.awaits is None:
                return False
        return False

    def _steps_with_pages(self, seqs: list[Sequence], most: int) -> int:
        """Tell how many steps these sequences can make: at most `most`, at most as many as one of them has
        tokens to make, and as many as there are pages for without a preemption (perhaps 0), rounded down to a
        length that windows may have.
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


# Makes a PlanRow of its fields in their order. Calling PlanRow itself, for every row of every step, would
# take twice as long (46 us for 64 rows).
_row: Callable[[tuple[object, ...]], PlanRow] = partial(tuple.__new__, PlanRow)
_RUNNING = Status.RUNNING  # a name of its own, because an enum's member is slow to look up


class Planner:
    """Makes plans over a `Roster`, and moves its sequences accordingly."""

    def __init__(
        self,
        config: SchedulerConfig,
        roster: Roster,
        proposals: Proposals | None = None,
        text_windows: TextWindows | None = None,
    ) -> None:
        self._config = config
        self._roster = roster
        self._proposals = proposals
        self._text_windows = text_windows
        self._supply = PageSupply(config, roster)
        self._admission = Admission(roster, self._supply)
        self._windows = Windows(config, roster, self._admission)
        self._prefills = Prefills(config, roster, self._admission)

    def make(self, draft: Draft, max_steps: int) -> None:
        """Fill in `draft`, a plan of up to `max_steps` decode steps. It stays without rows if nothing can be
        computed now.
        """
        waiting, snapshots = self._roster.waiting, self._roster.snapshots
        waiting.happened(NEXT_STEP)
        if snapshots is not None:
            snapshots.begin_plan(self._roster.has_forks)
        self._roster.images.begin_plan()
        if self._roster.groups.windowed:
            self._roster.groups.drop_behind(self._roster.running)
        if waiting and self._config.by_priority:
            self._admission.make_room(draft)
        if self._text_windows is not None:
            self._text_windows.are_used = max_steps > 1
        if self._proposals is not None and not self._windows.could_enter(draft):
            self._proposals.choose(draft)
        if max_steps > 1 and not draft.proposed:
            self._windows.choose(draft, max_steps)
        prefills = self._add_decodes(draft)
        if self._text_windows is not None and draft.num_steps > 1:
            draft.reads_text = self._text_windows.choose(len(draft.rows))
        if draft.single_rows is None and (prefills or waiting):
            self._prefills.add(draft, prefills)

    def _add_decodes(self, draft: Draft) -> list[Sequence]:
        """Add a row for every decode. Returns the running sequences that are partly prefilled. No later
        decode preempts one of these, because victims are taken from the end of the order.
        """
        supply = self._supply
        rows, sampling, preempted = draft.rows, draft.sampling, draft.preempted
        num_steps, single, proposed = draft.num_steps, draft.single_rows, draft.proposed
        prefills: list[Sequence] = []
        for seq in self._in_turn(draft.turn):
            if preempted and seq.status is not _RUNNING:
                continue
            if seq.sits_out:
                seq.sits_out -= 1
                draft.sat_out.append(seq)
                continue
            if single is not None and seq.is_single is not single:
                continue
            start = seq.num_computed
            if start < seq.prefill_until:
                if seq.covered >= seq.prefill_until or supply.exchange(seq, draft):
                    prefills.append(seq)
                continue
            count = seq.max_computed - start
            if count < 1:
                continue  # its last token is in flight
            guessed = proposed.get(seq, ()) if proposed else ()
            if count > num_steps + len(guessed):
                count = num_steps + len(guessed)
            if start + count > seq.covered and not supply.grow(seq, start + count, draft):
                continue
            bans = min(count, seq.bans_until - start) if start < seq.bans_until else 0
            num_tokens = 1 + len(guessed)
            rows.append(_row((seq.request_id, seq.slot, start, num_tokens, None, True, bans, count, guessed)))
            sampling.append(seq)
            seq.num_computed = start + count
            seq.pending += count
        return prefills

    def _in_turn(self, turn: int | None) -> list[Sequence]:
        """Return the running sequences that may have a row in this turn."""
        running = self._roster.running
        if turn is None:
            return running[:]
        return [seq for seq in running if seq.turn == turn]
