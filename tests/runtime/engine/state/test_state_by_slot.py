"""Models that keep state by slot, as recurrent layers do, make the tokens that are computed by hand, whatever
happens to their rows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from penstock.runtime import Engine, building
from penstock.runtime.config import CPU_SIZES, EngineConfig, resolve
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend, mesh_of
from penstock.runtime.execution.buckets import Buckets
from penstock.runtime.execution.kv_sizing import (
    DEFAULT_CPU_KV_BYTES,
    KVPlan,
    plan_kv,
    prefix_cache_pages,
)
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.ops.cache_spec import CacheGroup, CacheSpec, PagedKV
from penstock.runtime.requests.request import Request, StoppingParams, outputs_of
from penstock.runtime.scheduling.plan import PageWrite, Plan, PlanRow, StepResult
from penstock.runtime.scheduling.scheduler_config import SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence as Output
from tests.support.collector import GREEDY, Collector, at_gate, long
from tests.support.models.hybrid import NEWEST, PAGED, STATE, hybrid_model, hybrid_tokens
from tests.support.models.toy import VOCAB, toy_engine, toy_runner
from tests.support.scheduler.proposing import Guesses, lies
from tests.support.scheduler.put_off import Anything, HalfPutOff
from tests.support.scheduler.scheduling import dispatch, make

pytestmark = pytest.mark.ci

LENGTHS = (1, 2, 3, 15, 16, 17, 40, 50)
"""Lengths of prompts; a step takes 16 tokens."""


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((11 * i + length) % VOCAB for i in range(length))


def accelerator() -> Backend:
    """Make a backend with programs as on an accelerator: one for each length of windows."""
    return Backend(mesh=mesh_of(jax.devices("cpu")[:1]), sizes=CPU_SIZES)


def proposing() -> Engine:
    """Make an engine for which tokens are proposed that may be right, wrong, or none."""
    rng = random.Random(9)

    def right(seq: Output, most: int) -> list[int]:
        made = seq.num_generated
        return hybrid_tokens(seq.request.prompt_token_ids, made + most)[made:]

    with mock.patch.object(building, "Lookup", return_value=Guesses(lies(rng, VOCAB, right), rng)):
        return toy_engine(hybrid_model(), decode_window_s=10.0, speculation="lookup", max_proposed_tokens=3)


@pytest.fixture(
    scope="module",
    params=[
        "windows",
        *(
            pytest.param(name, marks=pytest.mark.sweep(f"state: {name}"))
            for name in ("no overlap", "single steps", "as on an accelerator")  # the last has most programs
        ),
        "no layer has pages",
        "tokens are proposed",
    ],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = {
        "windows": lambda: toy_engine(hybrid_model(), decode_window_s=10.0),
        "no overlap": lambda: toy_engine(hybrid_model(), decode_window_s=10.0, overlap=False),
        "single steps": lambda: toy_engine(hybrid_model(), max_decode_steps=1),
        "as on an accelerator": lambda: toy_engine(
            hybrid_model(), backend=accelerator(), decode_window_s=10.0, kv_cache_bytes=1 << 16
        ),
        "no layer has pages": lambda: toy_engine(hybrid_model(paged=False), decode_window_s=10.0),
        "tokens are proposed": proposing,
    }
    engine = made[request.param]()
    yield engine
    assert engine.ready
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def expected(engine: Engine, request: Request) -> list[int]:
    """Return the tokens computed by hand, up to max_tokens or a stop id."""
    stopping = request.stopping
    assert stopping.max_tokens is not None
    tokens = hybrid_tokens(request.prompt_token_ids, stopping.max_tokens, paged=engine.info.name == "hybrid")
    ends = [i for i, token in enumerate(tokens) if token in stopping.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def run(engine: Engine, requests: Sequence[Request]) -> Collector:
    sink = Collector()
    for request in requests:
        engine.submit(request, sink)
    for request in requests:
        sink.last(request.request_id)
        assert sink.tokens(request.request_id) == expected(engine, request), request
    return sink


def test_tokens_are_the_formulas_alone_and_packed_in_chunks_and_windows(engine: Engine) -> None:
    requests = [Request(f"r{n}", prompt_of(n), GREEDY, long(5 + n)) for n in LENGTHS]
    for request in requests:
        run(engine, [dataclasses.replace(request, request_id="alone")])
    run(engine, requests)
    run(engine, requests)  # now in slots that other requests have used


def test_rows_that_end_in_a_window_leave_the_others_right(engine: Engine) -> None:
    """Some rows end at a stop id and some at max_tokens, while others in the same window go on."""
    requests = []
    for i in range(8):
        prompt = prompt_of(3 + i)
        stop = hybrid_tokens(prompt, 40, paged=engine.info.name == "hybrid")[5 + i]
        stopping = StoppingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,) if i % 2 else ())
        requests.append(Request(f"r{i}", prompt, GREEDY, dataclasses.replace(stopping, max_tokens=9 + 3 * i)))
    run(engine, requests)


def without_snapshots() -> Engine:
    """Make an engine with 24 pages: three requests of 32 tokens fill them."""
    page_bytes = PAGED.page_bytes(4, np.dtype(np.float32))
    return toy_engine(
        hybrid_model(), state_snapshots=0, kv_cache_bytes=24 * page_bytes + 4 * 16, decode_window_s=10.0
    )


def test_without_snapshots_every_output_computes_its_whole_prompt() -> None:
    """There is no prefix cache, because pages without the state are of no use, so forks compute their prompt
    too.
    """
    engine = without_snapshots()
    try:
        assert engine.config.prefix_cache_pages == 0
        request = Request("r", prompt_of(20), GREEDY, long(12))
        outputs = outputs_of(request, 3)
        gate, sink = at_gate(engine, tokens=1), Collector()
        for output in outputs:
            engine.submit(output, sink)
        gate.open()
        for output in outputs:
            timing = sink.last(output.request_id).timing
            assert sink.tokens(output.request_id) == expected(engine, request)
            assert timing is not None
            assert timing.cached_prompt_tokens == 0
    finally:
        engine.shutdown()


def test_a_preempted_request_computes_its_state_again() -> None:
    """The pool holds about half of the pages that four requests grow to."""
    engine = without_snapshots()
    try:
        assert engine.info.num_pages == 24
        requests = [Request(f"r{i}", prompt_of(4 + i), GREEDY, long(40)) for i in range(4)]
        sink = run(engine, requests)
        timings = [sink.last(request.request_id).timing for request in requests]
        assert sum(timing.preemptions for timing in timings if timing is not None) > 0
    finally:
        engine.shutdown()


def test_an_update_may_recompute_all_state() -> None:
    engine = toy_engine(hybrid_model())
    try:
        same = {"one": np.ones((1,), np.float32)}
        gate = at_gate(engine, tokens=40)
        done = engine.update_weights(same, label="same", in_flight=InFlightPolicy.RECOMPUTE)
        gate.open()
        done.result(60)
        gate.sink.last("held")
        assert gate.sink.tokens("held") == hybrid_tokens((1,), 40)
    finally:
        engine.shutdown()


def test_a_token_that_is_put_off_is_still_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """About half of the masks are not ready in time, for decodes as well as for last chunks of prompts."""
    put_off = HalfPutOff(monkeypatch)
    engine = toy_engine(hybrid_model(), decode_window_s=10.0)
    try:
        requests = [Request(f"r{n}", prompt_of(n), GREEDY, long(12)) for n in LENGTHS]
        constrained = [
            dataclasses.replace(request, constraint=Anything() if i % 3 else None)
            for i, request in enumerate(requests)
        ]
        run(engine, constrained)
        assert put_off.num_skipped > 10
    finally:
        engine.shutdown()


# -- positions that are computed again --


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with toy_runner(hybrid_model(), Buckets((16,), (4,))) as runner:
        yield runner


def step(
    runner: ModelRunner, slot: int, tokens: Sequence[int], start: int, end: int, *, enter: bool = False
) -> int:
    """Compute positions `start` to `end` of a row. Returns the token that is sampled after them."""
    request = Request(f"r{slot}", tuple(tokens), GREEDY, StoppingParams(ignore_eos=True))
    row = PlanRow(request.request_id, slot, start, end - start, tuple(tokens[start:end]), True)
    entered = ((slot, request),) if enter else ()
    pages = (PageWrite(slot, 0, tuple(range(16 * slot, 16 * slot + 16))),) if enter else ()
    result = runner.execute(Plan(0, (row,), new_requests=entered, page_writes=pages))
    return result.token_ids[0][0]


def test_a_repeated_step_begins_with_the_state_before_it(runner: ModelRunner) -> None:
    """Steps are repeated when a token is put off: here a first chunk, a later chunk and decodes, each twice
    or three times.
    """
    tokens = list(prompt_of(10))
    tokens += hybrid_tokens(tokens, 3)
    for slot in (2, 3, 2):
        first = True
        for start, end in [
            (0, 4),
            (0, 4),
            (4, 9),
            (4, 9),
            (4, 9),
            (9, 10),
            (9, 10),
            (10, 11),
            (10, 11),
            (11, 12),
        ]:
            sampled = step(runner, slot, tokens, start, end, enter=first)
            assert sampled == hybrid_tokens(tokens[:end], 1)[0], (start, end)
            first = False


def test_a_request_in_a_used_slot_begins_without_state(runner: ModelRunner) -> None:
    """This must hold even if its first chunk ends at the position up to which the slot's old state was
    computed.
    """
    old, new = list(prompt_of(12)), list(prompt_of(14))
    for end in (5, 6, 7):
        step(runner, 1, old, 0, 5, enter=True)
        step(runner, 1, old, 5, 6)
        step(runner, 1, old, 6, 7)
        assert step(runner, 1, new, 0, end, enter=True) == hybrid_tokens(new[:end], 1)[0]
        assert step(runner, 1, new, end, end + 1) == hybrid_tokens(new[: end + 1], 1)[0]
        assert step(runner, 1, new, end + 1, end + 2) == hybrid_tokens(new[: end + 2], 1)[0]


@pytest.mark.parametrize(("has_state", "start"), [(False, 5), (True, 0)])
def test_a_row_that_is_put_off_computes_its_last_step_again(has_state: bool, start: int) -> None:
    """With state it computes all of the step, because the state within it is not kept; otherwise only the
    last token.
    """
    scheduler = make(has_state=has_state)
    scheduler.add(Request("a", tuple(range(6)), stopping=StoppingParams(max_tokens=5)), 1)
    plan = dispatch(scheduler)
    assert (plan.rows[0].start, plan.rows[0].num_tokens) == (0, 6)
    scheduler.put_off(plan, [0], [])
    scheduler.commit(plan, StepResult([()], [()]), 3)
    again = dispatch(scheduler).rows[0]
    assert (again.start, again.start + again.num_tokens, again.samples) == (start, 6, True)


# -- sizes --


def test_memory_is_summed_over_layers_by_hand() -> None:
    """A page holds keys and values of 4 positions, of 4 numbers each. A slot holds two copies of 4 bytes for
    each layer with state.
    """
    cache = CacheSpec((STATE, PAGED, NEWEST, PAGED))
    assert cache.page_bytes(4, np.dtype(np.float32)) == 2 * (2 * 4 * 4 * 4)
    assert cache.page_bytes(4, np.dtype(np.float16)) == 2 * (2 * 4 * 4 * 2)
    assert cache.slot_bytes == 2 * 4 + 2 * 4
    arrays = cache.arrays((7,), 4, 3, np.dtype(np.float32))
    assert [leaf.shape for leaf in jax.tree.leaves(arrays)] == [
        (6,),
        (7, 2, 1, 4, 4),
        (6, 1),
        (7, 2, 1, 4, 4),
    ]
    sizes = [int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays)]
    assert sum(sizes) == 7 * cache.page_bytes(4, np.dtype(np.float32)) + 3 * cache.slot_bytes


def test_layers_with_equal_windows_are_a_group() -> None:
    full, near, far = (PagedKV(1, 4, window) for window in (None, 8, 64))
    for layers, windows, group_of in (
        ((near, far, near), (64, 8), (1, 0, 1)),
        ((near, STATE), (8,), (0, 0)),
        ((near, full, far, full), (None, 64, 8), (2, 0, 1, 0)),
        ((STATE,), (None,), (0,)),
    ):
        assert (CacheSpec(layers).windows, CacheSpec(layers).group_of) == (windows, group_of)


def test_state_is_a_part_of_the_budget() -> None:
    config = resolve(EngineConfig(max_num_seqs=2, page_size=16, kv_cache_bytes=1000), CPU_SIZES)
    sizes: dict[str, Any] = {"model_max_len": 64, "device_bytes": None}
    assert plan_kv(config, groups=(CacheGroup(None, 100),), state_bytes=350, **sizes) == KVPlan((6,), 64)
    assert plan_kv(config, groups=(CacheGroup(None, 0),), state_bytes=350, **sizes) == KVPlan(
        (8,), 64
    )  # pages without memory
    for page_bytes in (0, 100):
        with pytest.raises(ConfigError, match=r"kv_cache_bytes: 1000 .* 1001 of state for 2 requests"):
            plan_kv(config, groups=(CacheGroup(None, page_bytes),), state_bytes=1001, **sizes)


def test_snapshots_are_a_part_of_the_budget() -> None:
    """Of 1,000 bytes the state takes 350. Snapshots of 100 bytes take half of the rest, which makes 3, but
    not what a context needs that was asked for.
    """
    options = EngineConfig(max_num_seqs=8, page_size=16, kv_cache_bytes=1000)
    given: dict[str, Any] = {
        "model_max_len": 64,
        "device_bytes": None,
        "groups": (CacheGroup(None, 50),),
        "state_bytes": 350,
        "snapshot_bytes": 100,
    }

    def plan(**changes: Any) -> KVPlan:
        return plan_kv(resolve(dataclasses.replace(options, **changes), CPU_SIZES), **given)

    assert plan() == KVPlan(((650 - 300) // 50,), 64, 3)
    assert plan(state_snapshots=6) == KVPlan((1,), 17, 6)
    assert plan(state_snapshots=0) == KVPlan((13,), 64, 0)
    assert plan(max_num_seqs=1, max_num_batched_tokens=64) == KVPlan((11,), 64, 1)
    assert plan(max_model_len=64) == KVPlan(((650 - 200) // 50,), 64, 2)  # (650 - 4 * 50) / 2 / 100
    with pytest.raises(ConfigError, match=r"max_model_len: 64 tokens need 1150 bytes .* is 1000"):
        plan(max_model_len=64, state_snapshots=6)
    with pytest.raises(ConfigError, match=r"1050 of state for 8 requests and 7 snapshots"):
        plan(state_snapshots=7)
    # By default the state comes on top of what is for pages.
    unbounded = plan_kv(
        resolve(dataclasses.replace(options, kv_cache_bytes=None), CPU_SIZES),
        **(given | {"state_bytes": 2 * DEFAULT_CPU_KV_BYTES}),
    )
    assert unbounded == KVPlan((8 * 4,), 64, 8)


def test_there_is_no_prefix_cache_if_there_is_state_without_snapshots() -> None:
    assert prefix_cache_pages(EngineConfig(), has_state=True, num_snapshots=0) == 0
    assert prefix_cache_pages(EngineConfig(), has_state=True, num_snapshots=1) is None
    assert prefix_cache_pages(EngineConfig(prefix_cache_pages=7), has_state=False, num_snapshots=0) == 7
    with pytest.raises(ConfigError, match=r"prefix_cache_pages: must be 0 or left out, not 7"):
        toy_engine(hybrid_model(), start=False, prefix_cache_pages=7, state_snapshots=0)
    with pytest.raises(ConfigError, match=r"state_snapshots: must be 0 or left out, not 7"):
        toy_engine(start=False, state_snapshots=7)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: must be auto or left out, not int8"):
        toy_engine(hybrid_model(paged=False), start=False, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="prefix_cache_pages must be 0 with has_state and without num_sna"):
        SchedulerConfig(
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=8,
            page_size=4,
            num_pages=4,
            eos_token_ids=frozenset(),
            max_queued_requests=1,
            has_state=True,
        )
