"""What each stage of a pipeline does at each moment, by a clock that counts the time of stages and host."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.loop.core import EngineCore
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.collector import Collector
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner, LazyStep, run_alone

STAGE = 10
"""How long each stage takes for a step."""
MAX_LEN = 40


class StagesRunner(LazyRunner):
    """Stages that compute one step after the other, each as soon as the stage before has passed it."""

    def __init__(self, config: SchedulerConfig, *, plan_time: int, host_knows: bool) -> None:
        """`plan_time`: how long the host takes for a plan. `host_knows`: whether the host tells the first
        stage the tokens that it reads; else the last one does.
        """
        super().__init__(config)
        self.may_start = threading.Event()
        self.now = 0
        """The host's time."""
        self.work: list[list[tuple[int, int]]] = [[] for _ in range(config.num_turns)]
        """When each stage has begun each step, and ended it."""
        self._plan_time, self._host_knows = plan_time, host_knows
        self._chosen: dict[int, int] = {}
        """When the last token of each slot was chosen."""

    def start(self) -> None:
        super().start()
        self.may_start.wait()

    def execute_async(self, plan: Plan) -> LazyStep:
        step = super().execute_async(plan)
        self.now += self._plan_time
        known = max((self._chosen[row.slot] for row in plan.rows if row.token_ids is None), default=0)
        if self._host_knows:
            self.now = max(self.now, known)
        at = max(self.now, known)
        for stage in self.work:
            begun = max(at, stage[-1][1]) if stage else at
            at = begun + STAGE
            stage.append((begun, at))
        self._chosen |= {row.slot: at for row in plan.rows if row.samples}
        return dataclasses.replace(step, has_ended=lambda: at <= self.now)

    def wait(self, step: LazyStep) -> StepResult:
        self.now = max(self.now, self.work[-1][step.plan.step_id][1])
        return super().wait(step)


def run(
    num_stages: int, num_requests: int, num_tokens: int, plan_time: int, host_knows: bool
) -> StagesRunner:
    """Serve requests that all come before the first step, and fit into it."""
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=MAX_LEN,
        page_size=4,
        num_pages=100,
        eos_token_ids=EOS,
        max_queued_requests=100,
        num_turns=num_stages,
    )
    runner, sink = StagesRunner(config, plan_time=plan_time, host_knows=host_knows), Collector()
    engine = EngineCore(runner, Scheduler(config), vocab_size=VOCAB)
    engine.start()
    asked = [
        Request(
            f"r{i}", (7, i), ResolvedSampling(temperature=0.0), StoppingParams(num_tokens, ignore_eos=True)
        )
        for i in range(num_requests)
    ]
    try:
        for request in asked:
            engine.submit(request, sink)
        runner.may_start.set()
        for request in asked:
            sink.last(request.request_id)
            assert sink.tokens(request.request_id) == run_alone(request, MAX_LEN)[0]
    finally:
        runner.may_start.set()
        engine.shutdown()
    assert engine.failure is None
    return runner


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.integers(1, 8), st.integers(2, 6), st.integers(0, STAGE), st.booleans())
def test_no_stage_waits_where_there_are_rows_for_it(
    num_stages: int, num_requests: int, num_tokens: int, plan_time: int, host_knows: bool
) -> None:
    """A token takes the time of all stages, for prompts and then for each token. Where there are as many
    requests as stages or more, a stage begins a step when it has ended the one before; where there are fewer,
    as many stages work as there are requests. What the host takes for plans costs nothing.
    """
    runner = run(num_stages, num_requests, num_tokens, plan_time, host_knows)
    num_groups = min(num_requests, num_stages)
    num_steps = 1 + (num_tokens - 1) * num_groups
    for stage, work in enumerate(runner.work):
        begun = [at for at, _ in work[:num_steps]]
        assert begun == [plan_time + stage * STAGE] + [
            plan_time + (stage + token * num_stages + group) * STAGE
            for token in range(1, num_tokens)
            for group in range(num_groups)
        ]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_tokens_are_handed_over_before_the_next_but_one_step_of_a_request_that_is_alone(
    num_stages: int,
) -> None:
    """Where the host waits for a token before it can dispatch the next step, the tokens of the step before
    are there, and need not wait for as many steps as may be in flight.
    """
    log = run(num_stages, 1, 8, 1, host_knows=True).log
    depth, depths = 0, []
    for what, _ in log:
        depth += {"dispatch": 1, "wait": -1}.get(what, 0)
        depths.append(depth)
    assert max(depths) == 2
