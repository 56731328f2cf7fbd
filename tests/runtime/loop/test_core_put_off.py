"""Rows whose mask is not ready in time have no token in that step. Their tokens do not change by that, the
rows beside them do not wait, and no row waits forever.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.runtime.loop.stepping import Pacer
from penstock.runtime.requests.request import Request, StoppingParams, TokenLogprobs, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.runtime.loop.test_core_streams import MAX_LEN, Apart, core
from tests.support.collector import Collector
from tests.support.scheduler.fake_runner import EOS, VOCAB, Rota, run_alone

GREEDY = ResolvedSampling(temperature=0.0)


def requests(seed: int) -> list[Request]:
    """Make requests with and without constraints, with one to three outputs, and prompts of one or more
    chunks.
    """
    rng = random.Random(seed)
    asked: list[Request] = []
    for i in range(12):
        n = 1 + i % 3
        constraints = [Rota(rng.randint(3, 25)) for _ in range(n)] if i % 2 else []
        request = Request(
            f"r{i}",
            tuple(rng.choices(range(VOCAB), k=rng.randint(1, 30))),
            ResolvedSampling(seed=i) if i % 3 else GREEDY,
            StoppingParams(max_tokens=rng.randint(5, 25), ignore_eos=rng.random() < 0.5),
        )
        asked += outputs_of(request, n, constraints)
    return asked


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "pacer", [Pacer(10.0, 1), Pacer(10.0, 8), Apart(10.0, 4)], ids=["one", "all", "apart"]
)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"scheduling_policy": "priority"},
        {"sliding_window": 9},
        {"has_state": True, "prefix_cache_pages": 0},
        {"has_state": True, "num_snapshots": 4},
    ],
)
@pytest.mark.parametrize("share", [0.2, pytest.param(0.8, marks=pytest.mark.ci)])
def test_tokens_do_not_depend_on_the_steps_that_they_are_made_in(
    overlap: bool, pacer: Pacer, limits: dict[str, Any], share: float
) -> None:
    check_tokens(share, limits, overlap=overlap, pacer=pacer)


@pytest.mark.parametrize("num_turns", [2, 3])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_no_step_in_turns_reads_a_token_that_is_yet_to_be_chosen(num_turns: int, share: float) -> None:
    """A chunk of a prompt stands before two steps of rows under constraints, and the turn that comes next has
    no row, or has got one of another turn. The runner asserts that the input of each row is chosen.
    """
    check_tokens(share, {"num_turns": num_turns}, pacer=Pacer(10.0, 1))


def check_tokens(share: float, limits: dict[str, Any], **options: Any) -> None:
    """Check the tokens of requests where this share of the rows under constraints is put off."""
    with core(**options, **limits) as (engine, runner):
        rng, count = random.Random(3), 0

        def skip(row: int) -> bool:
            nonlocal count
            skipped = rng.random() < share
            count += skipped
            return skipped

        runner.skip = skip
        sink, asked = Collector(), requests(7)
        for request in asked:
            engine.submit(request, sink)
        for request in asked:
            last = sink.last(request.request_id)
            assert last.finish is not None
            has_state = limits.get("has_state", False)
            windows = (limits.get("sliding_window"),)
            expected = run_alone(request, MAX_LEN, windows=windows, has_state=has_state)
            assert (sink.tokens(request.request_id), last.finish.reason) == expected
        assert engine.load().pages_used == 0
        assert count > 10 or not share


@pytest.mark.parametrize(
    ("late", "expected"), [(True, [1, 2, 3, 5, 9, 17, 33]), (False, [1, 2, 2, 2, 2, 2, 2])]
)
def test_a_late_row_sits_out_more_and_more_steps(late: bool, expected: list[int]) -> None:
    """A row that is put off because of another row's mask sits out one step each time. Meanwhile the other
    rows have windows, as if it were not there. It is back as soon as it is alone.
    """
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=400,
        page_size=4,
        num_pages=400,
        eos_token_ids=EOS,
        max_queued_requests=10,
    )
    scheduler = Scheduler(config)
    stopping = StoppingParams(max_tokens=300, ignore_eos=True)
    scheduler.add(Request("plain", (1,), GREEDY, stopping), 0)
    scheduler.add(Request("slow", (1,), GREEDY, stopping, constraint=Rota(300)), 0)
    gaps: list[int] = []
    since = windows = 0
    while len(gaps) < 7:
        plan = scheduler.schedule(0, max_steps=4)
        assert plan is not None
        made = [[5] * row.max_samples for row in plan.rows]
        slow = [i for i, row in enumerate(plan.rows) if row.request_id == "slow"]
        windows += plan.num_steps > 1
        since += 1
        if slow:
            gaps.append(since)
            since = 0
            made[slow[0]] = []
            scheduler.put_off(plan, slow, slow if late else ())
        result = _result(made)
        scheduler.commit(plan, result, 0, scheduler.accept(plan, result, 0))
        scheduler.check()
    assert gaps == expected
    assert windows > (60 if late else 5)
    scheduler.abort("plain", "", 0)
    plan = scheduler.schedule(0)
    assert plan is not None
    assert [row.request_id for row in plan.rows] == ["slow"]


def _result(made: list[list[int]]) -> StepResult:
    return StepResult(made, [[TokenLogprobs(0.0)] * len(tokens) for tokens in made])


def test_a_request_that_is_put_off_can_be_aborted() -> None:
    with core() as (engine, runner):
        runner.skip = lambda row: True
        sink = Collector()
        stopping = StoppingParams(max_tokens=20, ignore_eos=True)
        engine.submit(Request("plain", (1, 2), GREEDY, stopping), sink)
        engine.submit(Request("never", (1, 2), GREEDY, stopping, constraint=Rota(9)), sink)
        assert sink.last("plain").finish is not None
        assert not sink.tokens("never")
        engine.abort(["never"])
        assert sink.last("never").finish is not None
        assert engine.load().pages_used == 0
