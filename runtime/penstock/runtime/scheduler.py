"""Continuous batching: what becomes of requests, from `add` to their last output. No jax.

`planning` decides what runs next. `schedule` moves `num_computed` at once and `commit` handles tokens, so the
engine may dispatch a step before it commits the one before. A decode's input is the device's own last sample,
so a sequence is scheduled again while its token is in flight; if that token turns out to end it, the row that
was too much is dropped at `commit`. What such a row writes lies behind the last token that counts, in pages
that nobody else gets to see before: pages freed at commit are given to a later step, and the device runs
steps in order. A sequence preempted with tokens in flight enters again after their commit, else it would
sample the same position twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial

from penstock.runtime.errors import DuplicateRequestId, ExceedsKVCapacity, PromptTooLong, QueueFull
from penstock.runtime.failing import as_exception
from penstock.runtime.plan import Plan, StepResult
from penstock.runtime.planning import Draft, Planner
from penstock.runtime.request import Finish, FinishReason, Output, Request, TokenLogprobs
from penstock.runtime.roster import Load, Roster
from penstock.runtime.scheduler_config import SchedulerConfig
from penstock.runtime.sequence import Sequence, Status
from penstock.runtime.stopping import NEVER_NS, StopRules

__all__ = ["FINISHED_MEMORY", "Load", "Scheduler", "SchedulerConfig"]

FINISHED_MEMORY = 4096
"""How many finished ids `Scheduler.finished` remembers."""

_MOST_SAT_OUT = 32
"""Plans without a row whose constraint is not ready, however often it was not."""

# One is made per row and step; calling the named tuple itself takes twice as long.
_output: Callable[[tuple[object, ...]], Output] = partial(tuple.__new__, Output)
_RUNNING, _FINISHED = Status.RUNNING, Status.FINISHED  # looked up once

Verdicts = Mapping[int, bool | Exception]
"""By row under a constraint: whether that is complete, or what it raised."""
_NO_VERDICTS: Verdicts = {}


class Scheduler:
    """The policy over a `Roster`. Not thread-safe: every call holds EngineCore's lock, but for `page_keys`,
    `prepare` and `accept`, which say what allows it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.num_preemptions = 0
        """Since the start, for metrics."""
        self._generation = 0
        self._roster = Roster(
            config.max_num_seqs,
            config.num_pages,
            config.page_size,
            config.prefix_cache_pages,
            sliding_window=config.sliding_window,
            max_prefill_pages=config.max_prefill_pages,
            feature_slots=config.feature_slots,
        )
        self._planner = Planner(config, self._roster)
        self._finished: dict[str, None] = {}  # oldest first
        # Plans not committed yet, by step: the weights' generation; for each row that samples, its sequence;
        # by row, those that ask about their prompt. By identity and not by id: an id aborted and used again
        # must not get the old one's token.
        self._in_flight: dict[int, tuple[int, list[Sequence | None], dict[int, Sequence]]] = {}
        self._next_order = 0
        self._next_step = 0
        self._next_deadline_ns = NEVER_NS  # nothing active is due earlier; it may be a finished request's

    def add(self, request: Request, now_ns: int) -> None:
        """`prepare` and `queue` in one, for who holds no lock."""
        self.queue(self.prepare(request, now_ns, self.page_keys(request)))

    def page_keys(self, request: Request) -> Iterable[bytes]:
        """The prefix cache's keys of a prompt; none of one that is too long anyway. As `prepare`, it touches
        nothing that changes, so any thread may call it at any time.
        """
        if len(request.prompt_token_ids) >= self.config.max_model_len:
            return ()
        return self._roster.cache.keys_of(request)

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
        config, roster, request = self.config, self._roster, seq.request
        if roster.find(seq.request_id) is not None or roster.has_outputs(seq.request_id):
            raise DuplicateRequestId(seq.request_id)
        if len(roster.waiting) >= config.max_queued_requests:
            raise QueueFull(config.max_queued_requests)
        seq.order = self._next_order
        seq.rank = (-request.priority if config.by_priority else 0, seq.order)
        roster.add(seq)
        self._next_order += 1
        self._next_deadline_ns = min(self._next_deadline_ns, seq.rules.deadline_ns)

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
        number of prompts that could come in, though always one where somebody has one to compute; None: as
        many as the token budget has.

        With `apart_steps`, where a window could be made but for rows under a constraint, these have a step of
        their own after so many steps of the others.

        With `admit` false nobody new enters, while those that ran before go on, or come back if they were
        preempted: a weight update waits for them.
        """
        while True:
            draft = Draft(bool(self._in_flight), admit, now_ns, prefill_budget, apart_steps)
            self._planner.make(draft, max_steps)
            self.num_preemptions += len(draft.preempted)
            if draft.rows:
                break
            if not draft.sat_out:
                return None
            for seq in draft.sat_out:  # nobody else has anything to do
                seq.sits_out = 0
        plan = Plan(
            self._next_step,
            tuple(draft.rows),
            tuple(draft.entered),
            tuple(draft.writes),
            tuple(draft.preempted),
            draft.num_steps,
            tuple(draft.copies),
            draft.made,
            draft.feature_slots,
            draft.turn is True,
        )
        self._next_step += 1
        self._in_flight[plan.step_id] = (self._generation, draft.sampling, draft.prompts)
        return plan

    # -- what comes back --

    def accept(self, plan: Plan, result: StepResult, now_ns: int) -> Verdicts:
        """Tells the constraints of a plan's rows which tokens they got: what `commit` wants to know of them.

        This may take long, so it is the one method that others need not be kept out of meanwhile, if the
        caller is the one who schedules and commits: it reads what only these change. Whoever is aborted
        meanwhile is passed over by `commit`.
        """
        _, sampling, _ = self._in_flight[plan.step_id]
        verdicts: dict[int, bool | Exception] = {}
        for i, seq in enumerate(sampling):
            if seq is None or not seq.is_constrained or seq.status is _FINISHED:
                continue
            sampled = result.token_ids[i]
            counted, finish = seq.rules.first_end(sampled, len(seq.token_ids), now_ns)
            if finish is not None or i not in result.errors:
                verdicts[i] = _accept(seq, sampled[:counted])
        return verdicts

    def put_off(self, plan: Plan, rows: Collection[int], late: Collection[int]) -> None:
        """These rows of a plan make no token, though they were to: the next plan that has them computes their
        last position again. While others have something to do they sit out one plan; those that are `late`
        by themselves then two, four and so on. To be told before the next plan is made.
        """
        _, sampling, _ = self._in_flight[plan.step_id]
        for i in rows:
            seq, sampling[i] = sampling[i], None
            if seq is not None and seq.status is not _FINISHED:
                seq.pending -= 1
                seq.num_computed -= 1
                seq.sits_out = 1
                if i in late:
                    seq.sits_out = min(2**seq.put_offs, _MOST_SAT_OUT)
                    seq.put_offs += 1

    def commit(
        self, plan: Plan, result: StepResult, now_ns: int, verdicts: Verdicts = _NO_VERDICTS
    ) -> list[Output]:
        """Takes in the tokens of a plan: one Output for each row that sampled and is still active. Where rows
        have constraints, `accept` comes before, with the same arguments.

        The token that ends a request (EOS, stop id) is the last in its Output; the text layer decides what is
        shown.
        """
        generation, sampling, prompts = self._in_flight.pop(plan.step_id)
        if prompts:
            self._take_prompt_logprobs(prompts, plan, result)
        any_late = now_ns >= self._next_deadline_ns
        errors = result.errors
        outputs: list[Output] = []
        for i, (seq, row, sampled, logprobs) in enumerate(
            zip(sampling, plan.rows, result.token_ids, result.logprobs, strict=True)
        ):
            if seq is None or seq.status is _FINISHED:
                continue
            tokens = seq.token_ids
            before, count = len(tokens), len(sampled)
            total = before + count
            tokens += sampled
            seq.pending -= row.max_samples
            if seq.first_token_ns == 0:
                seq.first_token_ns = now_ns
            new = tuple(sampled)
            wanted = () if seq.request.logprobs is None else tuple(logprobs)
            prompt = seq.take_prompt_logprobs() if seq.prompt_logprobs else ()
            rules = seq.rules
            counted, finish = count, None
            if total >= rules.total_limit or any_late or not rules.end_ids.isdisjoint(new):
                counted, finish = rules.first_end(new, before, now_ns)
            error = errors.get(i) if errors and finish is None else None
            seq.put_offs = 0
            if seq.is_constrained and error is None:
                verdict = verdicts[i]
                if isinstance(verdict, Exception):
                    finish, error = None, verdict
                elif verdict and finish is None:
                    finish = Finish(FinishReason.EOS)
            if finish is not None or error is not None:
                del tokens[before + counted :]
                if len(tokens) > seq.publish_at:
                    self._roster.cache.publish(seq, len(tokens) - 1)
                outputs.append(
                    self._finish(
                        seq, finish, now_ns, generation, new[:counted], wanted[:counted], error, prompt
                    )
                )
                continue
            if count != row.max_samples:
                raise RuntimeError(f"{seq.request_id} goes on with {count} of {row.max_samples} samples")
            if total > seq.publish_at:
                self._roster.cache.publish(seq, total - 1)
            outputs.append(_output((seq.request_id, new, wanted, None, None, generation, None, prompt)))
        return outputs

    def _take_prompt_logprobs(self, prompts: dict[int, Sequence], plan: Plan, result: StepResult) -> None:
        """A sequence that was preempted computes some of them again."""
        for i, seq in prompts.items():
            values = result.prompt_logprobs.get(i, ())
            known = plan.rows[i].start + len(values)
            if seq.status is not _FINISHED and known > seq.num_prompt_logprobs:
                seq.prompt_logprobs += values[seq.num_prompt_logprobs - known :]
                seq.num_prompt_logprobs = known

    def abort(
        self,
        request_id: str,
        message: str,
        now_ns: int,
        reason: FinishReason = FinishReason.ABORTED,
        stop: str | None = None,
    ) -> Output | None:
        """Ends an active request in any state; None if there is none of exactly this id.

        Its slot and pages are free when this returns, and tokens still in flight are dropped at commit. (A
        step already dispatched may still write those pages, but it runs before any later step that is given
        them.)
        """
        seq = self._roster.find(request_id)
        if seq is None:
            return None
        return self._finish(seq, Finish(reason, stop=stop, message=message), now_ns, self._generation)

    def expire(self, now_ns: int) -> list[Output]:
        """Ends active requests whose time limit passed. Costs nothing while no deadline is due."""
        if now_ns < self._next_deadline_ns:
            return []
        active = self._roster.active()
        finish = Finish(FinishReason.TIME_LIMIT)
        self._next_deadline_ns = min(
            (d for s in active if (d := s.rules.deadline_ns) > now_ns), default=NEVER_NS
        )
        return [
            self._finish(seq, finish, now_ns, self._generation)
            for seq in active
            if seq.rules.deadline_ns <= now_ns
        ]

    def _finish(
        self,
        seq: Sequence,
        finish: Finish | None,
        now_ns: int,
        generation: int,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: Exception | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> Output:
        """Ends a sequence, by `finish` or `error`, and makes its last Output."""
        self._roster.remove(seq)
        self._finished.pop(seq.request_id, None)  # an id that is used again counts as the newest
        self._finished[seq.request_id] = None
        if len(self._finished) > FINISHED_MEMORY:
            del self._finished[next(iter(self._finished))]
        return Output(
            seq.request_id,
            token_ids,
            logprobs,
            finish,
            seq.timing(now_ns),
            generation,
            error,
            prompt_logprobs,
        )

    # -- all at once --

    def preempt_all(self) -> tuple[str, ...]:
        """Sends all running requests back to the queue, tokens kept. Their ids, in order of arrival."""
        victims = sorted(self._roster.running, key=lambda seq: seq.order)
        for seq in victims:
            self._roster.preempt(seq)
        self.num_preemptions += len(victims)
        return tuple(seq.request_id for seq in victims)

    def use_weights(self, generation: int) -> None:
        """New weights went live, with no step in flight: Outputs carry this number from now on, and no KV of
        the old ones is shared any more. Who is running goes on with its own; who was preempted starts anew.
        """
        self._generation = generation
        for seq in self._roster.waiting:
            seq.forget_prompt_logprobs()
        self.flush_prefix_cache()

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Forget all cached prefixes. Returns the pages that became free, and those that stay because running
        requests hold them; they are not shared with anybody new.
        """
        for seq in self._roster.running:
            self._roster.cache.leave(seq)
        return self._roster.cache.flush()

    # -- what is going on --

    @property
    def has_work(self) -> bool:
        return bool(self._roster.running or self._roster.waiting)

    @property
    def has_started(self) -> bool:
        """Whether a request runs, or did before it was preempted."""
        return bool(self._roster.running) or self._roster.waiting.num_started > 0

    def started_ids(self) -> tuple[str, ...]:
        """Those that run, or did before they were preempted, in order of arrival."""
        return tuple(
            seq.request_id for seq in self._roster.active() if seq.status is _RUNNING or seq.preemptions
        )

    @property
    def next_deadline_ns(self) -> int:
        """No active request's time limit passes before this; `expire` has nothing to do until then."""
        return self._next_deadline_ns

    def active_ids(self) -> tuple[str, ...]:
        """In order of arrival."""
        return tuple(seq.request_id for seq in self._roster.active())

    def active_requests(self) -> tuple[str, ...]:
        """The requests that have active outputs, in order of arrival."""
        return self._roster.requests()

    def outputs_of(self, request_id: str) -> tuple[str, ...]:
        """The engine's ids of a request's active outputs, in order of arrival."""
        return tuple(seq.request_id for seq in self._roster.outputs_of(request_id))

    def finished(self, request_id: str) -> bool:
        """Whether this id ended, in any way, among the last FINISHED_MEMORY and is not in use again."""
        return request_id in self._finished and self._roster.find(request_id) is None

    def load(self) -> Load:
        return self._roster.load()

    def check(self) -> None:
        """Audit for tests, valid between any two calls; AssertionError tells what is wrong."""
        self._roster.check()


def _accept(seq: Sequence, token_ids: Items[int]) -> bool | Exception:
    """What a sequence's constraint says to its tokens, see `Verdicts`."""
    constraint = seq.request.constraint
    assert constraint is not None
    try:
        constraint.accept(token_ids)
        return constraint.is_complete
    except BaseException as error:  # noqa: BLE001  one request's grammar must not end the others'; see `failing`
        return as_exception(error)
