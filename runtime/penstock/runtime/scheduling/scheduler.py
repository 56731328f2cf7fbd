"""Continuous batching: what happens to requests, from `queue` to their last output. No jax.

`Planner` decides what runs next, `Commits` takes in the tokens of a plan, and `Endings` ends sequences.

`schedule` advances `num_computed` at once and `commit` takes in the tokens later, so the engine may dispatch
a step before it commits the one before. The input of a decode is the slot's own last sample, which is on the
device, so a sequence is scheduled again while its token is in flight. If that token ends the sequence,
`commit` drops the extra row. What that row writes does no harm, see "Overlap" in ARCHITECTURE.md. A sequence
that is preempted with tokens in flight waits for their commit before it enters again: otherwise it would
sample one position twice. Where tokens are proposed, `commit` says how far a sequence came, so no plan is
made before it (`proposals`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

from penstock.runtime.errors import ConfigError, DuplicateRequestId, QueueFull
from penstock.runtime.failing import as_exception
from penstock.runtime.requests.constraint import ForesightedConstraint
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    Request,
    StepOutput,
    TokenLogprobs,
    request_id_of,
)
from penstock.runtime.scheduling.load import Load, LostPages, Totals
from penstock.runtime.scheduling.pages import FlushedPages
from penstock.runtime.scheduling.plan import Draft, Plan, StepResult, guesses_of
from penstock.runtime.scheduling.planner import Planner
from penstock.runtime.scheduling.proposals import Proposals, Proposer
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import NEVER_NS, PromptValues, Sequence, Sharing, Status, StopRules
from penstock.runtime.scheduling.status import OutputStatus, status_of
from penstock.runtime.scheduling.text_windows import TextWindows
from penstock.runtime.scheduling.waiting import ADAPTER_SLOT

log = logging.getLogger(__name__)

__all__ = ["Load", "Scheduler", "SchedulerConfig"]

FINISHED_MEMORY = 4096
"""How many ids of ended outputs `Endings.has_finished` remembers."""


class Endings:
    """Ends the sequences of one roster."""

    def __init__(self, roster: Roster, proposer: Proposer | None = None) -> None:
        self._roster = roster
        self._proposer = proposer
        self._finished: dict[str, None] = {}
        """The ids of the outputs that ended last, oldest first."""
        self.next_deadline_ns = NEVER_NS
        """No active sequence's time limit passes before this. It may be the limit of a sequence that has
        ended."""

    def expect(self, seq: Sequence) -> None:
        """Note the time limit of a sequence that was queued."""
        self.next_deadline_ns = min(self.next_deadline_ns, seq.rules.deadline_ns)

    def end(
        self,
        seq: Sequence,
        now_ns: int,
        *,
        weights_generation: int,
        finish: Finish | None = None,
        error: Exception | None = None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> StepOutput:
        """End a sequence, by `finish` or `error`, and make its last StepOutput. Its slot and pages are free
        when this returns.
        """
        self._roster.remove(seq)
        if self._proposer is not None:
            self._proposer.ended(seq)
        self._finished.pop(seq.request_id, None)  # an id that is used again counts as the newest
        self._finished[seq.request_id] = None
        if len(self._finished) > FINISHED_MEMORY:
            del self._finished[next(iter(self._finished))]
        return StepOutput(
            request_id=seq.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            finish=finish,
            timing=seq.timing(now_ns),
            weights_generation=weights_generation,
            error=error,
            prompt_logprobs=prompt_logprobs,
        )

    def expire(self, now_ns: int, *, weights_generation: int) -> list[StepOutput]:
        """End the active sequences whose time limit has passed. Costs nothing while no time limit is due."""
        if now_ns < self.next_deadline_ns:
            return []
        active = self._roster.active()
        self.next_deadline_ns = min(
            (deadline for seq in active if (deadline := seq.rules.deadline_ns) > now_ns), default=NEVER_NS
        )
        finish = Finish(FinishReason.TIME_LIMIT)
        return [
            self.end(seq, now_ns, weights_generation=weights_generation, finish=finish)
            for seq in active
            if seq.rules.deadline_ns <= now_ns
        ]

    def has_finished(self, request_id: str) -> bool:
        """Say whether an output of this id ended, in any way, among the last FINISHED_MEMORY, and the id is
        not in use again.
        """
        return request_id in self._finished and self._roster.find(request_id) is None


_MOST_SAT_OUT = 32
"""Most plans in a row that a sequence is left out of because its mask is not ready."""

# Makes a StepOutput of its fields in their order. Calling StepOutput itself, for every row of every step,
# would take twice as long.
_output: Callable[[tuple[object, ...]], StepOutput] = partial(tuple.__new__, StepOutput)
_FINISHED, _RUNNING = Status.FINISHED, Status.RUNNING  # because an enum's members are slow to look up
_AT_ONCE_NS = 5_000_000
"""A plan that is made so soon after a commit was made as soon as it could be."""


class Verdict(NamedTuple):
    """What a constraint answered to the tokens of a row."""

    num_tokens: int
    """How many of them it took in: all, unless the output is complete or cannot go on behind these."""
    answer: bool | Exception
    """Whether the output is complete, or what the constraint raised."""


Verdicts = Mapping[int, Verdict]
"""Row to what its constraint answered."""
NO_VERDICTS: Verdicts = {}


class _Uncommitted(NamedTuple):
    """What must be known of a plan when its tokens come. It holds the sequences themselves, not their ids:
    when a sequence is aborted and its id is used again, its tokens must not go to the new sequence.
    """

    weights_generation: int
    """The generation of the weights that compute the plan."""
    sampling: list[Sequence | None]
    """For each row, the sequence that gets its tokens; None where the row makes none."""
    prompts: dict[int, Sequence]
    """See `Draft.prompts`."""
    has_proposed: bool
    """Whether it has rows for which tokens were proposed."""
    planned_ns: int


class _Ending(NamedTuple):
    """How a sequence ends with the tokens of a row."""

    num_tokens: int
    """How many of the row's tokens count."""
    finish: Finish | None
    error: Exception | None


class Commits:
    """The plans that are made and not committed yet. Each is committed once, in the order in which they were
    made.
    """

    def __init__(
        self,
        roster: Roster,
        endings: Endings,
        proposer: Proposer | None = None,
        text_windows: TextWindows | None = None,
    ) -> None:
        self._roster = roster
        self._endings = endings
        self._proposer = proposer
        self._text_windows = text_windows
        self._last_ns = 0  # when the newest tokens were committed
        self._plans: dict[int, _Uncommitted] = {}
        """Step id to plan."""

    def __bool__(self) -> bool:
        """Say whether any plan is not committed yet."""
        return bool(self._plans)

    @property
    def has_proposed(self) -> bool:
        """Whether one of these plans has rows for which tokens were proposed."""
        return any(plan.has_proposed for plan in self._plans.values())

    def expect(self, step_id: int, draft: Draft, weights_generation: int) -> None:
        """Note a new plan, which weights of this generation will compute."""
        self._plans[step_id] = _Uncommitted(
            weights_generation, draft.sampling, draft.prompts, bool(draft.proposed), draft.now_ns
        )

    def accept(self, plan: Plan, result: StepResult, now_ns: int) -> Verdicts:
        """Give the constraints of a plan's rows their tokens. See `Scheduler.accept`."""
        verdicts: dict[int, Verdict] = {}
        for i, seq in enumerate(self._plans[plan.step_id].sampling):
            if seq is None or not seq.is_constrained or seq.status is _FINISHED:
                continue
            sampled = result.token_ids[i]
            counted, finish = seq.rules.first_end(sampled, len(seq.token_ids), now_ns)
            if finish is not None or i not in result.errors:
                verdicts[i] = _accept(seq, sampled[:counted])
                if self._proposer is not None and seq.most_proposed != 0:
                    seq.forced = _forced(seq)
        return verdicts

    def put_off(self, plan: Plan, rows: Collection[int], late: Collection[int]) -> None:
        """Make these rows of a plan yield no token. See `Scheduler.put_off`."""
        sampling = self._plans[plan.step_id].sampling
        self._roster.counts.put_off_rows += len(rows)
        for i in rows:
            seq, sampling[i] = sampling[i], None
            if seq is not None and seq.status is not _FINISHED:
                row = plan.rows[i]
                seq.pending -= row.max_samples
                begins_again = self._roster.has_state or row.proposed
                seq.num_computed = row.start if begins_again else seq.num_computed - 1
                seq.sits_out = 1
                if i in late:
                    seq.sits_out = min(2**seq.put_offs, _MOST_SAT_OUT)
                    seq.put_offs += 1

    def commit(self, plan: Plan, result: StepResult, now_ns: int, verdicts: Verdicts) -> list[StepOutput]:
        """Take in the tokens of a plan. See `Scheduler.commit`."""
        weights_generation, sampling, prompts, _, planned_ns = self._plans.pop(plan.step_id)
        if self._proposer is not None:
            self._measure(self._proposer, plan, result, sampling, planned_ns, now_ns)
        if prompts:
            _take_prompts(prompts, plan, result)
        any_late = now_ns >= self._endings.next_deadline_ns
        errors, publish = result.errors, self._roster.cache.publish
        outputs: list[StepOutput] = []
        for i, (seq, row, sampled, logprobs) in enumerate(
            zip(sampling, plan.rows, result.token_ids, result.logprobs, strict=True)
        ):
            if seq is None or seq.status is _FINISHED:
                continue
            tokens, rules = seq.token_ids, seq.rules
            before = len(tokens)
            tokens += sampled
            total = len(tokens)
            seq.pending -= row.max_samples
            seq.put_offs = 0
            if seq.first_token_ns == 0:
                seq.first_token_ns = now_ns
            new = tuple(sampled)
            if result.guessed:
                for guesses in guesses_of(result.guessed[i]):
                    seq.proposed_tokens += guesses.proposed
                    seq.accepted_tokens += guesses.accepted
            if row.proposed:
                seq.proposed_tokens += len(row.proposed)
                seq.accepted_tokens += max(len(sampled) - 1, 0)
                if seq.status is _RUNNING:  # else it has no positions any more
                    seq.num_computed -= row.max_samples - len(sampled)
                    if self._roster.has_state and len(sampled) < row.max_samples:
                        # The slot's other copy of state stands before this step, so what was accepted is
                        # computed again from there, as a chunk of known tokens.
                        seq.num_computed, seq.prefill_until = row.start, total
                        self._roster.groups.shorten(seq)
            wanted = () if seq.request.logprobs is None else tuple(logprobs)
            prompt = seq.of_prompt.take_logprobs() if i in prompts else ()
            if (
                total >= rules.total_limit
                or any_late
                or seq.is_constrained
                or not rules.end_ids.isdisjoint(new)
                or (errors and i in errors)
            ):
                error = errors.get(i) if errors else None
                ending = _ending(seq, before, new, now_ns, error, verdicts, i)
                if ending is not None:
                    count = ending.num_tokens
                    if row.proposed:  # some accepted ones may come after the end
                        seq.accepted_tokens -= max(len(sampled) - 1 - count, 0)
                    if result.guessed:
                        seq.accepted_tokens -= sum(each < 0 for each in result.guessed[i][count:])
                    del tokens[before + count :]
                    if len(tokens) > seq.sharing.publish_at:
                        publish(seq, len(tokens) - 1)
                    outputs.append(
                        self._endings.end(
                            seq,
                            now_ns,
                            weights_generation=weights_generation,
                            finish=ending.finish,
                            error=ending.error,
                            token_ids=new[:count],
                            logprobs=wanted[:count],
                            prompt_logprobs=prompt,
                        )
                    )
                    continue
            if len(sampled) != row.max_samples and not (row.proposed and sampled):
                raise RuntimeError(
                    f"{seq.request_id} goes on with {len(sampled)} of {row.max_samples} samples"
                )
            if total > seq.sharing.publish_at and total <= seq.num_computed + 1:  # else it is written again
                publish(seq, total - 1)
            outputs.append(
                _output((seq.request_id, new, wanted, None, None, weights_generation, None, prompt, None))
            )
        if prompts:
            outputs += self._read_prompts(prompts, plan, result, now_ns, weights_generation)
        return _with_hidden_states(outputs, plan, result) if result.hidden else outputs

    def _measure(
        self,
        proposer: Proposer,
        plan: Plan,
        result: StepResult,
        sampling: Items[Sequence | None],
        planned_ns: int,
        now_ns: int,
    ) -> None:
        """Tell the proposer how long a step of decodes took: from the commit of the step before, unless the
        engine had nothing to do meanwhile. A step that computes accepted tokens again is one, too.
        """
        last_ns, self._last_ns = self._last_ns, now_ns
        if plan.apart or any(
            row.token_ids is not None and (seq is None or row.start < seq.num_prompt)
            for seq, row in zip(sampling, plan.rows, strict=True)
        ):
            return
        began_ns = last_ns if planned_ns - last_ns < _AT_ONCE_NS else planned_ns
        num_steps = max(map(len, result.token_ids)) if plan.num_steps > 1 else 1
        num_proposed = plan.num_tokens - len(plan.rows)
        proposer.measured(len(plan.rows), num_proposed, (now_ns - began_ns) / max(num_steps, 1))
        if plan.num_steps > 1 and self._text_windows is not None:
            checked = [sum(each >= 0 for each in of_row) for of_row in result.guessed]
            self._text_windows.measured(
                len(plan.rows),
                guessed=plan.reads_text,
                num_tokens=num_steps,
                num_steps=max(checked, default=num_steps),
                elapsed_ns=now_ns - began_ns,
            )

    def _read_prompts(
        self,
        prompts: Mapping[int, Sequence],
        plan: Plan,
        result: StepResult,
        now_ns: int,
        weights_generation: int,
    ) -> list[StepOutput]:
        """End the sequences that end with their prompts and whose last chunk was computed."""
        outputs: list[StepOutput] = []
        for i, seq in prompts.items():
            if seq.request.reading is None or seq.status is _FINISHED:
                continue
            error, row = result.errors.get(i), plan.rows[i]
            if error is None and row.start + row.num_tokens < seq.num_prompt:
                continue
            finish = Finish(FinishReason.PROMPT_READ) if error is None else None
            read = seq.of_prompt if error is None else PromptValues(seq.request)
            ended = self._endings.end(
                seq,
                now_ns,
                weights_generation=weights_generation,
                finish=finish,
                error=error,
                prompt_logprobs=read.take_logprobs(),
            )
            outputs.append(ended._replace(hidden=read.pooled()))
        return outputs


def _ending(
    seq: Sequence,
    before: int,
    new: tuple[int, ...],
    now_ns: int,
    error: Exception | None,
    verdicts: Verdicts,
    row: int,
) -> _Ending | None:
    """Tell how a sequence that had `before` tokens ends with these new ones; None if it goes on.

    The sequence's own stop rules are checked first, then the row's `error`, then the constraint's verdict: a
    constraint is not asked where the row has an error.
    """
    count, finish = seq.rules.first_end(new, before, now_ns)
    if finish is None and error is not None:
        return _Ending(count, None, error)
    if seq.is_constrained:
        num_tokens, answer = verdicts[row]
        if isinstance(answer, Exception):
            return _Ending(num_tokens, None, answer)
        if answer and (finish is None or num_tokens < count):
            return _Ending(num_tokens, Finish(FinishReason.EOS), None)
    return None if finish is None else _Ending(count, finish, None)


def _take_prompts(prompts: Mapping[int, Sequence], plan: Plan, result: StepResult) -> None:
    """Add what is new of the prompts' log-probabilities and embeddings."""
    for i, seq in prompts.items():
        if seq.status is not _FINISHED:
            row = plan.rows[i]
            seq.of_prompt.add_logprobs(row.start + row.num_tokens, result.prompt_logprobs.get(i, ()))
            if i in plan.pooled and i in result.hidden:
                seq.of_prompt.add_hidden(result.hidden[i])


def _with_hidden_states(outputs: Items[StepOutput], plan: Plan, result: StepResult) -> list[StepOutput]:
    """Return the outputs, with the hidden states from which their tokens were chosen."""
    states = {plan.rows[i].request_id: state for i, state in result.hidden.items() if i not in plan.pooled}
    return [
        output._replace(hidden=states[output.request_id][None])
        if output.token_ids and output.request_id in states
        else output
        for output in outputs
    ]


def _accept(seq: Sequence, token_ids: Items[int]) -> Verdict:
    """Give a sequence's constraint its tokens, one after the other until the output is complete, and return
    the verdict.
    """
    constraint = seq.request.constraint
    assert constraint is not None
    for count, token in enumerate(token_ids, 1):
        try:
            constraint.accept((token,))
            if constraint.is_complete:
                return Verdict(count, True)
        except BaseException as error:  # noqa: BLE001  one request's grammar must not end the others'; see `failing`
            return Verdict(count, as_exception(error))
    return Verdict(len(token_ids), False)


def _forced(seq: Sequence) -> Items[int]:
    """Return what a sequence's constraint expects next; nothing if it fails, which its next mask will
    tell.
    """
    constraint = seq.request.constraint
    try:
        return constraint.forced() if isinstance(constraint, ForesightedConstraint) else ()
    except BaseException:  # see `_accept`
        log.exception("a constraint could not say what comes next")
        return ()


class Scheduler:
    """Decides what runs in each step. It is not thread-safe: every call must hold the engine's lock, except
    `page_keys`, `prepare` and `accept`, whose docstrings say why they need not.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        proposer: Proposer | None = None,
        text_windows: TextWindows | None = None,
    ) -> None:
        """`proposer`: proposes tokens; None: nobody does. `text_windows`: say when windows guess; None: they
        do not.
        """
        self.config = config
        self.roster = Roster(config)
        """The running and waiting sequences. Only the scheduler changes it."""
        self._proposals = None if proposer is None else Proposals(config, self.roster, proposer)
        self._planner = Planner(config, self.roster, self._proposals, text_windows)
        self._endings = Endings(self.roster, proposer)
        self._commits = Commits(self.roster, self._endings, proposer, text_windows)
        self._max_chunk = config.max_prefill_chunk
        self._weights_generation = 0
        self._next_order = 0
        self._next_step = 0
        self._turn = 0  # that of the last plan

    # -- new requests --

    def add(self, request: Request, now_ns: int) -> None:
        """Do `prepare` and `queue` in one call, for callers that hold no lock."""
        self.queue(self.prepare(request, now_ns, self.page_keys(request)))

    def page_keys(self, request: Request) -> Iterable[bytes]:
        """Return the prefix cache's keys of a prompt, and none for a prompt that is too long anyway. Any
        thread may call this and `prepare` at any time, because they touch nothing that changes.
        """
        if len(request.prompt_token_ids) >= self.config.max_model_len:
            return ()
        return self.roster.cache.keys_of(request)

    def prepare(self, request: Request, now_ns: int, page_keys: Iterable[bytes]) -> Sequence:
        """Make the sequence that `queue` takes. Raises PromptTooLong or ExceedsKVCapacity, see
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
        """Queue a sequence that `prepare` made; each may be queued once. Raises DuplicateRequestId or
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
        """Plan the next step, or a window of up to `max_steps` decode steps; return None if nothing can be
        computed now, or if the plans in flight are to be committed first. Every plan must be committed
        exactly once, in the order in which plans were made.

        `prefill_budget` bounds the prompt tokens of a step that also has decodes. The bound is multiplied by
        the square root of the number of prompts that could be computed in the step, and at least one token is
        computed. None: the token budget is the only bound.

        `apart_steps`: if rows under a constraint are all that prevents a window, they get a step of their own
        after this many steps of the other rows.

        `admit` false: no request starts, while those that have started go on: their outputs may enter, or
        come back after a preemption. A weight update or a pause waits for them.
        """
        self.roster.preempted.clear()
        if self._awaits_commit():
            return None
        if self.config.num_turns > 1:
            self.roster.even_out_turns()
        preempted: list[str] = []  # also by turns that have no row then
        while True:
            sat_out: list[Sequence] = []
            for turn in self._next_turns():
                draft = Draft(
                    in_flight=bool(self._commits),
                    admit=admit,
                    now_ns=now_ns,
                    prefill_budget=prefill_budget,
                    max_chunk=self._max_chunk,
                    apart_steps=apart_steps,
                    turn=turn,
                    preempted=preempted,
                )
                self._planner.make(draft, max_steps)
                if draft.rows:
                    return self._planned(draft)
                sat_out += draft.sat_out
            if not sat_out:
                return None
            for seq in sat_out:  # no other sequence has anything to do
                seq.sits_out = 0

    def _next_turns(self) -> Iterable[int | None]:
        """Return the turns from the next one on, each once; None alone where steps take no turns."""
        count = self.config.num_turns
        return (None,) if count == 1 else ((self._turn + ahead) % count for ahead in range(1, count + 1))

    def _planned(self, draft: Draft) -> Plan:
        self._turn = draft.turn or 0
        plan = draft.plan(self._next_step)
        self._next_step += 1
        self._commits.expect(plan.step_id, draft, self._weights_generation)
        return plan

    def _awaits_commit(self) -> bool:
        """Say whether no plan is made before the plans in flight are committed, because of proposals."""
        if self._proposals is None or not self._commits:
            return False
        return self._commits.has_proposed or self._proposals.is_due()

    def limit_prefill_chunk(self, size: int | None) -> None:
        """Set the most prompt tokens of one request in a step, at least 1, from the next plan on; None: the
        token budget is the only bound. ConfigError for a model that reads each prompt in one step.
        """
        if self.config.whole_prompts and size is not None:
            raise ConfigError("max_prefill_chunk: must be None: an encoder reads each text in one step")
        self._max_chunk = size

    # -- results --

    def accept(self, plan: Plan, result: StepResult, now_ns: int) -> Verdicts:
        """Give the constraints of a plan's rows their tokens, and return what `commit` needs to know of the
        answers.

        This may take long, so it is called without the engine's lock. That is safe if the caller is the
        thread that schedules and commits, because it reads only what `schedule` and `commit` change. `commit`
        skips a sequence that is aborted meanwhile.
        """
        return self._commits.accept(plan, result, now_ns)

    def put_off(self, plan: Plan, rows: Collection[int], late: Collection[int]) -> None:
        """Make these rows of a plan yield no token, although they were to. The next plan that has such a row
        computes its last position again or, with `SchedulerConfig.has_state`, all that the row computed in
        this plan. While other sequences have something to do, the row's sequence is left out of one plan; if
        the row is in `late`, of two plans, then four, and so on. To be called before the next plan is made.
        """
        self._commits.put_off(plan, rows, late)

    def commit(
        self, plan: Plan, result: StepResult, now_ns: int, verdicts: Verdicts = NO_VERDICTS
    ) -> list[StepOutput]:
        """Take in the tokens of a plan. Returns one StepOutput for each row that sampled and whose sequence
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
        """End an active output in any state, and return its last StepOutput; None if no output has exactly
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
        """End an active output with an error, and return its last StepOutput. KeyError if there is none of
        this id.
        """
        seq = self.roster.find(request_id)
        if seq is None:
            raise KeyError(request_id)
        return self._endings.end(seq, now_ns, weights_generation=self._weights_generation, error=error)

    def expire(self, now_ns: int) -> list[StepOutput]:
        """End the active requests whose time limit has passed. Costs nothing while no time limit is due."""
        return self._endings.expire(now_ns, weights_generation=self._weights_generation)

    @property
    def next_deadline_ns(self) -> int:
        """A time before which no active request's time limit passes, in monotonic ns; until then `expire` has
        nothing to do.
        """
        return self._endings.next_deadline_ns

    def finished(self, request_id: str) -> bool:
        """Say whether an output of this id ended, in any way, among the last FINISHED_MEMORY, and the id is
        not in use again.
        """
        return self._endings.has_finished(request_id)

    # -- all at once --

    def preempt_all(self) -> tuple[str, ...]:
        """Send all running sequences back to the queue; they keep their tokens. Returns their ids, in order
        of arrival.
        """
        victims = sorted(self.roster.running, key=lambda seq: seq.order)
        for seq in victims:
            self.roster.preempt(seq)
        return tuple(seq.request_id for seq in victims)

    def use_weights(self, generation: int) -> None:
        """Record that new weights went live, with no step in flight. Outputs carry this weights' generation
        from now on, and KV of the old weights is not shared any more. Running sequences go on with their own
        KV; preempted ones compute theirs again, and so do those that end with their prompts, because an
        embedding or a score is of one version of the weights.
        """
        self._weights_generation = generation
        for seq in [seq for seq in self.roster.running if seq.request.reading is not None]:
            self.roster.preempt(seq)
        for seq in self.roster.waiting:
            seq.forget_prompt_values()
        self.roster.forget_images()
        self.flush_prefix_cache()

    def name_adapters(self, named: frozenset[str], pinned: frozenset[str]) -> None:
        """Set which adapters a name means, and which of them keep their slots. The latter are fewer than
        there are slots.
        """
        self.roster.adapters.named, self.roster.adapters.pinned = named, pinned
        self.roster.waiting.happened(ADAPTER_SLOT)

    def flush_prefix_cache(self) -> FlushedPages:
        """Forget all cached prefixes. Pages that running requests hold stay theirs, and are not shared with
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
        """Return the ids of the active outputs of the requests that have started, in order of arrival."""
        return tuple(seq.request_id for seq in self.roster.active() if seq.has_started)

    def active_ids(self) -> tuple[str, ...]:
        """Return the ids of the active outputs, in order of arrival."""
        return tuple(seq.request_id for seq in self.roster.active())

    def active_requests(self) -> tuple[str, ...]:
        """Return the requests that have active outputs, in order of arrival."""
        return self.roster.requests()

    def outputs_of(self, request_id: str) -> tuple[str, ...]:
        """Return the ids of a request's active outputs, in order of arrival."""
        return tuple(seq.request_id for seq in self.roster.outputs_of(request_id))

    def oldest(self, most: int) -> list[OutputStatus]:
        """Tell where the outputs stand that arrived first, at most so many."""
        return [status_of(seq) for seq in self.roster.oldest(most)]

    def load(self) -> Load:
        """Tell how busy the scheduler is."""
        return self.roster.load()

    def totals(self) -> Totals:
        """Return what was counted since the start."""
        return self.roster.counts.totals()

    def take_preempted(self) -> list[LostPages]:
        """Take the sequences that were preempted since the last call, or since `schedule` began, oldest
        first.
        """
        taken, self.roster.preempted = self.roster.preempted, []
        return taken

    def check(self) -> None:
        """Check all invariants, for tests; valid between any two calls. The AssertionError says what is
        wrong.
        """
        self.roster.check()
