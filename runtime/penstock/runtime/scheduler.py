"""Continuous batching: which requests run in the next step, on which pages, and what becomes of it. No jax.

Every step shares one token budget between decodes (one token a row) and chunks of prefills:

1. All running decodes, first come first served. One that needs a page and finds none preempts the latest
   arrival, which may be itself: its pages and slot go, its tokens stay and are prefilled when it comes back.
2. Sequences that are partly prefilled, in order of arrival, with the rest of the budget.
3. Waiting requests, strictly in order of arrival: nobody overtakes, which is what keeps large requests from
   starving. One enters when a slot, budget and the pages for all its known tokens are free. Nobody enters
   in a step that preempted.

The oldest request always moves on, so every request ends: it can take every page (`add` refuses what would
not fit even then), and there is budget for it, because max_num_batched_tokens >= max_num_seqs and a row that
prefills is not one that decodes.

`schedule` moves `num_computed` at once and `commit` handles tokens, so that a later engine may dispatch a
step before it commits the last one. Today a sequence whose token is still in flight sits out until `commit`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.runtime.errors import DuplicateRequestId, ExceedsKVCapacity, PromptTooLong, QueueFull
from penstock.runtime.plan import PageWrite, Plan, PlanRow, StepResult
from penstock.runtime.request import Finish, FinishReason, Output, Request, TokenLogprobs
from penstock.runtime.roster import Load, Roster
from penstock.runtime.scheduler_config import SchedulerConfig
from penstock.runtime.sequence import Sequence, Status
from penstock.runtime.stopping import NEVER_NS, StopRules

__all__ = ["FINISHED_MEMORY", "Load", "Scheduler", "SchedulerConfig"]

FINISHED_MEMORY = 4096
"""How many finished ids `Scheduler.finished` remembers."""

# One of each is made per row and step; calling the named tuple itself takes twice as long (46 us for 64).
_row: Callable[[tuple[object, ...]], PlanRow] = partial(tuple.__new__, PlanRow)
_output: Callable[[tuple[object, ...]], Output] = partial(tuple.__new__, Output)
_RUNNING, _FINISHED = Status.RUNNING, Status.FINISHED  # looked up once


class Scheduler:
    """The policy over a `Roster`. Single-threaded: only the engine's loop calls it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.weights_generation = 0
        """Put into every Output; the engine sets it when new weights go live."""
        self.num_preemptions = 0
        """Since the start, for metrics."""
        self._roster = Roster(config.max_num_seqs, config.num_pages, config.page_size)
        self._finished: dict[str, None] = {}  # oldest first
        # Plans not committed yet, by step: the weights' generation and, for each row that samples, its
        # sequence. By identity and not by id: an id aborted and used again must not get the old one's token.
        self._in_flight: dict[int, tuple[int, list[Sequence | None]]] = {}
        self._next_order = 0
        self._next_step = 0
        self._next_deadline_ns = NEVER_NS  # nothing active is due earlier; it may be a finished request's

    def add(self, request: Request, now_ns: int) -> None:
        """Queues a request, or raises DuplicateRequestId, PromptTooLong, ExceedsKVCapacity or QueueFull.

        The prompt must leave room for one token: len(prompt) <= max_model_len - 1. The last token of a
        request is never an input, so T tokens in all need KV for T - 1 positions. A request with max_tokens
        must be able to reach them (or max_model_len) alone in an empty pool. One without takes what there is:
        it needs KV for its prompt, and ends CONTEXT_FULL at min(max_model_len, capacity + 1) tokens.
        """
        config, roster = self.config, self._roster
        if roster.find(request.request_id) is not None:
            raise DuplicateRequestId(request.request_id)
        num_prompt = len(request.prompt_token_ids)
        if num_prompt > config.max_model_len - 1:
            raise PromptTooLong(num_prompt, config.max_model_len - 1)
        capacity = config.num_pages * config.page_size
        max_tokens = request.stopping.max_tokens
        most_tokens = min(config.max_model_len, num_prompt + (1 if max_tokens is None else max_tokens))
        if most_tokens - 1 > capacity:
            raise ExceedsKVCapacity(most_tokens - 1, capacity)
        if len(roster.waiting) >= config.max_queued_requests:
            raise QueueFull(config.max_queued_requests)
        rules = StopRules.of(
            request,
            eos_token_ids=config.eos_token_ids,
            context_limit=min(config.max_model_len, capacity + 1),
            now_ns=now_ns,
        )
        roster.add(
            Sequence(request, self._next_order, list(request.prompt_token_ids), num_prompt, rules, now_ns)
        )
        self._next_order += 1
        self._next_deadline_ns = min(self._next_deadline_ns, rules.deadline_ns)

    def schedule(self, now_ns: int, *, admit: bool = True) -> Plan | None:
        """The next step, or None when nothing can be computed now. Commit every plan exactly once.

        With `admit` false nobody new enters, while those that ran before go on, or come back if they were
        preempted: a weight update waits for them.
        """
        roster = self._roster
        page_size = roster.pool.page_size
        rows: list[PlanRow] = []
        sampling: list[Sequence | None] = []
        writes: list[PageWrite] = []
        preempted: list[str] = []

        prefills: list[Sequence] = []
        for seq in list(roster.running.values()):
            if seq.pending or (preempted and seq.status is not _RUNNING):
                continue
            start = seq.num_computed
            if start < seq.prefill_until:
                prefills.append(seq)
                continue
            if start == len(seq.pages) * page_size and not self._grow(seq, writes, preempted):
                continue
            rows.append(
                _row((seq.request_id, seq.slot, start, 1, None, True, int(start < seq.bans_until), 1))
            )
            sampling.append(seq)
            seq.num_computed = start + 1
            seq.pending = True

        budget = self.config.max_num_batched_tokens - len(rows)
        most = self.config.max_prefill_chunk or budget
        for seq in prefills:  # none was preempted since: a victim comes after the decode that hits it
            if budget == 0:
                break
            row = _chunk(seq, min(budget, most))
            rows.append(row)
            sampling.append(seq if row.samples else None)
            budget -= row.num_tokens

        # (A preemption leaves too few pages for its victim anyway; once pages are shared, it might not.)
        entered: list[tuple[int, Request]] = []
        while roster.waiting and budget > 0 and not preempted:
            seq = next(iter(roster.waiting.values()))
            if not (admit or seq.preemptions):
                break
            # If preempted while its token was in flight, it must not sample that position a second time.
            if seq.pending or not roster.can_enter(seq):
                break
            slot = roster.enter(seq)
            writes.extend([PageWrite(slot, index, page) for index, page in enumerate(seq.pages)])
            entered.append((slot, seq.request))
            if seq.scheduled_ns == 0:
                seq.scheduled_ns = now_ns
            row = _chunk(seq, min(budget, most))
            rows.append(row)
            sampling.append(seq if row.samples else None)
            budget -= row.num_tokens

        if not rows:
            return None
        plan = Plan(self._next_step, tuple(rows), tuple(entered), tuple(writes), tuple(preempted))
        self._next_step += 1
        self._in_flight[plan.step_id] = (self.weights_generation, sampling)
        return plan

    def commit(self, plan: Plan, result: StepResult, now_ns: int) -> list[Output]:
        """Takes in the tokens of a plan: one Output for each row that sampled and is still active.

        The token that ends a request (EOS, stop id) is in its Output; the text layer decides what is shown.
        """
        generation, sampling = self._in_flight.pop(plan.step_id)
        any_late = now_ns >= self._next_deadline_ns
        outputs: list[Output] = []
        for seq, sampled, logprobs in zip(sampling, result.token_ids, result.logprobs, strict=True):
            if seq is None or seq.status is _FINISHED:
                continue
            (token,) = sampled
            tokens = seq.token_ids
            tokens.append(token)
            seq.pending = False
            if seq.first_token_ns == 0:
                seq.first_token_ns = now_ns
            logprobs = () if seq.request.logprobs is None else tuple(logprobs)
            rules = seq.rules
            if len(tokens) >= rules.total_limit or token in rules.end_ids or any_late:
                finish = rules.decide(token, len(tokens), now_ns)
                if finish is not None:
                    outputs.append(self._finish(seq, finish, now_ns, generation, (token,), logprobs))
                    continue
            outputs.append(_output((seq.request_id, (token,), logprobs, None, None, generation, None)))
        return outputs

    def abort(
        self,
        request_id: str,
        message: str,
        now_ns: int,
        reason: FinishReason = FinishReason.ABORTED,
        stop: str | None = None,
    ) -> Output | None:
        """Ends an active request in any state; None if there is none of exactly this id.

        Its slot and pages are free when this returns, and a token still in flight is dropped at commit. (A
        step already dispatched may still write those pages, but it runs before any later step that is given
        them.)
        """
        seq = self._roster.find(request_id)
        if seq is None:
            return None
        return self._finish(seq, Finish(reason, stop=stop, message=message), now_ns, self.weights_generation)

    def expire(self, now_ns: int) -> list[Output]:
        """Ends active requests whose time limit passed. Costs nothing while no deadline is due."""
        if now_ns < self._next_deadline_ns:
            return []
        active = [*self._roster.running.values(), *self._roster.waiting.values()]
        finish = Finish(FinishReason.TIME_LIMIT)
        self._next_deadline_ns = min(
            (d for s in active if (d := s.rules.deadline_ns) > now_ns), default=NEVER_NS
        )
        return [
            self._finish(seq, finish, now_ns, self.weights_generation)
            for seq in active
            if seq.rules.deadline_ns <= now_ns
        ]

    def preempt_all(self) -> tuple[str, ...]:
        """Sends all running requests back to the queue, tokens kept: all KV is computed anew. Their ids."""
        victims = tuple(self._roster.running)
        for _ in victims:
            self._roster.preempt_last()
        self.num_preemptions += len(victims)
        return victims

    @property
    def has_work(self) -> bool:
        return bool(self._roster.running or self._roster.waiting)

    @property
    def has_started(self) -> bool:
        """Whether a request runs, or did before it was preempted (then it is the first of the queue)."""
        first = next(iter(self._roster.waiting.values()), None)
        return bool(self._roster.running) or (first is not None and first.preemptions > 0)

    def started_ids(self) -> tuple[str, ...]:
        """Those that run, or did before they were preempted, in order of arrival."""
        resumed = (i for i, seq in self._roster.waiting.items() if seq.preemptions > 0)
        return (*self._roster.running, *resumed)

    @property
    def next_deadline_ns(self) -> int:
        """No active request's time limit passes before this; `expire` has nothing to do until then."""
        return self._next_deadline_ns

    def active_ids(self) -> tuple[str, ...]:
        """In order of arrival: the running ones, then the waiting."""
        return (*self._roster.running, *self._roster.waiting)

    def finished(self, request_id: str) -> bool:
        """Whether this id ended, in any way, among the last FINISHED_MEMORY and is not in use again."""
        return request_id in self._finished and self._roster.find(request_id) is None

    def load(self) -> Load:
        return self._roster.load()

    def check(self) -> None:
        """Audit for tests, valid between any two calls; AssertionError tells what is wrong."""
        self._roster.check()

    def _grow(self, seq: Sequence, writes: list[PageWrite], preempted: list[str]) -> bool:
        """One more page for a decode, preempting latest arrivals until one is free; false if there is none.

        A victim has no row in this plan: it arrived no earlier than `seq`, and rows are made in that order.
        While a step is in flight, `seq` sits out rather than lose its own pages: the commit may free some.
        """
        roster = self._roster
        while not roster.pool.can_allocate(1):
            if self._in_flight and next(reversed(roster.running.values())) is seq:
                return False
            victim = roster.preempt_last()
            self.num_preemptions += 1
            preempted.append(victim.request_id)
            if victim is seq:
                return False
        (page,) = roster.pool.allocate(1)
        assert seq.slot is not None
        writes.append(PageWrite(seq.slot, len(seq.pages), page))
        seq.pages.append(page)
        return True

    def _finish(
        self,
        seq: Sequence,
        finish: Finish,
        now_ns: int,
        generation: int,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> Output:
        """Ends a sequence and makes its last Output."""
        self._roster.remove(seq)
        self._finished.pop(seq.request_id, None)  # an id that is used again counts as the newest
        self._finished[seq.request_id] = None
        if len(self._finished) > FINISHED_MEMORY:
            del self._finished[next(iter(self._finished))]
        return Output(seq.request_id, token_ids, logprobs, finish, seq.timing(now_ns), generation)


def _chunk(seq: Sequence, budget: int) -> PlanRow:
    """The next part of a prefill, of `budget` tokens at most; its last part samples the next token."""
    assert seq.slot is not None
    start = seq.num_computed
    end = min(start + budget, seq.prefill_until)
    samples = end == seq.prefill_until
    seq.num_computed = end
    seq.pending = samples
    bans = int(samples and end <= seq.bans_until)
    return PlanRow(
        seq.request_id, seq.slot, start, end - start, tuple(seq.token_ids[start:end]), samples, bans
    )
