"""Takes in the tokens of plans. No jax.

A plan is made before the tokens of the plan before it are known, so a sequence may end in one plan while the
next one already has a row of it. That extra row is dropped when its plan is committed. What the row writes
does no harm, see "Overlap" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

from penstock.runtime.failing import as_exception
from penstock.runtime.requests.request import Finish, FinishReason, StepOutput
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.planning.draft import Draft
from penstock.runtime.scheduling.prompt_values import PromptValues
from penstock.runtime.scheduling.results.endings import Endings
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.sequence import Sequence, Status

_MOST_SAT_OUT = 32
"""Most plans in a row that a sequence is left out of because its mask is not ready."""

# Makes a StepOutput of its fields in their order. Calling StepOutput itself, for every row of every step,
# would take twice as long.
_output: Callable[[tuple[object, ...]], StepOutput] = partial(tuple.__new__, StepOutput)
_FINISHED = Status.FINISHED  # a name of its own, because an enum's member is slow to look up

Verdicts = Mapping[int, bool | Exception]
"""Row to what its constraint answered: whether the output is complete, or what the constraint raised."""
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

    def __init__(self, roster: Roster, endings: Endings) -> None:
        self._roster = roster
        self._endings = endings
        self._plans: dict[int, _Uncommitted] = {}
        """Step id to plan."""

    def __bool__(self) -> bool:
        """Whether any plan is not committed yet."""
        return bool(self._plans)

    def expect(self, step_id: int, draft: Draft, weights_generation: int) -> None:
        """Notes a new plan, which weights of this generation will compute."""
        self._plans[step_id] = _Uncommitted(weights_generation, draft.sampling, draft.prompts)

    def accept(self, plan: Plan, result: StepResult, now_ns: int) -> Verdicts:
        """Gives the constraints of a plan's rows their tokens. See `Scheduler.accept`."""
        verdicts: dict[int, bool | Exception] = {}
        for i, seq in enumerate(self._plans[plan.step_id].sampling):
            if seq is None or not seq.is_constrained or seq.status is _FINISHED:
                continue
            sampled = result.token_ids[i]
            counted, finish = seq.rules.first_end(sampled, len(seq.token_ids), now_ns)
            if finish is not None or i not in result.errors:
                verdicts[i] = _accept(seq, sampled[:counted])
        return verdicts

    def put_off(self, plan: Plan, rows: Collection[int], late: Collection[int]) -> None:
        """Makes these rows of a plan yield no token. See `Scheduler.put_off`."""
        sampling = self._plans[plan.step_id].sampling
        self._roster.counts.put_off_rows += len(rows)
        for i in rows:
            seq, sampling[i] = sampling[i], None
            if seq is not None and seq.status is not _FINISHED:
                seq.pending -= 1
                seq.num_computed = plan.rows[i].start if self._roster.has_state else seq.num_computed - 1
                seq.sits_out = 1
                if i in late:
                    seq.sits_out = min(2**seq.put_offs, _MOST_SAT_OUT)
                    seq.put_offs += 1

    def commit(self, plan: Plan, result: StepResult, now_ns: int, verdicts: Verdicts) -> list[StepOutput]:
        """Takes in the tokens of a plan. See `Scheduler.commit`."""
        weights_generation, sampling, prompts = self._plans.pop(plan.step_id)
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
            if len(sampled) != row.max_samples:
                raise RuntimeError(
                    f"{seq.request_id} goes on with {len(sampled)} of {row.max_samples} samples"
                )
            if total > seq.sharing.publish_at:
                publish(seq, total - 1)
            outputs.append(
                _output((seq.request_id, new, wanted, None, None, weights_generation, None, prompt, None))
            )
        if prompts:
            outputs += self._read_prompts(prompts, plan, result, now_ns, weights_generation)
        return _with_hidden_states(outputs, plan, result) if result.hidden else outputs

    def _read_prompts(
        self,
        prompts: Mapping[int, Sequence],
        plan: Plan,
        result: StepResult,
        now_ns: int,
        weights_generation: int,
    ) -> list[StepOutput]:
        """Ends the sequences that end with their prompts and whose last chunk was computed."""
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
    """How a sequence that had `before` tokens ends with these new ones; None if it goes on.

    The sequence's own stop rules are checked first, then the row's `error`, then the constraint's verdict: a
    constraint is not asked where the row has an error.
    """
    count, finish = seq.rules.first_end(new, before, now_ns)
    if finish is None and error is not None:
        return _Ending(count, None, error)
    if seq.is_constrained:
        verdict = verdicts[row]
        if isinstance(verdict, Exception):
            return _Ending(count, None, verdict)
        if finish is None and verdict:
            finish = Finish(FinishReason.EOS)
    return None if finish is None else _Ending(count, finish, None)


def _take_prompts(prompts: Mapping[int, Sequence], plan: Plan, result: StepResult) -> None:
    """Adds what is new of the prompts' log-probabilities and embeddings."""
    for i, seq in prompts.items():
        if seq.status is not _FINISHED:
            row = plan.rows[i]
            seq.of_prompt.add_logprobs(row.start + row.num_tokens, result.prompt_logprobs.get(i, ()))
            if i in plan.pooled and i in result.hidden:
                seq.of_prompt.add_hidden(result.hidden[i])


def _with_hidden_states(outputs: Items[StepOutput], plan: Plan, result: StepResult) -> list[StepOutput]:
    """The outputs, with the hidden states from which their tokens were chosen."""
    states = {plan.rows[i].request_id: state for i, state in result.hidden.items() if i not in plan.pooled}
    return [
        output._replace(hidden=states[output.request_id][None])
        if output.token_ids and output.request_id in states
        else output
        for output in outputs
    ]


def _accept(seq: Sequence, token_ids: Items[int]) -> bool | Exception:
    """Gives a sequence's constraint its tokens, and returns the verdict."""
    constraint = seq.request.constraint
    assert constraint is not None
    try:
        constraint.accept(token_ids)
        return constraint.is_complete
    except BaseException as error:  # noqa: BLE001  one request's grammar must not end the others'; see `failing`
        return as_exception(error)
