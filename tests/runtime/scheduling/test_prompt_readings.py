"""Embeddings and scores of prompts through random traffic: chunks, preemptions, cached prefixes, weight
updates, aborts, and two plans in flight.

The hidden state at position p of a prompt is (1, p, token) times the generation of the weights, and the
log-probability of its token -(p + token) times it. So a position that is left out, added twice or computed by
other weights changes the sum.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import ConfigError, InvalidRequest
from penstock.runtime.requests.request import (
    CacheParams,
    FinishReason,
    Pooling,
    PromptReading,
    Request,
    StepOutput,
    StoppingParams,
    TokenLogprobs,
)
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig

READINGS = (
    PromptReading(pooling=Pooling.LAST_TOKEN),
    PromptReading(pooling=Pooling.FIRST_TOKEN),
    PromptReading(pooling=Pooling.MEAN),
    PromptReading(pooling=Pooling.MAX),
    PromptReading(scores_from=1),
    PromptReading(scores_from=9),
)


def hidden(request: Request, position: int, generation: int) -> np.ndarray:
    return generation * np.array([1, position, request.prompt_token_ids[position]], np.float32)


def score(request: Request, position: int, generation: int) -> TokenLogprobs:
    return TokenLogprobs(-float(generation * (position + request.prompt_token_ids[position])))


class Run:
    """A scheduler, the requests in it, and the outputs so far."""

    def __init__(self, rng: random.Random, *, whole: bool = False) -> None:
        """whole: the model reads each prompt in one step, and generates nothing."""
        self.rng = rng
        self.config = SchedulerConfig(
            max_num_seqs=rng.randint(1, 4),
            max_num_batched_tokens=rng.randint(39, 90) if whole else rng.randint(4, 24),
            whole_prompts=whole,
            max_model_len=48,
            page_size=rng.randint(1, 4),
            num_pages=rng.choice([48, 60, 100]),
            eos_token_ids=frozenset({50}),
            max_queued_requests=100,
            prefix_cache_pages=0 if whole else rng.choice([None, None, 0]),
            max_prefill_chunk=None if whole else rng.choice([None, 1, 3, 7]),
        )
        self.scheduler = Scheduler(self.config)
        self.generation = 1
        self.scheduler.use_weights(1)
        self.in_flight: deque[tuple[Plan, StepResult]] = deque()
        self.requests: dict[str, Request] = {}
        self.ends: dict[str, StepOutput] = {}

    def arrive(self) -> None:
        reading = self.rng.choice(READINGS[:4] if self.config.whole_prompts else (None, *READINGS))
        shared = random.Random(1).choices(range(40), k=30)
        prompt = tuple(
            shared[: self.rng.randint(10, 30)] + self.rng.choices(range(40), k=self.rng.randint(0, 9))
        )
        scores = reading is not None and reading.scores_from is not None
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            stopping=StoppingParams(max_tokens=None if reading else self.rng.randint(1, 8)),
            reading=reading,
            prompt_logprobs=0 if scores else None,
            hidden_states=reading is None and self.rng.random() < 0.5,
            cache=CacheParams(bypass=self.rng.random() < 0.2),
        )
        self.requests[request.request_id] = request
        self.scheduler.add(request, 1)

    def dispatch(self) -> bool:
        if len(self.in_flight) == 2:
            self.commit()
        plan = self.scheduler.schedule(
            1, max_steps=self.rng.choice([1, 4]), apart_steps=self.rng.choice([0, 2])
        )
        if plan is None:
            return False
        self.in_flight.append((plan, self.result(plan)))
        return True

    def result(self, plan: Plan) -> StepResult:
        tokens = []
        states = {}
        scores = {}
        for i, row in enumerate(plan.rows):
            request = self.requests[row.request_id]
            end = row.start + row.num_tokens
            if self.config.whole_prompts:
                assert (row.start, end) == (0, len(request.prompt_token_ids))
            assert (i in plan.pooled) <= (request.reading is not None and request.reading.pooling is not None)
            if request.hidden_states:
                assert plan.num_steps == 1
            if i in plan.pooled:
                first = row.start + plan.pooled[i]
                assert request.reading is not None
                if request.reading.pooling is Pooling.FIRST_TOKEN:
                    end = first + 1
                told = np.stack([hidden(request, p, self.generation) for p in range(first, end)])
                is_max = request.reading.pooling is Pooling.MAX
                states[i] = told.max(axis=0) if is_max else told.sum(axis=0)
            elif request.hidden_states and row.samples:
                states[i] = np.full(3, end * self.generation, np.float32)
            if request.reading is not None and request.reading.scores_from is not None:
                first = max(row.start + 1, request.reading.scores_from)
                last = min(end, len(request.prompt_token_ids) - 1)
                scores[i] = tuple(score(request, p, self.generation) for p in range(first, last + 1))
            assert not (row.samples and request.reading)
            tokens.append((5,) * row.max_samples if row.samples else ())
        return StepResult(tokens, [()] * len(tokens), prompt_logprobs=scores, hidden=states)

    def commit(self) -> None:
        if not self.in_flight:
            return
        plan, result = self.in_flight.popleft()
        verdicts = self.scheduler.accept(plan, result, 1)
        rows = {row.request_id: row for row in plan.rows}
        for output in self.scheduler.commit(plan, result, 1, verdicts):
            request = self.requests[output.request_id]
            if request.reading is None:
                self.check_generated(
                    output, request, rows[output.request_id].start + rows[output.request_id].num_tokens
                )
            if output.last:
                self.ends[output.request_id] = output

    def check_generated(self, output: StepOutput, request: Request, length: int) -> None:
        if not request.hidden_states:
            assert output.hidden is None
            return
        assert output.hidden is not None
        expected = np.full((1, 3), length * output.weights_generation)
        np.testing.assert_array_equal(output.hidden, expected)

    def update(self) -> None:
        while self.in_flight:
            self.commit()
        self.generation += 1
        self.scheduler.use_weights(self.generation)

    def abort(self) -> None:
        active = self.scheduler.active_ids()
        if active:
            name = self.rng.choice(active)
            output = self.scheduler.abort(name, "gone", 1)
            assert output is not None
            assert (output.hidden, output.prompt_logprobs) == (None, ())
            self.ends[name] = output

    def check(self, name: str) -> None:
        output, request = self.ends[name], self.requests[name]
        assert output.finish is not None
        if output.finish.reason is FinishReason.ABORTED or request.reading is None:
            return
        assert (output.finish.reason, output.token_ids) == (FinishReason.PROMPT_READ, ())
        num, generation = len(request.prompt_token_ids), output.weights_generation
        if request.reading.pooling is None:
            first = request.reading.scores_from or 1
            assert output.prompt_logprobs == tuple(score(request, p, generation) for p in range(first, num))
            return
        of_all = np.stack([hidden(request, p, generation) for p in range(num)])
        expected = {
            Pooling.FIRST_TOKEN: of_all[0],
            Pooling.LAST_TOKEN: of_all[-1],
            Pooling.MEAN: of_all.mean(axis=0),
            Pooling.MAX: of_all.max(axis=0),
        }[request.reading.pooling]
        assert output.hidden is not None
        np.testing.assert_allclose(output.hidden, expected, rtol=1e-6)


@given(seed=st.integers(0, 2**32), whole=st.booleans())
def test_every_position_counts_once(seed: int, whole: bool) -> None:
    rng = random.Random(seed)
    run = Run(rng, whole=whole)
    for _ in range(rng.randint(5, 60)):
        event: Callable[[], object] = rng.choices(
            [run.arrive, run.dispatch, run.commit, run.scheduler.preempt_all, run.update, run.abort],
            [4, 10, 8, 1, 1, 1],
        )[0]
        event()
        run.scheduler.check()
    while run.dispatch() or run.in_flight:
        run.commit()
    assert set(run.ends) == set(run.requests)
    assert run.scheduler.load().pages_used == 0
    for name in run.ends:
        run.check(name)


def test_whole_prompts_have_no_chunks() -> None:
    scheduler = Run(random.Random(0), whole=True).scheduler
    with pytest.raises(ConfigError, match="an encoder reads each text in one step"):
        scheduler.limit_prefill_chunk(8)
    scheduler.limit_prefill_chunk(None)


def bad() -> Iterator[tuple[str, dict[str, object]]]:
    both = PromptReading(pooling=Pooling.MEAN, scores_from=1)
    last, scores = READINGS[0], READINGS[4]
    yield "either an embedding or scores", {"reading": both, "prompt_logprobs": 0}
    yield "either an embedding or scores", {"reading": PromptReading()}
    yield "from 1 to 2", {"reading": PromptReading(scores_from=3), "prompt_logprobs": 0}
    yield "from 1 to 2", {"reading": PromptReading(scores_from=0), "prompt_logprobs": 0}
    yield "must be given with scores", {"reading": scores}
    yield "must be given with scores", {"reading": last, "prompt_logprobs": 0}
    for name, value in (("logprobs", 0), ("fork_of", "a"), ("hidden_states", True)):
        yield "generated tokens", {"reading": last, name: value}


@pytest.mark.parametrize(("message", "fields"), list(bad()))
def test_what_does_not_go_together_is_refused(message: str, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request("r", (1, 2, 3), **fields)  # type: ignore[arg-type]
