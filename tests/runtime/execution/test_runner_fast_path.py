"""JAX calls a compiled program through C++, unless something about the call sends it through Python, which
costs a millisecond with a few hundred arrays. From the first step on, no call may go through Python. Also,
the host sends and reads no more for a step than necessary.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax._src import test_util

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.buckets import Buckets, ProgramKey
from penstock.runtime.execution.compilation import compile_program
from penstock.runtime.execution.request_programs import make_table_rows
from penstock.runtime.execution.runner import AwaitingTokens, ModelRunner, PendingStep
from penstock.runtime.execution.slots import Slots
from penstock.runtime.ops.device_arrays import zeros, zeros_maker
from penstock.runtime.ops.sampler import RowState
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import PageCopy, PageWrite, Plan, PlanRow
from tests.support.models.toy import VOCAB, toy_model, toy_runner
from tests.support.scheduler.put_off import Anything

pytestmark = pytest.mark.ci

GREEDY = ResolvedSampling(temperature=0.0)
PENALISED = ResolvedSampling(temperature=0.0, presence_penalty=0.5, logit_bias=((3, 1.0),))


@contextmanager
def slow_calls() -> Iterator[Callable[[], int]]:
    """Yield a function that counts the calls of compiled programs which this thread made through Python."""
    with test_util.count_aot_jit_cpp_cache_miss() as count:
        yield count


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with toy_runner(toy_model(), Buckets(token_buckets=(16, 32), row_buckets=(2, 4))) as runner:
        yield runner


def entry(slot: int, num_prompt: int = 5, **about: Any) -> Plan:
    prompt = tuple(range(1, num_prompt + 1))
    request = Request(f"r{slot}", prompt, GREEDY, StoppingParams(ignore_eos=True))
    request = dataclasses.replace(request, **about)
    row = PlanRow(request.request_id, slot, 0, num_prompt, prompt, True)
    pages = PageWrite(slot, 0, tuple(range(16 * slot, 16 * slot + 16)))
    return Plan(slot, (row,), new_requests=((slot, request),), page_writes=(pages,))


def decodes(*slots: int, start: int = 5, num_steps: int = 1) -> Plan:
    rows = tuple(PlanRow(f"r{slot}", slot, start, 1, None, True, 0, num_steps) for slot in slots)
    return Plan(9, rows, num_steps=num_steps)


PLANS = {
    "prefills": lambda: [entry(0), entry(1, 20)],
    "decodes and windows": lambda: [
        *map(entry, range(4)),
        decodes(0),
        decodes(0, 1, 2, start=6),
        decodes(0, 1, start=7, num_steps=4),
        decodes(0, 1, 2, 3, start=11, num_steps=3),
    ],
    "penalties": lambda: [
        dataclasses.replace(entry(2, sampling=PENALISED), feature_slots={2: 1}),
        decodes(2),
    ],
    "copies of pages": lambda: [
        entry(0),
        dataclasses.replace(entry(1), page_copies=(PageCopy(1, 40), PageCopy(2, 41))),
    ],
    "constraints": lambda: [entry(3, constraint=Anything()), decodes(3)],
    "log-probabilities": lambda: [entry(0, logprobs=2), decodes(0, num_steps=4)],
    "log-probabilities of the prompt": lambda: [entry(0, 20, prompt_logprobs=2)],
}


@pytest.mark.parametrize("name", PLANS)
def test_no_step_is_called_through_python(runner: ModelRunner, name: str) -> None:
    with slow_calls() as count:
        for plan in PLANS[name]():
            runner.execute(plan)
        assert count() == 0


def test_new_weights_keep_the_fast_path(runner: ModelRunner) -> None:
    leaves = runner.device.leaves_by_path
    runner.device.replace_leaves({path: np.asarray(leaf) for path, leaf in leaves.items()})
    with slow_calls() as count:
        for plan in PLANS["decodes and windows"]():
            runner.execute(plan)
        assert count() == 0


def test_a_slow_call_is_counted() -> None:
    """The tests above rely on this: the first call with arguments of one kind is slow, and later ones are
    not.
    """
    program = compile_program(lambda x: x + 1, jax.ShapeDtypeStruct((3,), np.float32))
    with slow_calls() as count:
        program(np.zeros(3, np.float32))
        assert count() == 1
        program(np.zeros(3, np.float32))
        assert count() == 1
        program(jax.device_put(np.zeros(3, np.float32), jax.devices()[0]))
        assert count() == 2


def test_log_probabilities_are_read_only_if_a_row_wants_them(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no row wants them, their array is never read: here it is deleted, so reading it fails."""

    def unreadable(pending: PendingStep) -> PendingStep:
        assert isinstance(pending, AwaitingTokens)
        pending.chosen.logprobs.delete()
        return pending

    pending = [runner.execute_async(entry(0)), runner.execute_async(decodes(0, num_steps=4))]
    plain = [runner.wait(unreadable(p)) for p in pending]
    assert [result.logprobs for result in plain] == [[()], [()]]
    wanted = [runner.execute(entry(0, logprobs=2)), runner.execute(decodes(0, num_steps=4))]
    assert [result.token_ids for result in wanted] == [result.token_ids for result in plain]
    assert [[len(token.top) for token in result.logprobs[0]] for result in wanted] == [[2], [2] * 4]
    assert runner.config.num_top == 20
    with pytest.raises(RuntimeError, match="deleted"):
        runner.wait(unreadable(runner.execute_async(entry(0, logprobs=2))))


def test_a_step_without_logprobs_reads_only_tokens(runner: ModelRunner) -> None:
    """Four bytes for each row and step are read back."""
    runner.execute(entry(0))
    pending = runner.execute_async(decodes(0, num_steps=4))
    assert isinstance(pending, AwaitingTokens)
    assert pending.chosen.tokens.shape == (4, 2)
    assert pending.chosen.logprobs.shape == (4, 2, 1 + 2 * 20)
    runner.wait(pending)


def spied(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Make a list that grows with each call that sends whole page tables: the slots of these tables."""
    calls: list[list[int]] = []
    programs = runner.calls.programs

    def table_rows(state: Any, packed: np.ndarray) -> Any:
        calls.append([int(slot) for slot in packed[:, 0] if slot < runner.config.max_num_seqs])
        return programs.table_rows(state, packed)

    spy = dataclasses.replace(programs, table_rows=cast("jax.stages.Compiled", table_rows))
    monkeypatch.setattr(runner.calls, "programs", spy)
    return calls


def with_pages(plan: Plan, *writes: PageWrite) -> Plan:
    return dataclasses.replace(plan, page_writes=writes)


def test_one_new_page_is_sent_in_the_step_and_several_in_a_whole_table_before_it(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = np.array(runner.device.rows.tables[0])
    calls = spied(runner, monkeypatch)
    runner.execute(with_pages(entry(0), PageWrite(0, 0, (9, 8))))
    runner.execute(with_pages(entry(2, 3), PageWrite(2, 0, (7,))))  # one page needs no table
    assert calls == [[0]]
    runner.execute(with_pages(decodes(2, 0, start=4), PageWrite(0, 2, (3,)), PageWrite(2, 1, (5,))))
    assert calls == [[0]]
    grown = decodes(0, 2, start=8, num_steps=4)
    runner.execute(with_pages(grown, PageWrite(0, 3, (1, 2)), PageWrite(2, 2, (6,))))
    assert calls == [[0], [0]]
    expected[0, :5], expected[2, :3] = [9, 8, 3, 1, 2], [7, 5, 6]
    np.testing.assert_array_equal(runner.device.rows.tables[0], expected)


def test_several_writes_of_a_slot_and_slots_without_a_row_are_all_sent(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = np.array(runner.device.rows.tables[0])
    calls = spied(runner, monkeypatch)
    writes = (PageWrite(1, 0, (4,)), PageWrite(1, 1, (6,)), PageWrite(3, 2, (11,)))
    runner.execute(with_pages(entry(1), *writes))
    assert calls == [[1, 3]]
    expected[1, :2], expected[3, 2] = [4, 6], 11
    np.testing.assert_array_equal(runner.device.rows.tables[0], expected)


def test_feature_slots_are_as_many_as_rows_unless_a_number_is_given(runner: ModelRunner) -> None:
    """A write past the last feature slot, which the device would drop without a word, is refused."""
    assert runner.device.rows.history.shape == runner.device.rows.bias.shape == (4, VOCAB)
    request = entry(0, sampling=PENALISED).new_requests[0][1]
    for given, last in ((None, 3), (2, 1)):
        slots = Slots(dataclasses.replace(runner.config, feature_slots=given))
        slots.admit(0, request, last)
        with pytest.raises(ConfigError, match=rf"feature slot {last + 1} of r0: the runner has {last + 1};"):
            slots.admit(0, request, last + 1)


def test_more_tables_than_one_call_takes(runner: ModelRunner) -> None:
    config = dataclasses.replace(runner.config, max_num_seqs=20, max_model_len=9)
    given = np.arange(20 * 3, dtype=np.int32).reshape(20, 3)
    slots = Slots(config)
    writes = tuple(PageWrite(slot, 0, tuple(map(int, row))) for slot, row in enumerate(given))
    parts = list(slots.table_rows(slots.write_pages(Plan(0, (), page_writes=writes))))
    assert [len(part) for part in parts] == [8, 8, 8]
    none = np.zeros(1, np.int32)
    state: Any = (none, (np.zeros((20, 3), np.int32),), none, none)
    for part in parts:
        state = jax.jit(make_table_rows())(RowState(*state), part)
    np.testing.assert_array_equal(state.tables[0], given)


def test_the_bytes_a_step_sends_do_not_grow_with_the_context(runner: ModelRunner) -> None:
    short, long = (
        Slots(dataclasses.replace(runner.config, max_model_len=n)).blank(ProgramKey(4, 4, True)).nbytes
        for n in (64, 131_072)
    )
    assert short == long < 1024


def test_the_host_never_holds_a_copy_of_what_is_allocated() -> None:
    """The cache and the state for sampling are zeros that the device makes."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    dtype = np.dtype(np.uint16)
    zeros((2,), dtype, sharding)  # compiles, which takes memory that does not matter here
    tracemalloc.start()
    make = zeros_maker((jax.ShapeDtypeStruct((2**18, 2, 1, 1, 2), dtype),) * 3, sharding)
    made = jax.block_until_ready(make())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert len({array.unsafe_buffer_pointer() for array in made}) == 3
    assert all(array.nbytes == 2**21 and array.dtype == dtype and not np.any(array) for array in made)
