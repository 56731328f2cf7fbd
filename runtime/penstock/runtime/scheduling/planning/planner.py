"""How a plan is made: which rows run next, and on which pages. No jax.

Sequences are ranked: by arrival, or under the policy "priority" by priority and then arrival. Every step
shares one token budget between decodes (one token a row) and chunks of prefills:

1. All running decodes. One that needs a page and finds none preempts the last in rank of the running, which
   may be itself: its pages and slot go, its tokens stay and are prefilled when it comes back (`page_supply`).
2. With the rest of the budget, in order of rank: sequences that are partly prefilled (`prefills`), and
   waiting ones (`admission`).

A waiting sequence enters when a slot, budget and the pages for all its known tokens are free (shared ones
need not be), beside some that the running ones will soon want (`Roster.headroom`), and, if it has penalties
or a bias, one of the feature slots, of which there may be fewer. No other sequence overtakes it, which is
what keeps large requests from starving, but for two cases in which it steps aside (`waiting`):

- It lacks a feature slot. Sequences that need none pass it, and it is in line again when one is given back:
  before all others that want it.
- It waits for a prefix that a running prefill is about to publish (`prefix_cache`). It is in line again once
  the last page that both share is published, or will not be. So does a fork (`Request.fork_of`: an output
  after the first) while a running output of its request computes the prompt. The fork then enters with all
  of that but the last token: full pages are shared, the one it will write is copied. Copies precede a step's
  writes, so their sources are of a step before.

Under "priority" the first of the queue, if slots or pages are lacking, preempts running sequences of lower
priority before the step is made: the last in rank, but for a feature slot the last that has one. While
decodes run, the prefills of a step may have a smaller budget than the rest of the step's (`pacing`).

Why every request finishes (under "priority": once no more of higher priority come). Consider the first in
rank of all active sequences. There are three cases:

1. It runs. Then it can take every page from those behind it (`Scheduler.prepare` refuses what would not fit
   even then), and there is budget for it, because max_num_batched_tokens >= max_num_seqs, and a row that
   prefills is not one that decodes.
2. It waits for slots or pages. Then no sequence behind it enters, so the running ones end or are preempted
   until its slots and pages are free. When none runs, nothing is kept for others. (Behind one that lacks a
   feature slot others do enter, but none of them takes that slot, and they enter no more once it is free.)
3. It waits for a promised page. Then a sequence of no lower priority is prefilling. In each step the first
   of the prefills moves on, and only finitely many rank before the one that promised. If that one is
   preempted or ends, its promise is withdrawn, and the first in rank computes the page itself. A fork waits
   in the same way for the output that computes its prompt, which as a rule arrived, and so ranks, before it.

With a sliding window a prefill enters with as many pages as it can make use of at a time, and exchanges those
that it reads no more for the next ones, before the decodes of lower rank get theirs. Where others hold some
of them too it gets fewer, and computes less; if none is left at all it takes one as a decode does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.runtime.scheduling.plan import PlanRow
from penstock.runtime.scheduling.planning.admission import Admission
from penstock.runtime.scheduling.planning.draft import Draft
from penstock.runtime.scheduling.planning.page_supply import PageSupply
from penstock.runtime.scheduling.planning.prefills import Prefills
from penstock.runtime.scheduling.planning.windows import Windows
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence, Status
from penstock.runtime.scheduling.waiting import NEXT_STEP

# One is made per row and step, of its fields in their order; calling the named tuple itself takes twice as
# long (46 us for 64).
_row: Callable[[tuple[object, ...]], PlanRow] = partial(tuple.__new__, PlanRow)
_RUNNING = Status.RUNNING  # looked up once


class Planner:
    """Makes plans over a `Roster` and moves its sequences accordingly."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._supply = PageSupply(config, roster)
        self._admission = Admission(roster, self._supply)
        self._windows = Windows(config, roster, self._admission)
        self._prefills = Prefills(config, roster, self._admission)

    def make(self, draft: Draft, max_steps: int) -> None:
        """Fills in a plan of up to `max_steps` decode steps; with no rows if nothing can be computed now."""
        waiting = self._roster.waiting
        waiting.happened(NEXT_STEP)
        if self._config.sliding_window is not None:
            self._supply.drop_unread(self._config.sliding_window)
        if waiting and self._config.by_priority:
            self._admission.make_room(draft)
        if max_steps > 1:
            self._windows.choose(draft, max_steps)
        prefills = self._add_decodes(draft)
        if draft.turn is None and (prefills or waiting):
            self._prefills.add(draft, prefills)

    def _add_decodes(self, draft: Draft) -> list[Sequence]:
        """Adds a row for every decode. Returns the running sequences that are partly prefilled; none of them
        is preempted by a later decode, because victims come from the end.
        """
        supply, page_size = self._supply, self._roster.pool.page_size
        rows, sampling, preempted = draft.rows, draft.sampling, draft.preempted
        num_steps, turn = draft.num_steps, draft.turn
        prefills: list[Sequence] = []
        for seq in self._roster.running[:]:
            if preempted and seq.status is not _RUNNING:
                continue
            if seq.sits_out:
                seq.sits_out -= 1
                draft.sat_out.append(seq)
                continue
            if turn is not None and seq.is_constrained is not turn:
                continue
            start = seq.num_computed
            if start < seq.prefill_until:
                if len(seq.pages) * page_size >= seq.prefill_until or supply.exchange(seq, draft):
                    prefills.append(seq)
                continue
            count = seq.max_computed - start
            if count < 1:
                continue  # its last token is in flight
            if count > num_steps:
                count = num_steps
            if start + count > len(seq.pages) * page_size and not supply.grow(seq, start + count, draft):
                continue
            bans = min(count, seq.bans_until - start) if start < seq.bans_until else 0
            rows.append(_row((seq.request_id, seq.slot, start, 1, None, True, bans, count)))
            sampling.append(seq)
            seq.num_computed = start + count
            seq.pending += count
        return prefills
