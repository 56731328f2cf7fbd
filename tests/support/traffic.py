"""Drives a scheduler and the fake runner, and checks each plan against its own account of every request."""

from __future__ import annotations

from collections import deque

import pytest

from penstock.runtime.errors import DuplicateRequestId, ExceedsKVCapacity, PromptTooLong, QueueFull
from penstock.runtime.plan import Plan, StepResult
from penstock.runtime.request import FinishReason, Output, Request, TokenLogprobs
from penstock.runtime.scheduler import Scheduler, SchedulerConfig
from tests.support.fake_runner import FakeRunner, run_alone

SECOND = 10**9


class Tracked:
    """The test's own account of one request."""

    def __init__(self, request: Request, order: int, context_limit: int, now_ns: int) -> None:
        self.request, self.order = request, order
        limit_s = request.stopping.time_limit_s
        self.deadline_ns = None if limit_s is None else now_ns + limit_s * SECOND
        self.expected, self.reason = run_alone(request, context_limit)
        self.made: list[int] = []
        self.slot: int | None = None  # None: waiting
        self.computed = 0
        self.pending = False
        self.decoding = False
        self.preemptions = 0

    @property
    def known(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.made]

    def may_run(self, admit: bool) -> bool:
        """While nobody is admitted, who ran before may still come back."""
        return admit or self.slot is not None or self.preemptions > 0


class Traffic:
    """Up to two plans may be in flight, as in an engine that overlaps steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.runner = FakeRunner(config)
        self.capacity = config.page_size * config.num_pages
        self.now_ns = SECOND
        self.active: dict[str, Tracked] = {}
        self.arrivals = 0
        self.in_flight: deque[tuple[Plan, StepResult, list[Tracked]]] = deque()

    # ---- what happens to the scheduler

    def arrive(self, request: Request) -> None:
        num_prompt, stopping = len(request.prompt_token_ids), request.stopping
        longest = num_prompt + (1 if stopping.max_tokens is None else stopping.max_tokens)
        num_waiting = sum(tracked.slot is None for tracked in self.active.values())
        refusal: type[Exception] | None = None
        if request.request_id in self.active:
            refusal = DuplicateRequestId
        elif num_prompt + 1 > self.config.max_model_len:
            refusal = PromptTooLong
        elif min(longest, self.config.max_model_len) > self.capacity + 1:
            refusal = ExceedsKVCapacity
        elif num_waiting >= self.config.max_queued_requests:
            refusal = QueueFull
        if refusal is not None:
            with pytest.raises(refusal):
                self.scheduler.add(request, self.now_ns)
            return
        self.scheduler.add(request, self.now_ns)
        limit = min(self.config.max_model_len, self.capacity + 1)
        self.active[request.request_id] = Tracked(request, self.arrivals, limit, self.now_ns)
        self.arrivals += 1

    def run(self, num_steps: int, ahead: int) -> None:
        """That many steps with up to `ahead` plans in flight when each is made."""
        for _ in range(num_steps):
            while len(self.in_flight) > ahead:
                self.commit()
            self.dispatch()
            self.accounts_agree()
        while len(self.in_flight) > ahead:
            self.commit()

    def dispatch(self, admit: bool = True) -> None:
        self.now_ns += 1
        plan = self.scheduler.schedule(self.now_ns, admit=admit)
        if plan is None:
            movable = [t for t in self.active.values() if not t.pending and t.may_run(admit)]
            assert not movable or self.in_flight, "there was work and no plan"
            return
        self.check_plan(plan, admit)
        self.in_flight.append(
            (plan, self.runner.execute(plan), [self.active[r.request_id] for r in plan.rows])
        )

    def commit(self) -> None:
        plan, result, owners = self.in_flight.popleft()
        outputs = self.scheduler.commit(plan, result, self.now_ns)
        live = [
            (row, tokens, owner)
            for row, tokens, owner in zip(plan.rows, result.token_ids, owners, strict=True)
            if row.samples and self.active.get(row.request_id) is owner
        ]
        assert [output.request_id for output in outputs] == [row.request_id for row, _, _ in live]
        for output, (_, tokens, owner) in zip(outputs, live, strict=True):
            owner.pending = False
            owner.made += tokens
            assert output.token_ids == tokens
            asked = owner.request.logprobs is not None
            assert output.logprobs == (tuple(TokenLogprobs(-float(t)) for t in tokens) if asked else ())
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

    # ---- what must hold

    def lose_pages(self, tracked: Tracked) -> None:
        tracked.slot, tracked.computed, tracked.decoding = None, 0, False
        tracked.preemptions += 1

    def check_plan(self, plan: Plan, admit: bool) -> None:
        active, pages_used = self.active, self.scheduler.load().pages_used
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        planned = {row.request_id for row in plan.rows}
        assert len(planned) == len(plan.rows)
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        for name in plan.preempted:
            assert name not in planned
            self.lose_pages(active[name])
        running = [t for t in active.values() if t.slot is not None]
        if plan.preempted:
            assert not plan.new_requests
            assert max(t.order for t in running) < min(active[name].order for name in plan.preempted)
        # Nobody overtakes at the entry, and each takes the lowest slot.
        waiting = sorted((t for t in active.values() if t.slot is None), key=lambda t: t.order)
        for (slot, request), tracked in zip(plan.new_requests, waiting, strict=False):
            assert request is tracked.request
            assert tracked.may_run(admit)
            taken = {t.slot for t in running}
            assert slot == min(set(range(self.config.max_num_seqs)) - taken)
            tracked.slot, tracked.computed, tracked.decoding = slot, 0, False
            running.append(tracked)
        # Every decode is served (the latest may sit out for want of a page), and the oldest request always.
        for tracked in running:
            if tracked.decoding and not tracked.pending and tracked.request.request_id not in planned:
                assert self.in_flight
                assert tracked is max(running, key=lambda t: t.order)
                assert pages_used == self.config.num_pages
        if not self.in_flight:
            oldest = min((t for t in active.values() if t.may_run(admit)), key=lambda t: t.order)
            assert oldest.request.request_id in planned
        # No budget is left over while somebody could use it.
        left = self.config.max_num_batched_tokens - plan.num_tokens
        unserved = waiting[len(plan.new_requests) :]
        may_enter = bool(unserved) and unserved[0].may_run(admit) and not unserved[0].pending
        if left and may_enter and not plan.preempted:
            needed = -(-len(unserved[0].known) // self.config.page_size)
            assert len(running) == self.config.max_num_seqs or needed > self.config.num_pages - pages_used
        for row in plan.rows:
            tracked = active[row.request_id]
            assert not tracked.pending
            assert (row.slot, row.start) == (tracked.slot, tracked.computed)
            end = row.start + row.num_tokens
            if tracked.decoding:
                assert (row.token_ids, row.num_tokens, end) == (None, 1, len(tracked.known))
            else:
                assert row.token_ids == tuple(tracked.known[row.start : end])
                most = self.config.max_prefill_chunk or self.config.max_num_batched_tokens
                assert 0 < row.num_tokens <= most
                assert end == len(tracked.known) or left == 0 or row.num_tokens == most, (
                    "a chunk cut for nothing"
                )
            assert row.samples == (end == len(tracked.known))
            tracked.computed = end
            tracked.pending = tracked.decoding = row.samples
            # With min_tokens m, generated tokens number 1 to m may not end the request.
            may_not_end = len(tracked.made) + 1 <= tracked.request.stopping.min_tokens
            assert row.bans == (row.samples and may_not_end)

    def check_output(self, output: Output, tracked: Tracked) -> None:
        assert tracked.made == tracked.expected[: len(tracked.made)]
        complete = len(tracked.made) == len(tracked.expected)
        late = tracked.deadline_ns is not None and tracked.deadline_ns <= self.now_ns
        assert output.last == (complete or late)
        if output.finish is not None:
            assert output.finish.reason == (tracked.reason if complete else FinishReason.TIME_LIMIT)
            assert output.timing is not None
            assert output.timing.preemptions == tracked.preemptions
            del self.active[output.request_id]

    def accounts_agree(self) -> None:
        self.scheduler.check()
        in_order = sorted(self.active, key=lambda name: self.active[name].order)
        assert list(self.scheduler.active_ids()) == in_order
        assert self.scheduler.has_work == bool(self.active)
        load = self.scheduler.load()
        waiting = [tracked for tracked in self.active.values() if tracked.slot is None]
        assert (load.num_running, load.num_waiting) == (len(self.active) - len(waiting), len(waiting))
        assert load.waiting_prompt_tokens == sum(len(t.request.prompt_token_ids) for t in waiting)

    def end(self) -> None:
        """Whatever happened: without new arrivals everything ends, soon and right, and all pages return."""
        # In each step the oldest request computes at least one token, each of its tokens at most twice.
        bound = sum(2 * (len(t.request.prompt_token_ids) + len(t.expected)) for t in self.active.values()) + 2
        for _ in range(bound):
            self.run(1, 0)
        assert not self.active
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, load.pages_used) == (0, 0, 0)
