"""Which rows run next, and on which pages: how a plan is made. No jax.

Sequences are ranked: by arrival, or under the policy "priority" by priority and then arrival. Every step
shares one token budget between decodes (one token a row) and chunks of prefills:

1. All running decodes. One that needs a page and finds none preempts the last in rank of the running, which
   may be itself: its pages and slot go, its tokens stay and are prefilled when it comes back.
2. With the rest of the budget, in order of rank: sequences that are partly prefilled, and waiting
   requests. One of these enters when a slot, budget and the pages for all its known tokens are free
   (shared ones need not be), beside some that those who run will soon want (`Roster.headroom`), and, if
   it has penalties or a bias, one of the feature slots, of which there may be fewer. Nobody overtakes it,
   which is what keeps large requests from starving, but for two cases. Who lacks a feature slot steps
   aside for those who need none, and is in line again when one is given back: before all others who want
   it. And who waits for a prefix that a running prefill is about to publish (`prefix_cache`) steps aside
   (`waiting`), and is in line again once the last page they share is published, or will not be. So does a
   fork (`Request.fork_of`: an output after the first) while a running output of its request computes the
   prompt. It then enters with all of that but the last token: full pages are shared, the one it will
   write is copied. Copies precede a step's writes, so their sources are of a step before.

So that nobody waits for all of a long prompt, the first one that would take more than _LONG steps leaves a
part of each to those behind it: long ones among them get little, the others what they need, in order of rank.
What they do not take is its own. While decodes run, the prefills of a step may have a smaller budget than the
rest of the step's (`pacing`).

Under "priority" the first of the queue, if slots or pages are lacking, preempts running ones of lower
priority before the step is made: the last in rank, but for a feature slot the last of those that have one.

Every request ends (under "priority": once no more of higher priority come). Consider the first in rank of
all active requests. If it runs, it can take every page from those behind it (`add` refuses what would not
fit even then), and there is budget for it, because max_num_batched_tokens >= max_num_seqs and a row that
prefills is not one that decodes. If it waits, nobody behind it enters, so those who run end or are
preempted, until its slots and pages are free (behind one that lacks a feature slot others do enter, but
none of them takes that, and they enter no more once it is given back); when nobody runs, nothing is kept
for others. If it waits for a promised page, somebody of no lower priority is prefilling; in each step the
first of those who prefill moves on, only finitely many rank before the one who promised, and if that one
is preempted or ends, its promise is gone and the first in rank computes the page itself. So it is with a
fork and the output that computes its prompt, which as a rule arrived, and so ranks, before it.

With a sliding window a prefill enters with as many pages as it can make use of at a time, and exchanges those
that it reads no more for the next ones, before the decodes of lower rank get theirs. Where others hold some
of them too it gets fewer, and computes less; if none is left at all it takes one as a decode does.

When all rows decode and nobody could enter, a plan may be a window of several steps: pages for all of them
are reserved first, and the window is made shorter rather than that somebody is preempted for it. A row under
a constraint makes one token a step, because the host says which may follow. Where steps are short, so that
windows are worth having, such rows have steps of their own between the windows of the others; else all step
together, because two steps read the weights twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.runtime.pacing import LEAST_TOKENS
from penstock.runtime.plan import PageWrite, PlanRow
from penstock.runtime.request import Request
from penstock.runtime.roster import Prefix, Roster
from penstock.runtime.scheduler_config import SchedulerConfig
from penstock.runtime.sequence import Sequence, Status
from penstock.runtime.waiting import FEATURE_SLOT, NEXT_STEP

# One is made per row and step; calling the named tuple itself takes twice as long (46 us for 64).
_row: Callable[[tuple[object, ...]], PlanRow] = partial(tuple.__new__, PlanRow)
_RUNNING = Status.RUNNING  # looked up once
_LONG = 4
"""A prompt that is not computed within so many whole steps shares them with those behind it."""
_SHARE = 4
"""One part in so many of a step is kept for them."""
_FLOOR = 32
"""One part in so many of a step is what a long prompt behind a long one gets."""


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    in_flight: bool
    """Whether a step dispatched before was not committed yet."""
    admit: bool
    """Whether those may enter that never ran."""
    now_ns: int
    prefill_budget: int | None = None
    """Most prompt tokens beside decodes; None: as many as the token budget has."""
    apart_steps: int = 0
    """So many decode steps of the others come between two of rows under a constraint; 0: all step together.
    """
    num_steps: int = 1
    turn: bool | None = None
    """Whose rows these are: those under a constraint, the others, or all."""

    rows: list[PlanRow] = field(default_factory=list)
    sampling: list[Sequence | None] = field(default_factory=list)
    """For each row its sequence, if it samples."""
    writes: list[PageWrite] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    entered: list[tuple[int, Request]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sat_out: list[Sequence] = field(default_factory=list)
    """Those who were passed over because they sit out."""
    chunked: set[Sequence] = field(default_factory=set)  # with a row of prefill
    made: dict[int, tuple[int, ...]] = field(default_factory=dict)
    feature_slots: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, Sequence] = field(default_factory=dict)
    """By row, where log-probabilities of the prompt's tokens come back."""


class Planner:
    """Makes plans over a `Roster` and moves its sequences accordingly."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._plain_steps = 0  # since rows under a constraint had their turn
        self._blocked: Sequence | None = None  # the first in line, if it could not enter in the last step

    def make(self, draft: Draft, max_steps: int) -> None:
        """Fills in the rows, and all else, of a window of up to `max_steps` steps; no rows if nothing can be
        computed now.
        """
        waiting = self._roster.waiting
        waiting.happened(NEXT_STEP)
        if self._config.sliding_window is not None:
            self._drop_pages(self._config.sliding_window)
        if waiting and self._config.by_priority:
            self._make_room(draft)
        if max_steps > 1:
            draft.num_steps = self._window(draft, max_steps)
        prefills = self._add_decodes(draft)
        if draft.turn is None and (prefills or waiting):
            self._add_prefills(draft, prefills)

    def _window(self, draft: Draft, most: int) -> int:
        """How many decode steps the next plan may hold; sets the draft's `turn`."""
        roster = self._roster
        plain: list[Sequence] = []
        constrained: list[Sequence] = []
        for seq in roster.running:
            if seq.sits_out:
                continue
            if seq.num_computed < seq.prefill_until:
                return 1
            if seq.num_computed < seq.max_computed:
                (constrained if seq.is_constrained else plain).append(seq)
        if constrained and not (plain and draft.apart_steps):
            return 1
        while (first := roster.waiting.first(admit=draft.admit)) is not None:
            if self._may_enter(first, draft) is not None:
                return 1
            if first.awaits is None:
                break
        if not constrained:
            return max(self._steps_with_pages(plain, most), 1)
        left = draft.apart_steps - self._plain_steps
        if left < 1:
            if self._steps_with_pages(constrained, 1):
                self._plain_steps, draft.turn = 0, True
            return 1
        num_steps = self._steps_with_pages(plain, min(most, left))
        if num_steps < min(left, 2):
            return 1  # nobody need sit out where no window is to be had
        self._plain_steps += num_steps
        draft.turn = False
        return num_steps

    def _steps_with_pages(self, seqs: list[Sequence], most: int) -> int:
        """How many steps these may make: at most as many as somebody has tokens to make, and as there are
        pages for without preempting anybody, which may be none; but for that a length that windows may have.
        """
        pool = self._roster.pool
        num_steps = min(most, max((seq.max_computed - seq.num_computed for seq in seqs), default=1))
        while num_steps > 0:
            needed = 0
            for seq in seqs:
                end = min(seq.num_computed + num_steps, seq.max_computed)
                needed += max(-(-end // pool.page_size) - len(seq.pages), 0)
            if pool.can_allocate(needed):
                break
            num_steps -= 1
        if num_steps and (lengths := self._config.window_steps):
            return lengths[bisect_right(lengths, num_steps) - 1]
        return num_steps

    def _add_decodes(self, draft: Draft) -> list[Sequence]:
        """A row for every decode. Returns the running ones that are partly prefilled; none of them is
        preempted by a later decode, because victims come from the end.
        """
        roster = self._roster
        page_size = roster.pool.page_size
        rows, sampling, preempted = draft.rows, draft.sampling, draft.preempted
        num_steps, turn = draft.num_steps, draft.turn
        prefills: list[Sequence] = []
        for seq in roster.running[:]:
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
                if len(seq.pages) * page_size >= seq.prefill_until or self._exchange(seq, draft):
                    prefills.append(seq)
                continue
            count = seq.max_computed - start
            if count < 1:
                continue  # its last token is in flight
            if count > num_steps:
                count = num_steps
            if start + count > len(seq.pages) * page_size and not self._grow(seq, start + count, draft):
                continue
            bans = min(count, seq.bans_until - start) if start < seq.bans_until else 0
            rows.append(_row((seq.request_id, seq.slot, start, 1, None, True, bans, count)))
            sampling.append(seq)
            seq.num_computed = start + count
            seq.pending += count
        return prefills

    def _grow(self, seq: Sequence, end: int, draft: Draft) -> bool:
        """The pages for a row's positions below `end`, preempting the last of the running until they are
        free; false if they are not to be had.

        A victim has no row in this plan: it ranks behind `seq`, and rows are made in that order. While a step
        is in flight, `seq` sits out rather than lose its own pages: the commit may free some.
        """
        roster = self._roster
        num_pages = roster.pool.pages_for(end) - len(seq.pages)
        while not roster.pool.can_allocate(num_pages):
            if draft.in_flight and roster.running[-1] is seq:
                return False
            victim = roster.running[-1]
            self._preempt(victim, draft)
            if victim is seq:
                return False
        assert seq.slot is not None
        pages = roster.pool.allocate(num_pages)
        draft.writes.append(PageWrite(seq.slot, len(seq.pages), tuple(pages)))
        seq.pages += pages
        return True

    def _exchange(self, seq: Sequence, draft: Draft) -> bool:
        """Pages for the next chunk of a prefill with a sliding window, instead of those it reads no more;
        false if it gets none at all. There are too few only where some of the old ones have other holders:
        then it has a shorter chunk, and preempts for its first token.
        """
        roster, config = self._roster, self._config
        page_size = roster.pool.page_size
        start, num_pages = seq.num_computed, len(seq.pages)
        num_unread = roster.num_unread(start)
        if num_unread > seq.num_dropped:
            roster.drop_pages(seq, num_unread)
        chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        end = min(start + chunk, seq.prefill_until, (num_pages + roster.pool.num_available) * page_size)
        end = max(end, start + 1)
        return end <= num_pages * page_size or self._grow(seq, end, draft)

    def _add_prefills(self, draft: Draft, prefills: list[Sequence]) -> None:
        """Chunks of those underway and of those who enter, in order of rank."""
        waiting = self._roster.waiting
        whole = budget = self._prefill_budget(draft, len(prefills))
        self._blocked = None
        most = self._config.max_prefill_chunk or budget
        parts: list[tuple[Sequence, int]] = []
        """Who gets a chunk, and where it begins."""
        underway = deque(prefills)
        entering, shared = True, False
        while budget > 0:
            candidate = waiting.first(admit=draft.admit) if entering else None
            if candidate is not None and not (underway and underway[0].rank < candidate.rank):
                prefix = self._may_enter(candidate, draft)
                if prefix is None:
                    entering = candidate.awaits is not None  # else nobody may overtake it
                    self._blocked = None if entering else candidate
                    continue
                self._enter(candidate, prefix, draft)
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
            parts.append((seq, seq.num_computed))
            draft.chunked.add(seq)
            budget -= self._advance(seq, min(count, budget, most))
        for seq, start in parts:  # what was kept for others, and nobody took
            if budget > 0:
                budget -= self._advance(seq, min(budget, start + most - seq.num_computed))
        for seq, start in parts:
            row = self._chunk(seq, start)
            if seq.request.prompt_logprobs is not None and row.start + 1 < seq.num_prompt:
                draft.prompts[len(draft.rows)] = seq
            draft.rows.append(row)
            draft.sampling.append(seq if row.samples else None)

    def _prefill_budget(self, draft: Draft, num_prefills: int) -> int:
        """Prompt tokens of this step: what the decodes leave, and at most `draft.prefill_budget` if there are
        any. That is for one prompt; many at once have its times the root of their number, because as a crowd
        they lose more by waiting, and the machine by running half empty, than those who decode. Who stepped
        aside, or is behind one that lacks pages, cannot come in and does not count. Where steps are padded,
        as many as pad nothing, but enough to be measured.
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

    def _may_enter(self, seq: Sequence, draft: Draft) -> Prefix | None:
        """With what the first in line can enter now. None if it cannot: it steps aside if others may pass it,
        else nobody may.
        """
        roster = self._roster
        # If preempted while its token was in flight, it must not sample that position a second time.
        if seq.pending or not roster.num_free_slots or seq.request_id in draft.preempted:
            return None
        if self._awaits_feature_slot(seq):
            return None
        prefix = self._prefix(seq, draft)
        return prefix if prefix is not None and roster.can_enter(seq, prefix) else None

    def _awaits_feature_slot(self, seq: Sequence) -> bool:
        """Whether the first in line has to wait for one: it steps aside. Not where one of lower priority has
        one, which `_make_room` takes as soon as there are pages: then it stands in line.
        """
        roster = self._roster
        if roster.has_feature_slot_for(seq):
            return False
        if any(other.needs_feature_slot and other.rank[0] > seq.rank[0] for other in roster.running):
            return False
        roster.waiting.step_aside(seq, FEATURE_SLOT)
        return True

    def _prefix(self, seq: Sequence, draft: Draft) -> Prefix | None:
        """What the first in line need not compute; None if it is yet to be computed by others: it steps
        aside.
        """
        roster = self._roster
        source = roster.source_of(seq)
        if source is None:
            pages = roster.cache.match(seq)
            key = roster.cache.promised(seq, len(pages))
            if key is None:
                return Prefix(pages, len(pages) * roster.pool.page_size)
            roster.waiting.step_aside(seq, key)
        elif source.num_computed < seq.num_prompt - 1:
            roster.waiting.step_aside(seq, source)
        else:
            prefix = roster.fork(seq, source)
            if prefix.partial is None or source not in draft.chunked:
                return prefix
            roster.waiting.step_aside(seq, NEXT_STEP)  # a copy is made before the step writes
        return None

    def _enter(self, seq: Sequence, prefix: Prefix, draft: Draft) -> None:
        slot = self._roster.enter(seq, prefix)
        if prefix.partial is not None:
            draft.copies.append((prefix.partial, seq.pages[len(prefix.pages)]))
        draft.writes.append(PageWrite(slot, 0, tuple(seq.pages)))
        draft.entered.append((slot, seq.request))
        if seq.feature_slot is not None:
            draft.feature_slots[slot] = seq.feature_slot
        if seq.request.sampling.has_penalties and len(seq.token_ids) > seq.num_prompt:
            draft.made[slot] = tuple(seq.token_ids[seq.num_prompt :])
        if seq.scheduled_ns == 0:
            seq.scheduled_ns = draft.now_ns
            seq.cached_prompt_tokens = seq.num_computed

    def _advance(self, seq: Sequence, most: int) -> int:
        """Adds up to `most` tokens to the next chunk of a prefill. Returns how many."""
        start = seq.num_computed
        covered = len(seq.pages) * self._roster.pool.page_size  # with a sliding window maybe not all
        seq.num_computed = end = min(start + most, seq.prefill_until, covered)
        if end >= seq.publish_at:
            self._roster.cache.publish(seq, end)
        if end >= seq.num_prompt - 1:
            self._roster.waiting.happened(seq)  # its forks may have the prompt
        return end - start

    def _chunk(self, seq: Sequence, start: int) -> PlanRow:
        """The part of a prefill from `start` up to where it has advanced; its last part samples the next
        token.
        """
        assert seq.slot is not None
        end = seq.num_computed
        samples = end == seq.prefill_until
        seq.pending += samples
        bans = int(samples and end <= seq.bans_until)
        return PlanRow(
            seq.request_id, seq.slot, start, end - start, tuple(seq.token_ids[start:end]), samples, bans
        )

    def _make_room(self, draft: Draft) -> None:
        """The first of the queue gets slot and pages from running ones of lower priority, if they suffice."""
        roster = self._roster
        running = roster.running
        while True:
            first = roster.waiting.first(admit=draft.admit)
            if first is None or first.pending or not running or running[-1].rank[0] <= first.rank[0]:
                return
            if self._awaits_feature_slot(first):
                continue
            prefix = self._prefix(first, draft)
            if prefix is not None:
                break
        if roster.can_enter(first, prefix):
            return
        victims = [seq for seq in running if seq.rank[0] > first.rank[0]]
        lacks_feature_slot = not roster.has_feature_slot_for(first)
        holders = [seq for seq in victims if seq.needs_feature_slot]
        shared = roster.shared_by(prefix)
        roster.pool.retain(shared)  # what it shares with a victim must not count as gained
        gained = roster.pool.num_released_with(seq.held_pages for seq in victims)
        needed = roster.num_new(first, prefix)
        needed += roster.headroom(running[: len(running) - len(victims)])
        if needed <= roster.pool.num_available + gained:
            if lacks_feature_slot:
                self._preempt(holders[-1], draft)  # wherever it ranks: nobody else can give that
            while not roster.can_enter(first, prefix):
                self._preempt(running[-1], draft)
        roster.pool.release(shared)

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        self._roster.preempt(victim)
        draft.preempted.append(victim.request_id)

    def _drop_pages(self, window: int) -> None:
        """Gives back pages before the window of every position still to be computed. A step dispatched before
        may use them, but it runs first. What is not known yet is kept, lest the prefix cache miss a page; and
        a prefill keeps what it can exchange.
        """
        page_size = self._roster.pool.page_size
        for seq in self._roster.running:
            start = seq.num_computed
            if len(seq.pages) * page_size < seq.prefill_until:
                continue
            num_pages = max(min(start - window + 1, start - seq.pending), 0) // page_size
            if num_pages > seq.num_dropped:
                self._roster.drop_pages(seq, num_pages)
