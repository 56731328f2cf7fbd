"""Drives a scheduler and the fake runner, and checks each plan against its own account of every request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from penstock.runtime.errors import DuplicateRequestId, ExceedsKVCapacity, PromptTooLong, QueueFull
from penstock.runtime.requests.request import FinishReason, Request, StepOutput, TokenLogprobs, request_id_of
from penstock.runtime.scheduling.plan import PageCopy, Plan, PlanRow, StepResult, drafted_tokens
from penstock.runtime.scheduling.proposals import Proposer
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.scheduler.fake_runner import FakeRunner, run_alone

SECOND = 10**9


class Tracked:
    """The test's own account of one request."""

    def __init__(self, request: Request, order: int, by_priority: bool, now_ns: int) -> None:
        self.request, self.order = request, order
        self.rank = (-request.priority if by_priority else 0, order)
        limit_s = request.stopping.time_limit_s
        self.deadline_ns = None if limit_s is None else now_ns + limit_s * SECOND
        self.expected: list[int] = []
        self.reason = FinishReason.ABORTED
        self.predictable = True
        """False once it has run with KV of older weights."""
        self.made: list[int] = []
        self.slot: int | None = None  # None while it waits
        self.feature_slot: int | None = None
        self.computed = 0
        self.pending = 0
        self.decoding = False
        self.preemptions = 0
        self.overtaken = False
        """Others entered while it waited for a prefix that another sequence was computing."""
        self.cached: int | None = None
        """How many tokens it did not have to compute when it entered first."""
        self.started = False
        """Whether an output of its request has entered while it was active."""
        self.shares = False
        """Whether its forks may share its pages: it runs, and the prefix cache was not flushed since it
        entered.
        """

    @property
    def has_features(self) -> bool:
        """Whether it needs a feature slot."""
        return self.request.sampling.has_penalties or self.request.sampling.has_bias

    @property
    def known(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.made]

    def entered(self, plan: Plan) -> bool:
        return any(request is self.request for _, request in plan.new_requests)

    def limit(self, context_limit: int) -> int:
        """Return the most tokens that it may have, with the prompt."""
        most = self.request.stopping.max_tokens
        whole = len(self.request.prompt_token_ids) + (context_limit if most is None else most)
        return min(whole, context_limit)


class Traffic:
    """A scheduler, a fake runner and the requests in them. Up to two plans may be in flight, as in an engine
    that overlaps steps.
    """

    def __init__(self, config: SchedulerConfig, proposer: Proposer | None = None) -> None:
        self.config = config
        self.scheduler = Scheduler(config, proposer)
        self.runner = FakeRunner(config)
        size = config.page_size
        chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        capacities = []
        self.most_pages: list[int] = []
        """The most pages that a prefill holds at a time, in each group of layers."""
        for group in config.groups:
            most, capacity = group.num_pages, size * group.num_pages
            if group.window is not None:
                most = min(most, -(-(group.window + chunk) // size) + 1)
                if group.num_pages >= -(-group.window // size) + 2:
                    capacity = max(capacity, config.max_model_len)
            self.most_pages.append(most)
            capacities.append(capacity)
        self.capacity = min(capacities)
        self.has_windows = any(group.window is not None for group in config.groups)
        self.context_limit = min(config.max_model_len, self.capacity + 1)
        self.now_ns = SECOND
        self.active: dict[str, Tracked] = {}
        self.arrivals = 0
        self.budget = 0  # the least number of tokens that the newest plan may be limited to
        self.sitting_out: bool | None = (
            None  # sequences that sit out the newest plan: those under a constraint, or the others
        )
        self.plain_steps = 0  # decode steps in which rows under a constraint sat out
        self.most_apart = 0
        self.in_flight: deque[tuple[Plan, StepResult, list[Tracked]]] = deque()
        self.streams: list[tuple[int, tuple[int, ...], FinishReason]] = []
        """For every request that ended: its order of arrival, its tokens, and why it ended."""

    def may_run(self, tracked: Tracked, admit: bool) -> bool:
        """While nobody is admitted, requests that have started go on with all their outputs."""
        return admit or tracked.started

    def siblings(self, tracked: Tracked) -> list[Tracked]:
        """Return the active outputs of its request."""
        name = request_id_of(tracked.request.request_id)
        return [other for other in self.active.values() if request_id_of(other.request.request_id) == name]

    # ---- what happens to the scheduler

    def arrive(self, request: Request) -> None:
        num_prompt, stopping = len(request.prompt_token_ids), request.stopping
        longest = num_prompt + (1 if stopping.max_tokens is None else stopping.max_tokens)
        num_waiting = sum(tracked.slot is None for tracked in self.active.values())
        refusal: type[Exception] | None = None
        outputs = {request_id_of(name) for name in self.active}
        if num_prompt + 1 > self.config.max_model_len:
            refusal = PromptTooLong
        elif min(longest, self.config.max_model_len) > self.capacity + 1:
            refusal = ExceedsKVCapacity
        elif request.request_id in self.active or request.request_id in outputs:
            refusal = DuplicateRequestId
        elif num_waiting >= self.config.max_queued_requests:
            refusal = QueueFull
        if refusal is not None:
            with pytest.raises(refusal):
                self.scheduler.add(request, self.now_ns)
            return
        self.scheduler.add(request, self.now_ns)
        by_priority = self.config.scheduling_policy == "priority"
        tracked = Tracked(request, self.arrivals, by_priority, self.now_ns)
        self.predict(tracked)
        self.active[request.request_id] = tracked
        tracked.started = self.siblings(tracked)[0].started
        self.arrivals += 1

    def predict(self, tracked: Tracked) -> None:
        """Compute what it must generate from the tokens it has so far, whose KV it no longer holds."""
        tracked.expected, tracked.reason = run_alone(
            tracked.request,
            self.context_limit,
            windows=self.runner.windows,
            generation=self.runner.generation,
            made=tracked.made,
            has_state=self.config.has_state,
        )

    def run(
        self,
        num_steps: int,
        ahead: int,
        max_steps: int = 1,
        prefill_budget: int | None = None,
        apart_steps: int = 0,
    ) -> None:
        """Make `num_steps` plans, with at most `ahead` of them in flight when each is made."""
        for _ in range(num_steps):
            while len(self.in_flight) > ahead:
                self.commit()
            dispatched = self.dispatch(True, max_steps, prefill_budget, apart_steps)
            if not dispatched and self.in_flight:
                self.commit()
            self.accounts_agree()
        while len(self.in_flight) > ahead:
            self.commit()

    def dispatch(
        self,
        admit: bool = True,
        max_steps: int = 1,
        prefill_budget: int | None = None,
        apart_steps: int = 0,
    ) -> bool:
        """Run the next plan. Returns whether there was one."""
        self.now_ns += 1
        plan = self.scheduler.schedule(
            self.now_ns,
            admit=admit,
            max_steps=max_steps,
            prefill_budget=prefill_budget,
            apart_steps=apart_steps,
        )
        if plan is None:
            movable = [t for t in self.active.values() if self.may_run(t, admit)]
            assert not movable or self.in_flight, "there is work that could run, but no plan"
            return False
        self.check_plan(plan, admit, max_steps, prefill_budget, apart_steps)
        owners = [self.active[row.request_id] for row in plan.rows]
        self.in_flight.append((plan, self.runner.execute(plan), owners))
        return True

    def commit(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Commit the oldest plan in flight. `meanwhile` is called after the constraints have accepted the
        tokens, when the engine's lock is not held.
        """
        plan, result, owners = self.in_flight.popleft()
        now_ns = self.now_ns
        verdicts = self.scheduler.accept(plan, result, now_ns)
        meanwhile()
        outputs = self.scheduler.commit(plan, result, now_ns, verdicts)
        live = [
            (row, tokens, owner)
            for row, tokens, owner in zip(plan.rows, result.token_ids, owners, strict=True)
            if row.samples and self.active.get(row.request_id) is owner
        ]
        assert [output.request_id for output in outputs] == [row.request_id for row, _, _ in live]
        for output, (row, tokens, owner) in zip(outputs, live, strict=True):
            owner.pending -= row.max_samples
            if row.proposed and owner.slot is not None:
                owner.computed -= row.max_samples - len(tokens)
                if self.config.has_state and len(tokens) < row.max_samples:
                    owner.computed, owner.decoding = row.start, False
            counted = tuple(tokens)
            if owner.predictable:  # otherwise its end is not known
                counted = counted[: len(owner.expected) - len(owner.made)]
                assert output.token_ids == counted
            owner.made += output.token_ids
            asked = owner.request.logprobs is not None
            made = tuple(TokenLogprobs(-float(token)) for token in output.token_ids)
            assert output.logprobs == (made if asked else ())
            self.check_output(output, owner)

    def abort(self, name: str, stop: bool) -> None:
        reason = FinishReason.STOP if stop else FinishReason.ABORTED
        output = self.scheduler.abort(name, "gone", self.now_ns, reason=reason, stop="." if stop else None)
        assert output is not None
        assert output.finish is not None
        assert (output.finish.reason, output.token_ids) == (reason, ())
        del self.active[name]
        assert self.scheduler.finished(name)
        assert self.scheduler.abort(name, "again", self.now_ns) is None

    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND
        outputs = self.scheduler.expire(self.now_ns)
        late = [
            n for n, t in self.active.items() if t.deadline_ns is not None and t.deadline_ns <= self.now_ns
        ]
        assert sorted(output.request_id for output in outputs) == sorted(late)
        for output in outputs:
            assert output.finish is not None
            assert (output.finish.reason, output.token_ids) == (FinishReason.TIME_LIMIT, ())
            del self.active[output.request_id]

    def preempt_all(self) -> None:
        running = [tracked for tracked in self.active.values() if tracked.slot is not None]
        assert set(self.scheduler.preempt_all()) == {t.request.request_id for t in running}
        for tracked in running:
            self.lose_pages(tracked)

    def flush(self) -> None:
        used = self.scheduler.load().pages_used
        freed, in_use = self.scheduler.flush_prefix_cache()
        assert 0 <= in_use <= used
        assert 0 <= freed <= self.config.total_pages - used
        for tracked in self.active.values():
            tracked.shares = False
        assert self.scheduler.flush_prefix_cache() == (0, 0)

    def finish_started(self, ahead: int) -> None:
        """As an update that waits: no request starts, and those that have started end on the old weights."""
        while any(tracked.started for tracked in self.active.values()):
            while len(self.in_flight) > ahead:
                self.commit()
            if not self.dispatch(admit=False) and self.in_flight:
                self.commit()
            self.accounts_agree()
        while self.in_flight:
            self.commit()

    def fail_all(self) -> None:
        """As weights that broke."""
        error = RuntimeError("the weights are gone")
        for name in list(self.active):
            output = self.scheduler.fail(name, error, self.now_ns)
            assert (output.error, output.token_ids) == (error, ())
            del self.active[name]

    def update_weights(self, recompute: bool) -> None:
        """Update the weights with nothing in flight; running requests keep their KV, or with `recompute` are
        preempted.
        """
        while self.in_flight:
            self.commit()
        if recompute:
            self.preempt_all()
        self.runner.generation += 1
        self.scheduler.use_weights(self.runner.generation)
        for tracked in self.active.values():
            tracked.shares = False
            if tracked.slot is None:
                tracked.predictable = True
                self.predict(tracked)
            else:
                tracked.predictable = False

    # ---- what must hold

    def lose_pages(self, tracked: Tracked) -> None:
        tracked.slot, tracked.computed, tracked.decoding, tracked.shares = None, 0, False, False
        tracked.overtaken = False
        tracked.preemptions += 1
        if not tracked.predictable and not tracked.pending:
            tracked.predictable = True
            self.predict(tracked)

    def check_plan(
        self, plan: Plan, admit: bool, max_steps: int, prefill_budget: int | None, apart_steps: int
    ) -> None:
        active = self.active
        self.budget = self.config.max_num_batched_tokens
        num_decodes = plan.num_tokens - plan.num_prompt_tokens  # with those that are proposed
        planned = {row.request_id for row in plan.rows}
        assert len(planned) == len(plan.rows)
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        self.check_window(plan, max_steps)
        self.check_turn(plan, apart_steps)
        for name in plan.preempted:
            assert name not in planned
            self.lose_pages(active[name])
        running = [t for t in active.values() if t.slot is not None]
        most = self.budget
        if num_decodes and prefill_budget is not None:
            # The limit lies between that for all waiting prompts that may enter and that for none of them.
            waiting, free = len(active) - len(running), self.config.max_num_seqs - len(running)
            num_prefills = sum(not t.decoding for t in self.in_turn(plan, running))
            most, self.budget = (
                min(self.budget, num_decodes + int(prefill_budget * max(num_prompts, 1) ** 0.5))
                for num_prompts in (num_prefills + min(waiting, free), num_prefills)
            )
        assert 0 < plan.num_tokens <= most
        rows = {row.request_id: row for row in plan.rows}
        copies = list(plan.page_copies)
        for slot, request in plan.new_requests:
            tracked = active[request.request_id]
            assert request is tracked.request
            assert self.may_run(tracked, admit)
            for output in self.siblings(tracked):
                output.started = True
            assert tracked.slot is None
            assert slot == min(set(range(self.config.max_num_seqs)) - {t.slot for t in running})
            feature_slot = plan.feature_slots.get(slot)
            assert (feature_slot is not None) is tracked.has_features
            if feature_slot is not None:
                most = self.config.feature_slots or self.config.max_num_seqs
                others = {t.feature_slot for t in running if t.has_features}
                assert feature_slot == min(set(range(most)) - others)
            tracked.feature_slot = feature_slot
            tracked.slot, tracked.decoding = slot, False
            sources = self.sources(tracked, running)
            self.check_shared(rows[request.request_id], tracked, sources, copies, plan)
            tracked.shares = True
            running.append(tracked)
        assert not copies
        # The last in rank are preempted; for a feature slot, the last of those that hold one.
        for lost in (active[name] for name in plan.preempted):
            stay = [t for t in running if t.has_features or not lost.has_features]
            assert all(tracked.rank < lost.rank for tracked in stay)
        self.check_fairness(plan, admit, running)
        self.check_shares(plan)
        for row in plan.rows:
            self.check_row(row, active[row.request_id], plan)

    def in_turn(self, plan: Plan, running: list[Tracked]) -> list[Tracked]:
        """Return those of the running requests that this plan, which has decodes, may have rows for."""
        return running

    def check_window(self, plan: Plan, max_steps: int) -> None:
        assert 1 <= plan.num_steps <= max_steps
        assert not self.config.window_steps or plan.num_steps in self.config.window_steps
        if plan.num_steps > 1:
            assert not plan.preempted
            assert not plan.new_requests
            assert all(row.token_ids is None for row in plan.rows)
            assert max(row.max_samples for row in plan.rows) == plan.num_steps
            assert not any(self.active[row.request_id].request.constraint for row in plan.rows)

    def check_turn(self, plan: Plan, apart_steps: int) -> None:
        """Check that a step of their own has only rows under a constraint, and that these rows wait for no
        more than `apart_steps` steps of the others.
        """
        constrained = {
            row.request_id for row in plan.rows if self.active[row.request_id].request.constraint is not None
        }
        decodes = all(row.token_ids is None for row in plan.rows)
        self.sitting_out = None
        if plan.apart:
            assert apart_steps
            assert plan.num_steps == 1
            assert len(constrained) == len(plan.rows)
            self.sitting_out = False
        elif not constrained and decodes and apart_steps:
            self.sitting_out = True
        waits = any(
            t.decoding and t.request.constraint and not self.is_done(t) and self.has_next_page(t)
            for t in self.active.values()
            if t.request.request_id not in plan.preempted
        )
        self.plain_steps = self.plain_steps + plan.num_steps if self.sitting_out and waits else 0
        # Earlier plans may have had another limit.
        assert self.plain_steps <= max(apart_steps, self.most_apart)
        self.most_apart = max(self.most_apart, apart_steps)

    def has_next_page(self, tracked: Tracked) -> bool:
        """Say whether a running sequence has a page for its next token, or could get one. One that could not
        is left out until an earlier plan is committed, because that may free some.
        """
        seq = self.scheduler.roster.find(tracked.request.request_id)
        return seq is not None and self.scheduler.roster.groups.can_grow(seq, seq.num_computed + 1)

    def sits_out(self, tracked: Tracked) -> bool:
        """Say whether the newest plan leaves this sequence out, so that rows under a constraint, or the
        others, run alone.
        """
        return self.sitting_out is not None and (tracked.request.constraint is not None) is self.sitting_out

    def sources(self, tracked: Tracked, running: list[Tracked]) -> list[Tracked]:
        """Return the running sequences whose prompt pages this fork may use, unless some of these pages were
        dropped.
        """
        prompt = tracked.request.prompt_token_ids
        if tracked.request.fork_of is None or tracked.preemptions:
            return []
        return [t for t in running if t.shares and t.request.prompt_token_ids is prompt]

    def check_shared(
        self,
        row: PlanRow,
        tracked: Tracked,
        sources: list[Tracked],
        copies: list[PageCopy],
        plan: Plan,
    ) -> None:
        """Check how far an entering request begins with the pages of one of `sources`, or of the prefix
        cache. Removes its page copy from `copies`.
        """
        assert row.start < len(tracked.known)
        index, rest = divmod(row.start, self.config.page_size)
        if rest:
            copied = [copies.pop(0) for _ in self.config.groups]
            # These held the page before this plan, so a step before this one has written its content.
            holders = [t for t in sources if t.computed >= row.start and not t.entered(plan)]
            assert len(copied) == len(self.config.groups)
            for group, (source, own, place) in enumerate(copied):
                assert place == group
                tables = [self.runner.tables[t.slot][group] for t in holders if t.slot is not None]
                assert source in [table[index] for table in tables]
                writes = [w for w in plan.page_writes if (w.slot, w.group) == (row.slot, group)]
                assert own in [w.pages[index] for w in writes]
        last = len(tracked.request.prompt_token_ids) - 1
        as_fork = (
            {last - last % self.config.page_size if self.config.has_state else last} if sources else set()
        )
        if self.config.has_state:
            assert rest == 0, "there are no snapshots within pages"
            assert row.start == 0 or self.config.num_snapshots
        elif rest or (sources and not self.has_windows):
            assert row.start in as_fork
        if self.config.prefix_cache_pages == 0 or tracked.request.cache.bypass:
            assert row.start in {0} | as_fork
        tracked.computed = row.start
        if tracked.cached is None:
            tracked.cached = row.start

    def check_fairness(self, plan: Plan, admit: bool, running: list[Tracked]) -> None:
        planned = {row.request_id for row in plan.rows}
        in_rank = sorted(self.active.values(), key=lambda t: t.rank)
        waiting = [t for t in in_rank if t.slot is None and self.may_run(t, admit)]
        # Every decode is served, except that the last in rank may sit out if there is no page for it.
        for tracked in running:
            if self.sits_out(tracked):
                continue
            if tracked.decoding and tracked.request.request_id not in planned and not self.is_done(tracked):
                assert self.in_flight
                assert tracked is max(running, key=lambda t: t.rank)
        # No request is overtaken, except one that waits for a prefix that is being computed, or for a feature
        # slot.
        entered = {request.request_id for _, request in plan.new_requests}
        for first in waiting:
            if any(t.rank > first.rank for t in running if t.request.request_id in entered):
                assert self.may_be_passed(first, running)
                first.overtaken = True
        for tracked in in_rank:
            if tracked.slot is None and not self.may_run(tracked, admit):
                tracked.overtaken |= any(self.active[name].rank > tracked.rank for name in entered)
        # The first in rank is served, and no budget is left over that a waiting request could use.
        unserved = [t for t in waiting if not self.may_be_passed(t, running)]
        if not self.in_flight and not (waiting and self.may_be_passed(waiting[0], running)):
            served = [t for t in in_rank if self.may_run(t, admit) and not self.is_done(t)]
            first = served[0]
            waits, by_priority = first.slot is None, self.config.scheduling_policy == "priority"
            excuses = {
                # A decode of lower priority may take pages that would have just sufficed; the next step
                # preempts it.
                "a decode of lower priority grew": by_priority and waits and bool(plan.page_writes),
                # A request that overtook it may hold the pages that it needs now that no other request
                # computes them.
                "it was overtaken": waits and first.overtaken,
                "it is others' turn": self.sits_out(first),
            }
            name = first.request.request_id
            assert name in planned or any(excuses.values()), f"{name} is not served: {excuses}"
        left = self.budget - plan.num_tokens
        if (
            left > 0
            and unserved
            and unserved[0] is waiting[0]
            and not unserved[0].pending
            and not plan.preempted
        ):
            no_slot = len(running) == self.config.max_num_seqs
            if unserved[0].has_features:
                no_slot |= sum(t.has_features for t in running) == self.config.feature_slots
            assert no_slot or self.lack_pages_for(unserved[0], running)

    def may_be_passed(self, tracked: Tracked, running: list[Tracked]) -> bool:
        lacks = tracked.has_features and sum(t.has_features for t in running) == self.config.feature_slots
        return lacks or self.may_be_promised(tracked, running)

    def check_shares(self, plan: Plan) -> None:
        """However many prompts are computed at once, the first of them in rank gets all it needs or most of
        the step, unless another one computes in this step what it begins with: then it gets what that leaves.
        """
        chunks = [(self.active[row.request_id], row) for row in plan.rows if row.token_ids is not None]
        if chunks:
            first, row = min(chunks, key=lambda chunk: chunk[0].rank)
            if any(
                other.start < row.start <= other.start + other.num_tokens
                and tracked.known[: row.start] == first.known[: row.start]
                for tracked, other in chunks
            ):
                return
            left = self.budget - (plan.num_tokens - plan.num_prompt_tokens)
            most = self.config.max_prefill_chunk or left
            wanted = min(len(first.known) - first.computed, most, left - left // 4)
            assert row.num_tokens >= wanted or self.lacks_pages(row)

    def lack_pages_for(self, tracked: Tracked, running: list[Tracked]) -> bool:
        """Say whether some group has too few pages for a waiting request, if it shares none."""
        needed = -(-len(tracked.known) // self.config.page_size)
        if not self.has_windows and not self.config.has_state and self.sources(tracked, running):
            needed = 1
        for group, most in enumerate(self.most_pages):
            pool = self.scheduler.roster.groups.pools[group]
            if min(needed, most) > pool.num_available - self.headroom(group, running):
                return True
        return False

    def lacks_pages(self, row: PlanRow) -> bool:
        """Say whether the row ends where its pages end: with a sliding window there may be no page for more,
        because others hold those that it gave back.
        """
        seq = self.scheduler.roster.find(row.request_id)
        assert seq is not None
        covered = min(len(table.pages) for table in seq.tables) * self.config.page_size
        return self.has_windows and row.start + row.num_tokens == covered

    def headroom(self, group: int, running: list[Tracked]) -> int:
        """How many pages of a group are kept for running sequences: enough for 48 more tokens each, less what
        they will give back meanwhile, at most an eighth of all pages.
        """
        wanted, (num_pages, window) = 0, (self.config.groups[group].num_pages, self.runner.windows[group])
        for tracked in running:
            seq = self.scheduler.roster.find(tracked.request.request_id)
            assert seq is not None
            table, size = seq.tables[group], self.config.page_size
            most = tracked.limit(self.context_limit) - 1
            positions = min(max(seq.num_computed, seq.prefill_until), len(table.pages) * size)
            more = -(-min(positions + 48, most) // size) - len(table.pages)
            if window is not None:
                more = min(more, -(-window // size) + 2 - len(table.held))
            wanted += max(more, 0)
        return min(wanted, num_pages // 8)

    def is_done(self, tracked: Tracked) -> bool:
        """Say whether all tokens that it may have are made or in flight."""
        return len(tracked.known) + tracked.pending >= tracked.limit(self.context_limit)

    def may_be_promised(self, tracked: Tracked, running: list[Tracked]) -> bool:
        """Say whether a running prefill shares at least one full page with it, or computes the prompt of
        which it is a fork.
        """
        if any(not t.decoding for t in self.sources(tracked, running)):
            return True
        size = self.config.page_size
        first = tracked.known[:size]
        return (
            self.config.prefix_cache_pages != 0
            and len(tracked.known) > size
            and any(
                t.known[:size] == first and t.request.cache.salt == tracked.request.cache.salt
                for t in running
                if not t.decoding and t is not tracked
            )
        )

    def check_row(self, row: PlanRow, tracked: Tracked, plan: Plan) -> None:
        left = self.budget - plan.num_tokens
        assert (row.slot, row.start) == (tracked.slot, tracked.computed)
        end = row.start + row.num_tokens
        if tracked.decoding:
            end -= len(row.proposed)
            assert (row.token_ids, end) == (None, len(tracked.known) + tracked.pending)
            self.check_proposed(row, plan)
            room = tracked.limit(self.context_limit) - end
            assert row.samples
            assert row.max_samples == min(plan.num_steps + len(row.proposed), room) > 0
        else:
            assert row.token_ids == tuple(tracked.known[row.start : end])
            most = self.config.max_prefill_chunk or self.config.max_num_batched_tokens
            assert 0 < row.num_tokens <= most
            whole = end == len(tracked.known)
            complete = whole or left <= 0 or row.num_tokens == most
            assert complete or self.lacks_pages(row), "the chunk is shorter than it could be"
            seq = self.scheduler.roster.find(row.request_id)
            assert seq is not None
            for table, most_pages in zip(seq.tables, self.most_pages, strict=True):
                assert len(table.held) <= most_pages
            assert row.samples == whole
            assert not tracked.pending
        self.check_writes(row)
        # With min_tokens m, generated tokens number 1 to m may not end the request.
        bans = tracked.request.stopping.min_tokens - (end - len(tracked.request.prompt_token_ids))
        assert row.bans == (min(max(bans, 0), row.max_samples) if row.samples else 0)
        tracked.decoding = tracked.decoding or row.samples
        tracked.computed = end - 1 + row.max_samples if row.samples else end
        tracked.pending += row.max_samples if row.samples else 0

    def check_proposed(self, row: PlanRow, plan: Plan) -> None:
        """Check that what is proposed keeps its bounds, in a plan of one step with no other in flight."""
        request, config = self.active[row.request_id].request, self.config
        assert row.num_tokens == 1 + len(row.proposed)
        if row.proposed:
            assert plan.num_steps == 1
            assert not self.in_flight
            assert plan.proposer
            assert len(row.proposed) <= config.max_proposed_tokens
            assert request.max_proposed_tokens is None or len(row.proposed) <= request.max_proposed_tokens
            is_drafted = config.drafted_tokens and row.proposed == drafted_tokens(len(row.proposed))
            assert is_drafted or all(0 <= token < config.vocab_size for token in row.proposed)
            if is_drafted:
                assert len(row.proposed) <= config.drafted_tokens
                assert not request.constraint
            assert not request.hidden_states
            assert all(other.token_ids is None for other in plan.rows)  # nobody enters
            assert plan.num_tokens <= config.most_rows

    def check_writes(self, row: PlanRow) -> None:
        """Check that no page is written that another sequence holds or that has a key, except that a prefill
        may write the pages that it publishes in this plan.
        """
        size = self.config.page_size
        seq = self.scheduler.roster.find(row.request_id)
        assert seq is not None
        end = row.start + (row.num_tokens if row.token_ids is not None else row.max_samples)
        for pool, table in zip(self.scheduler.roster.groups.pools, seq.tables, strict=True):
            for index in range(row.start // size, (end - 1) // size + 1):
                page = table.pages[index]
                if pool.num_holders(page) != 1:  # shared with a sequence that entered in this step
                    assert row.token_ids is not None
                if pool.key_of(page) is not None:
                    assert row.token_ids is not None
                    assert (index + 1) * size <= end

    def check_output(self, output: StepOutput, tracked: Tracked) -> None:
        late = tracked.deadline_ns is not None and tracked.deadline_ns <= self.now_ns
        if tracked.predictable:
            assert tracked.made == tracked.expected[: len(tracked.made)]
            complete = len(tracked.made) == len(tracked.expected)
            assert output.last == (complete or late)
            if output.finish is not None:
                assert output.finish.reason == (tracked.reason if complete else FinishReason.TIME_LIMIT)
        if output.finish is not None:
            assert output.timing is not None
            assert output.timing.preemptions == tracked.preemptions
            assert output.timing.cached_prompt_tokens == tracked.cached
            self.streams.append((tracked.order, tuple(tracked.made), output.finish.reason))
            del self.active[output.request_id]
        elif not tracked.predictable and tracked.slot is None and not tracked.pending:
            tracked.predictable = True
            self.predict(tracked)

    def accounts_agree(self) -> None:
        self.scheduler.check()
        in_order = sorted(self.active, key=lambda name: self.active[name].order)
        assert list(self.scheduler.active_ids()) == in_order
        assert self.scheduler.has_work == bool(self.active)
        started = [name for name in in_order if self.active[name].started]
        assert list(self.scheduler.started_ids()) == started
        assert self.scheduler.has_started == bool(started)
        assert self.scheduler.num_started_requests == len({request_id_of(name) for name in started})
        running = {request_id_of(name) for name in in_order if self.active[name].slot is not None}
        assert self.scheduler.num_running_requests == len(running)
        load = self.scheduler.load()
        waiting = [tracked for tracked in self.active.values() if tracked.slot is None]
        assert (load.num_running, load.num_waiting) == (len(self.active) - len(waiting), len(waiting))
        assert load.waiting_prompt_tokens == sum(len(t.request.prompt_token_ids) for t in waiting)

    def end(
        self,
        ahead: int = 0,
        max_steps: int = 1,
        prefill_budget: int | None = None,
        apart_steps: int = 0,
    ) -> None:
        """Check that, whatever happened, without new arrivals every request ends soon and correctly, and all
        pages are given back.
        """
        # In each step at least one token is computed, and each token at most twice. A row that is dropped
        # later takes no step from another sequence. A plan with proposals may be waited for once.
        bound = sum(4 * (len(t.known) + t.limit(self.context_limit)) for t in self.active.values()) + 4
        for _ in range(bound):
            self.run(1, ahead, max_steps, prefill_budget, apart_steps)
            if not self.active:
                break
        while self.in_flight:
            self.commit()
        self.accounts_agree()
        assert not self.active
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, load.pages_used) == (0, 0, 0)
