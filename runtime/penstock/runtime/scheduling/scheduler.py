"""Continuous batching: what happens to requests, from `queue` to their last output. No jax.

`planning` decides what runs next, `commits` takes in the tokens of a plan, and `endings` ends sequences.

`schedule` advances `num_computed` at once and `commit` takes in the tokens later, so the engine may dispatch
a step before it commits the one before. The input of a decode is the slot's own last sample, which is on the
device, so a sequence is scheduled again while its token is in flight. If that token ends the sequence,
`commit` drops the extra row. A sequence that is preempted with tokens in flight waits for their commit before
it enters again: otherwise it would sample one position twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.runtime.errors import DuplicateRequestId, QueueFull
from penstock.runtime.requests.fanout import request_id_of
from penstock.runtime.requests.request import Finish, FinishReason, Request, StepOutput
from penstock.runtime.scheduling.load import Load, LostPages, Totals
from penstock.runtime.scheduling.pages import FlushedPages
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.planning.draft import Draft
from penstock.runtime.scheduling.planning.planner import Planner
from penstock.runtime.scheduling.results.commits import NO_VERDICTS, Commits, Verdicts
from penstock.runtime.scheduling.results.endings import Endings
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence, Sharing
from penstock.runtime.scheduling.status import OutputStatus, status_of
from penstock.runtime.scheduling.stopping import StopRules

__all__ = ["Load", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Decides what runs in each step. It is not thread-safe: every call must hold the engine's lock, except
    `page_keys`, `prepare` and `accept`, whose docstrings say why they need not.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.roster = Roster(config)
        """The running and waiting sequences. Only the scheduler changes it."""
        self._planner = Planner(config, self.roster)
        self._endings = Endings(self.roster)
        self._commits = Commits(self.roster, self._endings)
        self._max_chunk = config.max_prefill_chunk
        self._weights_generation = 0
        self._next_order = 0
        self._next_step = 0

    # -- new requests --

    def add(self, request: Request, now_ns: int) -> None:
        """Does `prepare` and `queue` in one call, for callers that hold no lock."""
        self.queue(self.prepare(request, now_ns, self.page_keys(request)))

    def page_keys(self, request: Request) -> Iterable[bytes]:
        """Returns the prefix cache's keys of a prompt, and none for a prompt that is too long anyway. Any
        thread may call this and `prepare` at any time, because they touch nothing that changes.
        """
        if len(request.prompt_token_ids) >= self.config.max_model_len:
            return ()
        return self.roster.cache.keys_of(request)

    def prepare(self, request: Request, now_ns: int, page_keys: Iterable[bytes]) -> Sequence:
        """Makes the sequence that `queue` takes. Raises PromptTooLong or ExceedsKVCapacity, see
        `SchedulerConfig.context_limit`.
        """
        rules = StopRules.of(
            request,
            eos_token_ids=self.config.eos_token_ids,
            context_limit=self.config.context_limit(request),
            now_ns=now_ns,
        )
        prompt = request.prompt_token_ids
        return Sequence(request, list(prompt), len(prompt), rules, now_ns, Sharing(list(page_keys)))

    def queue(self, seq: Sequence) -> None:
        """Queues a sequence that `prepare` made; each may be queued once. Raises DuplicateRequestId or
        QueueFull.
        """
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
        """Plans the next step, or a window of up to `max_steps` decode steps; None if nothing can be computed
        now. Every plan must be committed exactly once, in the order in which plans were made.

        `prefill_budget` bounds the prompt tokens of a step that also has decodes. The bound is multiplied by
        the square root of the number of prompts that could be computed in the step, and at least one token is
        computed. None: the token budget is the only bound.

        `apart_steps`: if rows under a constraint are all that prevents a window, they get a step of their own
        after this many steps of the other rows.

        `admit` false: no request starts, while those that have started go on: their outputs may enter, or
        come back after a preemption. A weight update or a pause waits for them.
        """
        self.roster.preempted.clear()
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
            if draft.rows:
                break
            if not draft.sat_out:
                return None
            for seq in draft.sat_out:  # no other sequence has anything to do
                seq.sits_out = 0
        plan = draft.plan(self._next_step)
        self._next_step += 1
        self._commits.expect(plan.step_id, draft, self._weights_generation)
        return plan

    def limit_prefill_chunk(self, size: int | None) -> None:
        """Sets the most prompt tokens of one request in a step, at least 1, from the next plan on; None: the
        token budget is the only bound.
        """
        self._max_chunk = size

    # -- results --

    def accept(self, plan: Plan, result: StepResult, now_ns: int) -> Verdicts:
        """Gives the constraints of a plan's rows their tokens, and returns what `commit` needs to know of the
        answers.

        This may take long, so it is called without the engine's lock. That is safe if the caller is the
        thread that schedules and commits, because it reads only what `schedule` and `commit` change. `commit`
        skips a sequence that is aborted meanwhile.
        """
        return self._commits.accept(plan, result, now_ns)

    def put_off(self, plan: Plan, rows: Collection[int], late: Collection[int]) -> None:
        """Makes these rows of a plan yield no token, although they were to. The next plan that has such a row
        computes its last position again or, with `SchedulerConfig.has_state`, all that the row computed in
        this plan. While other sequences have something to do, the row's sequence is left out of one plan; if
        the row is in `late`, of two plans, then four, and so on. To be called before the next plan is made.
        """
        self._commits.put_off(plan, rows, late)

    def commit(
        self, plan: Plan, result: StepResult, now_ns: int, verdicts: Verdicts = NO_VERDICTS
    ) -> list[StepOutput]:
        """Takes in the tokens of a plan. Returns one StepOutput for each row that sampled and whose sequence
        is still active. If rows have constraints, `accept` must be called before, with the same arguments.

        The token that ends a request (EOS or a stop id) is the last one of its StepOutput; the text layer
        decides what is shown.
        """
        return self._commits.commit(plan, result, now_ns, verdicts)

    # -- endings --

    def abort(
        self,
        request_id: str,
        message: str,
        now_ns: int,
        reason: FinishReason = FinishReason.ABORTED,
        stop: str | None = None,
    ) -> StepOutput | None:
        """Ends an active output in any state, and returns its last StepOutput; None if no output has exactly
        this id.

        The slot and pages are free when this returns, and tokens still in flight are dropped when they are
        committed. A step that is already dispatched may still write those pages, but the device runs it
        before any later step that is given them.
        """
        seq = self.roster.find(request_id)
        if seq is None:
            return None
        finish = Finish(reason, stop=stop, message=message)
        return self._endings.end(seq, now_ns, weights_generation=self._weights_generation, finish=finish)

    def fail(self, request_id: str, error: Exception, now_ns: int) -> StepOutput:
        """Ends an active output with an error, and returns its last StepOutput. KeyError if there is none of
        this id.
        """
        seq = self.roster.find(request_id)
        if seq is None:
            raise KeyError(request_id)
        return self._endings.end(seq, now_ns, weights_generation=self._weights_generation, error=error)

    def expire(self, now_ns: int) -> list[StepOutput]:
        """Ends the active requests whose time limit has passed. Costs nothing while no time limit is due."""
        return self._endings.expire(now_ns, weights_generation=self._weights_generation)

    @property
    def next_deadline_ns(self) -> int:
        """A time before which no active request's time limit passes, in monotonic ns; until then `expire` has
        nothing to do.
        """
        return self._endings.next_deadline_ns

    def finished(self, request_id: str) -> bool:
        """Whether an output of this id ended, in any way, among the last FINISHED_MEMORY, and the id is not
        in use again.
        """
        return self._endings.has_finished(request_id)

    # -- all at once --

    def preempt_all(self) -> tuple[str, ...]:
        """Sends all running sequences back to the queue; they keep their tokens. Returns their ids, in order
        of arrival.
        """
        victims = sorted(self.roster.running, key=lambda seq: seq.order)
        for seq in victims:
            self.roster.preempt(seq)
        return tuple(seq.request_id for seq in victims)

    def use_weights(self, generation: int) -> None:
        """Records that new weights went live, with no step in flight. Outputs carry this weights' generation
        from now on, and KV of the old weights is not shared any more. Running sequences go on with their own
        KV; preempted ones compute theirs again, and so do those that end with their prompts, because an
        embedding or a score is of one version of the weights.
        """
        self._weights_generation = generation
        for seq in [seq for seq in self.roster.running if seq.request.reading is not None]:
            self.roster.preempt(seq)
        for seq in self.roster.waiting:
            seq.forget_prompt_values()
        self.roster.forget_pictures()
        self.flush_prefix_cache()

    def flush_prefix_cache(self) -> FlushedPages:
        """Forgets all cached prefixes. Pages that running requests hold stay theirs, and are not shared with
        any new request.
        """
        for seq in self.roster.running:
            self.roster.cache.leave(seq)
        if self.roster.snapshots is not None:
            self.roster.snapshots.flush()
        return self.roster.cache.flush()

    # -- state --

    @property
    def has_work(self) -> bool:
        """Whether requests run or wait."""
        return bool(self.roster.running or self.roster.waiting)

    @property
    def has_started(self) -> bool:
        """Whether a request has begun to run, and has outputs that have not ended."""
        return bool(self.roster.running) or self.roster.waiting.num_started > 0

    @property
    def num_started_requests(self) -> int:
        """How many requests have begun to run, and have outputs that have not ended. Some of these outputs
        may wait: to enter, or to come back after a preemption.
        """
        return self.roster.num_started_requests

    @property
    def num_running_requests(self) -> int:
        """How many requests have outputs that run now, and so hold KV."""
        return len({request_id_of(seq.request_id) for seq in self.roster.running})

    def started_ids(self) -> tuple[str, ...]:
        """The ids of the active outputs of the requests that have started, in order of arrival."""
        return tuple(seq.request_id for seq in self.roster.active() if seq.has_started)

    def active_ids(self) -> tuple[str, ...]:
        """The ids of the active outputs, in order of arrival."""
        return tuple(seq.request_id for seq in self.roster.active())

    def active_requests(self) -> tuple[str, ...]:
        """The requests that have active outputs, in order of arrival."""
        return self.roster.requests()

    def outputs_of(self, request_id: str) -> tuple[str, ...]:
        """The ids of a request's active outputs, in order of arrival."""
        return tuple(seq.request_id for seq in self.roster.outputs_of(request_id))

    def oldest(self, most: int) -> list[OutputStatus]:
        """Where the outputs stand that arrived first, at most so many."""
        return [status_of(seq) for seq in self.roster.oldest(most)]

    def load(self) -> Load:
        """How busy the scheduler is."""
        return self.roster.load()

    def totals(self) -> Totals:
        """What was counted since the start."""
        return self.roster.counts.totals()

    def take_preempted(self) -> list[LostPages]:
        """The sequences that were preempted since the last call, or since `schedule` began, oldest first."""
        taken, self.roster.preempted = self.roster.preempted, []
        return taken

    def check(self) -> None:
        """Checks all invariants, for tests; valid between any two calls. The AssertionError says what is
        wrong.
        """
        self.roster.check()
