"""Continuous batching: what becomes of requests, from `queue` to their last output. No jax.

`planning` decides what runs next, `commits` what the tokens mean, `endings` how it ends. `schedule` moves
`num_computed` at once and `commit` handles tokens, so the engine may dispatch a step before it commits the
one before. A decode's input is the device's own last sample, so a sequence is scheduled again while its token
is in flight. If that token ends the sequence, `commit` discards the extra row, which wrote only past the last
valid token. A sequence that is preempted while tokens are in flight enters again after their commit;
otherwise it would sample the same position twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.runtime.errors import DuplicateRequestId, ExceedsKVCapacity, PromptTooLong, QueueFull
from penstock.runtime.requests.request import Finish, FinishReason, Output, Request
from penstock.runtime.scheduling.commits import NO_VERDICTS, Commits, Verdicts
from penstock.runtime.scheduling.endings import Endings
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.planning.draft import Draft
from penstock.runtime.scheduling.planning.planner import Planner
from penstock.runtime.scheduling.roster import Load, Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence, Status
from penstock.runtime.scheduling.stopping import StopRules

__all__ = ["Load", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Decides what runs in each step. Not thread-safe: every call holds the engine's lock, except
    `page_keys`, `prepare` and `accept`, which say why they need not.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.num_preemptions = 0
        """Since the start, for metrics."""
        self.roster = Roster(
            config.max_num_seqs,
            config.num_pages,
            config.page_size,
            config.prefix_cache_pages,
            sliding_window=config.sliding_window,
            max_prefill_pages=config.max_prefill_pages,
            feature_slots=config.feature_slots,
            has_state=config.has_state,
        )
        """Who runs and who waits; to be changed by the scheduler alone."""
        self._planner = Planner(config, self.roster)
        self._endings = Endings(self.roster)
        self._commits = Commits(self.roster, self._endings)
        self._max_chunk = config.max_prefill_chunk
        self._generation = 0
        self._next_order = 0
        self._next_step = 0

    # -- what comes in --

    def add(self, request: Request, now_ns: int) -> None:
        """`prepare` and `queue` in one, for callers that hold no lock."""
        self.queue(self.prepare(request, now_ns, self.page_keys(request)))

    def page_keys(self, request: Request) -> Iterable[bytes]:
        """The prefix cache's keys of a prompt; none of one that is too long anyway. As `prepare`, it touches
        nothing that changes, so any thread may call it at any time.
        """
        if len(request.prompt_token_ids) >= self.config.max_model_len:
            return ()
        return self.roster.cache.keys_of(request)

    def prepare(self, request: Request, now_ns: int, page_keys: Iterable[bytes]) -> Sequence:
        """What `queue` takes. Raises PromptTooLong or ExceedsKVCapacity.

        The prompt must leave room for one token: len(prompt) <= max_model_len - 1. The last token of a
        request is never an input, so T tokens in all need KV for T - 1 positions. A request with max_tokens
        must be able to reach them (or max_model_len) alone in an empty pool. One without takes what there is:
        it needs KV for its prompt, and ends CONTEXT_FULL at min(max_model_len, capacity + 1) tokens.
        """
        config = self.config
        num_prompt = len(request.prompt_token_ids)
        if num_prompt > config.max_model_len - 1:
            raise PromptTooLong(num_prompt, config.max_model_len - 1)
        capacity = config.capacity_tokens
        max_tokens = request.stopping.max_tokens
        most_tokens = min(config.max_model_len, num_prompt + (1 if max_tokens is None else max_tokens))
        if most_tokens - 1 > capacity:
            raise ExceedsKVCapacity(most_tokens - 1, capacity)
        rules = StopRules.of(
            request,
            eos_token_ids=config.eos_token_ids,
            context_limit=min(config.max_model_len, capacity + 1),
            now_ns=now_ns,
        )
        return Sequence(request, list(request.prompt_token_ids), num_prompt, rules, now_ns, list(page_keys))

    def queue(self, seq: Sequence) -> None:
        """Queues what `prepare` made, once, or raises DuplicateRequestId or QueueFull."""
        config, roster, request = self.config, self.roster, seq.request
        if roster.find(seq.request_id) is not None or roster.has_outputs(seq.request_id):
            raise DuplicateRequestId(seq.request_id)
        if len(roster.waiting) >= config.max_queued_requests:
            raise QueueFull(config.max_queued_requests)
        seq.order = self._next_order
        seq.rank = (-request.priority if config.by_priority else 0, seq.order)
        roster.add(seq)
        self._next_order += 1
        self._endings.expect(seq)

    # -- a step --

    def schedule(
        self,
        now_ns: int,
        *,
        admit: bool = True,
        max_steps: int = 1,
        prefill_budget: int | None = None,
        apart_steps: int = 0,
    ) -> Plan | None:
        """The next step, or a window of up to `max_steps`; None when nothing can be computed now. Commit
        every plan exactly once, in the order they were made.

        A step with decodes has at most `prefill_budget` prompt tokens beside them, times the root of the
        number of prompts that could come in, though always one where there is one to compute; None: as many
        as the token budget has.

        With `apart_steps`, where a window could be made but for rows under a constraint, these have a step of
        their own after so many steps of the others.

        With `admit` false no new request enters, while those that ran before go on, or come back if they were
        preempted: a weight update waits for them.
        """
        while True:
            draft = Draft(
                in_flight=bool(self._commits),
                admit=admit,
                now_ns=now_ns,
                prefill_budget=prefill_budget,
                max_chunk=self._max_chunk,
                apart_steps=apart_steps,
            )
            self._planner.make(draft, max_steps)
            self.num_preemptions += len(draft.preempted)
            if draft.rows:
                break
            if not draft.sat_out:
                return None
            for seq in draft.sat_out:  # no other sequence has anything to do
                seq.sits_out = 0
        plan = draft.plan(self._next_step)
        self._next_step += 1
        self._commits.expect(plan.step_id, draft, self._generation)
        return plan

    def limit_prefill_chunk(self, size: int | None) -> None:
        """From the next plan on: most prompt tokens of one request in a step, at least 1; None: as many as
        the budget allows.
        """
        self._max_chunk = size

    # -- what comes back --

    def accept(self, plan: Plan, result: StepResult, now_ns: int) -> Verdicts:
        """Tells the constraints of a plan's rows which tokens they got: what `commit` wants to know of them.

        This may take long, so it is the one method that others need not be kept out of meanwhile, if the
        caller is the one who schedules and commits: it reads what only these change. A sequence that is
        aborted meanwhile is passed over by `commit`.
        """
        return self._commits.accept(plan, result, now_ns)

    def put_off(self, plan: Plan, rows: Collection[int], late: Collection[int]) -> None:
        """These rows of a plan make no token, though they were to: the next plan that has them computes their
        last position again, or, with `SchedulerConfig.has_state`, all that they computed in this one. While
        others have something to do they sit out one plan; those that are `late` by themselves then two, four
        and so on. To be told before the next plan is made.
        """
        self._commits.put_off(plan, rows, late)

    def commit(
        self, plan: Plan, result: StepResult, now_ns: int, verdicts: Verdicts = NO_VERDICTS
    ) -> list[Output]:
        """Takes in the tokens of a plan: one Output for each row that sampled and is still active. Where rows
        have constraints, `accept` comes before, with the same arguments.

        The token that ends a request (EOS, stop id) is the last in its Output; the text layer decides what is
        shown.
        """
        return self._commits.commit(plan, result, now_ns, verdicts)

    # -- what ends --

    def abort(
        self,
        request_id: str,
        message: str,
        now_ns: int,
        reason: FinishReason = FinishReason.ABORTED,
        stop: str | None = None,
    ) -> Output | None:
        """Ends an active output in any state; None if there is none of exactly this id.

        Its slot and pages are free when this returns, and tokens still in flight are dropped at commit. (A
        step already dispatched may still write those pages, but it runs before any later step that is given
        them.)
        """
        seq = self.roster.find(request_id)
        if seq is None:
            return None
        finish = Finish(reason, stop=stop, message=message)
        return self._endings.end(seq, now_ns, generation=self._generation, finish=finish)

    def expire(self, now_ns: int) -> list[Output]:
        """Ends active requests whose time limit passed. Costs nothing while no deadline is due."""
        return self._endings.expire(now_ns, generation=self._generation)

    @property
    def next_deadline_ns(self) -> int:
        """No active request's time limit passes before this; `expire` has nothing to do until then."""
        return self._endings.next_deadline_ns

    def finished(self, request_id: str) -> bool:
        """Whether this id ended, in any way, among the last FINISHED_MEMORY and is not in use again."""
        return self._endings.has_finished(request_id)

    # -- all at once --

    def preempt_all(self) -> tuple[str, ...]:
        """Sends all running requests back to the queue, tokens kept. Their ids, in order of arrival."""
        victims = sorted(self.roster.running, key=lambda seq: seq.order)
        for seq in victims:
            self.roster.preempt(seq)
        self.num_preemptions += len(victims)
        return tuple(seq.request_id for seq in victims)

    def use_weights(self, generation: int) -> None:
        """New weights went live, with no step in flight: Outputs carry this number from now on, and no KV of
        the old ones is shared any more. Running sequences go on with their own; preempted ones start anew.
        """
        self._generation = generation
        for seq in self.roster.waiting:
            seq.forget_prompt_logprobs()
        self.flush_prefix_cache()

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Forget all cached prefixes. Returns the pages that became free, and those that stay because running
        requests hold them; they are not shared with any new request.
        """
        for seq in self.roster.running:
            self.roster.cache.leave(seq)
        return self.roster.cache.flush()

    # -- what is going on --

    @property
    def has_work(self) -> bool:
        """Whether requests run or wait."""
        return bool(self.roster.running or self.roster.waiting)

    @property
    def has_started(self) -> bool:
        """Whether a request runs, or did before it was preempted."""
        return bool(self.roster.running) or self.roster.waiting.num_started > 0

    def started_ids(self) -> tuple[str, ...]:
        """The ids of outputs that run, or did before they were preempted, in order of arrival."""
        return tuple(
            seq.request_id for seq in self.roster.active() if seq.status is Status.RUNNING or seq.preemptions
        )

    def active_ids(self) -> tuple[str, ...]:
        """The ids of the active outputs, in order of arrival."""
        return tuple(seq.request_id for seq in self.roster.active())

    def active_requests(self) -> tuple[str, ...]:
        """The requests that have active outputs, in order of arrival."""
        return self.roster.requests()

    def outputs_of(self, request_id: str) -> tuple[str, ...]:
        """The ids of a request's active outputs, in order of arrival."""
        return tuple(seq.request_id for seq in self.roster.outputs_of(request_id))

    def load(self) -> Load:
        """How busy the scheduler is."""
        return self.roster.load()

    def check(self) -> None:
        """Audit for tests, valid between any two calls; AssertionError tells what is wrong."""
        self.roster.check()
