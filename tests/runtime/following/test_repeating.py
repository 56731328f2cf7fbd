"""A follower repeats the leader's calls of programs, and has the same on its device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from penstock.runtime.errors import GroupEnded
from penstock.runtime.execution.buckets import Buckets
from penstock.runtime.execution.compilation import use_compilation_cache
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.draft_model import DraftModel
from penstock.runtime.execution.program_set import Programs
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.following.interface import Call, Facts, Kind
from penstock.runtime.following.leading import LeadingRunner
from penstock.runtime.following.repeating import Repeater
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import PageWrite, Plan, PlanRow, drafted_tokens
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.hybrid import hybrid_model, hybrid_tokens
from tests.support.models.table import random_tables, table_model
from tests.support.models.toy import EOS, VOCAB, toy_backend

CONFIG = RunnerConfig(
    buckets=Buckets((16,), (8,)),
    max_num_seqs=4,
    max_model_len=64,
    page_size=4,
    dtype=np.dtype(np.float32),
    kv_dtype=np.dtype(np.float32),
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    show_progress=False,
    checks_proposals=True,
)


class Log:
    """A dispatch log that keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def meet(self, facts: Facts) -> None:
        pass

    def begin(self, facts: Facts) -> None:
        pass

    def append(self, call: Call) -> None:
        self.calls.append(call)

    def explained(self, error: Exception) -> GroupEnded:
        raise error


@pytest.mark.ci
def test_a_follower_chooses_the_same_tokens_where_some_are_proposed() -> None:
    """Of four tokens proposed for one row the first two are right; the other row goes on as usual. The model
    keeps state by slot, so another program than in other steps computes the rows of proposed tokens, and the
    step behind the wrong one computes the accepted ones again. Afterwards both have the same tokens, state
    and pages on their devices.
    """
    use_compilation_cache(TEST_CACHE)
    model = hybrid_model()
    log: Any = Log()
    no_updates: Any = None
    parts = (model.graphdef, model.weights, model.cache, CONFIG, toy_backend())
    leader = LeadingRunner(DeviceState(*parts), CONFIG, log)
    follower = ModelRunner(DeviceState(*parts), CONFIG)
    programs = compiled(leader, follower)
    repeater = Repeater(follower, programs, no_updates)

    prompts = {0: [1, 2, 3], 2: [5]}
    expected = {slot: hybrid_tokens(prompt, 9) for slot, prompt in prompts.items()}
    greedy, rules = ResolvedSampling(temperature=0.0), StoppingParams(ignore_eos=True)
    first = Plan(
        0,
        tuple(PlanRow(f"r{slot}", slot, 0, len(p), tuple(p), True) for slot, p in prompts.items()),
        new_requests=tuple(
            (slot, Request(f"r{slot}", tuple(p), greedy, rules)) for slot, p in prompts.items()
        ),
        page_writes=(PageWrite(0, 0, (7, 9, 1)), PageWrite(2, 0, (2, 4, 6))),
    )
    right = expected[0]
    proposed = (right[1], right[2], (right[3] + 1) % VOCAB, right[4])
    second = Plan(
        1,
        (
            PlanRow("r0", 0, 3, 5, None, True, 0, 5, proposed),
            PlanRow("r2", 2, 1, 1, None, True),
        ),
        proposer="test",
    )
    again = PlanRow("r0", 0, 3, 4, tuple(right[:4]), True)
    third = Plan(2, (again, PlanRow("r2", 2, 2, 1, None, True)))
    fourth = Plan(3, (PlanRow("r0", 0, 7, 1, None, True), PlanRow("r2", 2, 3, 1, None, True)))
    assert leader.execute(first).token_ids == [right[:1], expected[2][:1]]
    assert leader.execute(second).token_ids == [right[1:4], expected[2][1:2]]
    assert leader.device.rows.tokens[0] == right[3]
    assert leader.execute(third).token_ids == [right[4:5], expected[2][2:3]]
    assert leader.execute(fourth).token_ids == [right[5:6], expected[2][3:4]]
    check_repeated(log.calls, repeater, leader, follower)


def compiled(leader: LeadingRunner, follower: ModelRunner) -> Programs:
    """Compile the programs of both once."""
    for runner in (leader, follower):
        runner.initialize_kv_cache((16,))
    programs = follower.compiled()
    leader._calls = leader.make_calls(programs)
    return programs


def check_repeated(
    calls: list[Call], repeater: Repeater, leader: LeadingRunner, follower: ModelRunner
) -> None:
    """Check that a follower that makes these calls has on its device what the leader has."""
    for call in calls:
        repeater.repeat(call)
    found, same = ((runner.device.rows, runner.device.kv) for runner in (follower, leader))
    jax.tree.map(np.testing.assert_array_equal, found, same)
    for runner in (leader, follower):
        runner.shutdown()


@pytest.mark.ci
def test_a_follower_guesses_what_the_leader_guesses() -> None:
    """The draft has the tables of the model, so all four guesses are right, and the step makes five tokens.
    Guesses are made on the device, and never told.
    """
    use_compilation_cache(TEST_CACHE)
    tables = random_tables()
    model = table_model(tables)
    draft = DraftModel(
        name="draft",
        graphdef=model.graphdef,
        weights=model.weights,
        cache=model.cache,
        vocab_size=model.vocab_size,
    )
    log: Any = Log()
    no_updates: Any = None
    config = dataclasses.replace(CONFIG, drafted_tokens=4)
    parts = (model.graphdef, model.weights, model.cache, config, toy_backend(), draft)
    leader = LeadingRunner(DeviceState(*parts), config, log)
    follower = ModelRunner(DeviceState(*parts), config)
    programs = compiled(leader, follower)
    repeater = Repeater(follower, programs, no_updates)
    known = [1, 2, 3]
    for _ in range(6):
        known.append(int(np.argmax(tables.logits(known))))
    request = Request("r", (1, 2, 3), ResolvedSampling(temperature=0.0), StoppingParams(ignore_eos=True))
    first = Plan(
        0,
        (PlanRow("r", 1, 0, 3, (1, 2, 3), True),),
        new_requests=((1, request),),
        page_writes=(PageWrite(1, 0, (7, 9, 1)),),
    )
    second = Plan(1, (PlanRow("r", 1, 3, 5, None, True, 0, 5, drafted_tokens(4)),), proposer="draft")
    assert leader.execute(first).token_ids == [known[3:4]]
    assert leader.execute(second).token_ids == [known[4:9]]
    assert [call.program for call in log.calls if call.kind is Kind.GUESS] == ["8"]
    with pytest.raises(ValueError, match="guesses for 3 rows"):
        repeater.repeat(Call(Kind.GUESS, "3"))
    check_repeated(log.calls, repeater, leader, follower)
