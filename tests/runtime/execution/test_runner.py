"""The runner: donated buffers, packing, poisoned pages, state and weights, and the number of compiles and
transfers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import starmap
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.buckets import Buckets, ProgramKey
from penstock.runtime.execution.compilation import CompileCounter, compile_program, use_compilation_cache
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.request_programs import make_page_copies, pack_page_copies
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_buffer import (
    BANS,
    FEEDBACK,
    FLAGS,
    MAX_SAMPLES,
    NUM_FIELDS,
    NUM_STEPS,
    PAGE,
    PAGE_INDEX,
    PARAM_FIELDS,
    SLOT,
    Layout,
    pack_params,
)
from penstock.runtime.execution.text_guesses import TextTables, text_tables
from penstock.runtime.ops.cache_spec import CacheSpec, PagedKV
from penstock.runtime.ops.sampling_codes import LOGPROBS, PENALTIES, SAMPLING
from penstock.runtime.requests.request import MAX_STOP_TOKEN_IDS, Request, StoppingParams
from penstock.runtime.requests.sampling import FLOATS, INTS, ResolvedSampling
from penstock.runtime.scheduling.plan import PageCopy, PageWrite, Plan, PlanRow
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.toy import OFFSET, VOCAB, ToyLM, toy_backend, toy_model, toy_tokens
from tests.support.scheduler.put_off import Anything
from tests.support.suite import programs

GREEDY = ResolvedSampling(temperature=0.0)


def make_runner(
    max_decode_steps: int = 8, window_steps: tuple[int, ...] = (0,), row_buckets: tuple[int, ...] = (4, 8)
) -> ModelRunner:
    use_compilation_cache(TEST_CACHE)
    model = toy_model()
    config = RunnerConfig(
        buckets=Buckets((16,), row_buckets, window_steps),
        max_num_seqs=4,
        max_model_len=64,
        page_size=4,
        dtype=np.dtype(np.float32),
        kv_dtype=np.dtype(np.float32),
        vocab_size=VOCAB,
        eos_token_ids=(60,),
        max_decode_steps=max_decode_steps,
        show_progress=False,
    )
    device = DeviceState(model.graphdef, model.weights, model.cache, config, toy_backend())
    return ModelRunner(device, config)


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    runner = make_runner()
    runner.initialize_kv_cache((16,))
    runner.compile()
    yield runner
    runner.shutdown()


@pytest.mark.ci
def test_a_start_traces_the_model_once_for_each_program_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for the shape of its hidden states. A real model takes a tenth of a second and more."""
    sizes: list[int] = []
    compute = ToyLM.__call__

    def traced(model: ToyLM, token_ids: jax.Array, *others: Any, **options: Any) -> Any:
        sizes.append(token_ids.shape[0])
        return compute(model, token_ids, *others, **options)

    monkeypatch.setattr(ToyLM, "__call__", traced)
    programs.forget_programs()
    runner = make_runner()
    runner.initialize_kv_cache((16,))
    runner.compile()
    tokens = [key.tokens for key in runner.config.buckets.keys()]  # noqa: SIM118 # no mapping
    assert sorted(sizes) == sorted([*tokens, max(tokens)])
    runner.shutdown()


def text_of(length: int) -> TextTables:
    """Return a text by which windows guess, as a device has it."""
    return TextTables(*map(jax.device_put, text_tables(np.arange(length, dtype=np.int32), 2)))


@pytest.mark.ci
def test_the_suites_runners_share_programs_only_if_they_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_runner()
    first.initialize_kv_cache((16,))
    first.compile()
    compiled_for = programs.compiled_for(first.device.builder((16,)))
    programs_of_first = first.calls.programs
    first.shutdown()
    second = make_runner()
    second.initialize_kv_cache((16,))
    second.compile()
    assert second.calls.programs is programs_of_first
    for other in (
        second.device.builder((12,)),
        make_runner(max_decode_steps=4).device.builder((16,)),
        dataclasses.replace(second.device.builder((16,)), backend=toy_backend(EngineConfig(native="off"))),
        dataclasses.replace(second.device.builder((16,)), text=text_of(9)),
    ):
        assert programs.compiled_for(other) != compiled_for
    monkeypatch.setattr(jax.ffi, "ffi_call", print)
    assert programs.compiled_for(second.device.builder((16,))) != compiled_for
    second.shutdown()


@pytest.mark.ci
def test_each_donated_array_becomes_its_own_successor() -> None:
    """JAX gives the memory of a donated array to the first result of its shape and dtype. If that is another
    one, both are copied in every step: here the logits of four rows and the biases of four slots are alike.
    """
    runner = make_runner(max_decode_steps=4, row_buckets=(4,))
    runner.initialize_kv_cache((16,))
    builder = runner.device.builder((16,))
    keys = runner.config.buckets.keys()
    states = len(jax.tree.leaves(builder.state))
    both = len(jax.tree.leaves((builder.kv, builder.state)))
    steps = [builder.window(key) if key.window else builder.forward(key) for key in keys]
    assert builder.state.bias.shape == (4, VOCAB), "logits and biases are to be alike"
    choices = [(builder.choice(4), states), (builder.checked_choice(4), states)]
    for program, donated in [*((step, both) for step in steps), *choices]:
        header = (program.as_text() or "").split("\n", 1)[0]
        pairs = [(int(to), int(of)) for to, of in re.findall(r"\{(\d+)\}: \((\d+), \{\}", header)]
        assert [to for to, _ in pairs] == [*range(donated)]
        assert [of - pairs[0][1] for _, of in pairs] == [*range(donated)]
    runner.shutdown()


def prefill(prompt: list[int], slot: int, pages: list[int], step: int = 0) -> Plan:
    request = Request(f"r{slot}", tuple(prompt), GREEDY, StoppingParams(ignore_eos=True))
    row = PlanRow(request.request_id, slot, 0, len(prompt), tuple(prompt), True)
    return Plan(
        step,
        (row,),
        new_requests=((slot, request),),
        page_writes=(PageWrite(slot, 0, tuple(pages)),),
    )


def decode(slot: int, start: int, step: int = 1) -> Plan:
    return Plan(step, (PlanRow(f"r{slot}", slot, start, 1, None, True),))


def test_feedback_stays_on_the_device(runner: ModelRunner) -> None:
    """Two decodes are dispatched before the first token is read, and take their input tokens from the
    device.
    """
    pending = [
        runner.execute_async(plan)
        for plan in (prefill([1, 2, 3], 2, [7, 9]), decode(2, 3), decode(2, 4, step=2))
    ]
    assert [runner.wait(p).token_ids[0] for p in pending] == [[t] for t in toy_tokens([1, 2, 3], 3)]


def test_decodes_under_a_constraint_compute_no_more_rows_than_others(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They must not run the program of steps with prefill chunks, which has the most rows."""
    keys: list[ProgramKey] = []
    run = runner.calls.forward

    def recorded(key: ProgramKey, packed: NDArray[np.int32], **named: bool) -> tuple[jax.Array, jax.Array]:
        keys.append(key)
        return run(key, packed, **named)

    monkeypatch.setattr(runner.calls, "forward", recorded)
    plan = prefill([1, 2, 3], 2, [7, 9])
    request = dataclasses.replace(plan.new_requests[0][1], constraint=Anything())
    plan = dataclasses.replace(plan, new_requests=((2, request),))
    results = [runner.execute(plan).token_ids[0] for plan in (plan, decode(2, 3), decode(2, 4, step=2))]
    assert results == [[token] for token in toy_tokens([1, 2, 3], 3)]
    assert keys == [ProgramKey(16, 8), *[ProgramKey(4, 4, decode_only=True)] * 2]


@pytest.fixture(
    params=[(0,), pytest.param((1, 2, 4, 8), marks=pytest.mark.sweep)],
    ids=["as long as it takes", "of fixed lengths"],
)
def looping(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """Runners with both kinds of windows."""
    runner = make_runner(window_steps=request.param)
    runner.initialize_kv_cache((16,))
    runner.compile()
    yield runner
    runner.shutdown()


def windowed(rows: list[tuple[int, int, int, int]], num_steps: int, step: int = 1) -> Plan:
    """Make a plan of rows (slot, start, max_samples, bans) that decode."""
    made = [PlanRow(f"r{slot}", slot, start, 1, None, True, bans, most) for slot, start, most, bans in rows]
    return Plan(step, tuple(made), num_steps=num_steps)


def test_a_window_makes_what_single_steps_make(looping: ModelRunner) -> None:
    """Each row ends at its own number of samples and the loop at its number of steps, and the next plan goes
    on from there.
    """
    first, second = toy_tokens([1, 2, 3], 13), toy_tokens([5], 13)
    looping.execute(prefill([1, 2, 3], 2, [7, 9, 1, 3]))
    looping.execute(prefill([5], 0, [2, 4, 6, 8], 1))
    pending = [
        looping.execute_async(windowed([(2, 3, 5, 0), (0, 1, 2, 0)], 5, 2)),  # the second row ends early
        looping.execute_async(windowed([(0, 3, 3, 0), (2, 8, 1, 0)], 3, 3)),  # the rows in another order
        looping.execute_async(windowed([(2, 9, 1, 0)], 1, 4)),
    ]
    results = [looping.wait(p).token_ids for p in pending]
    assert results == [[first[1:6], second[1:3]], [second[3:6], first[6:7]], [first[7:8]]]


def test_steps_past_a_window_that_was_asked_for_change_nothing(looping: ModelRunner) -> None:
    """A window of three steps may run as one of four. Its rows must still make three tokens and write three
    positions, although they could go on.
    """
    tokens, others = toy_tokens([3, 2, 4], 8), toy_tokens([5], 8)
    assert all(tokens[:3] + others[:3])  # a position to which a 0 is written would look unchanged
    looping.execute(prefill([3, 2, 4], 2, [7, 9, 1]))
    looping.execute(prefill([5], 0, [2, 4, 6], 1))
    before = np.array(looping.device.kv[0])
    result = looping.execute(windowed([(2, 3, 3, 0), (0, 1, 3, 0)], 3, 2))
    assert result.token_ids == [tokens[1:4], others[1:4]]
    written = np.argwhere((np.array(looping.device.kv[0]) != before).any(axis=(1, 2, 4)))
    assert written.tolist() == [[2, 1], [2, 2], [2, 3], [7, 3], [9, 0], [9, 1]]
    result = looping.execute(windowed([(0, 4, 1, 0), (2, 6, 1, 0)], 1, 3))
    assert result.token_ids == [others[4:5], tokens[4:5]]


def test_a_window_ends_rows_at_stop_ids_unless_banned(looping: ModelRunner) -> None:
    tokens = toy_tokens([1, 2, 3], 8)
    stop = tokens[3]
    assert stop not in tokens[:3]
    plan = prefill([1, 2, 3], 1, [5, 6, 7])
    request = dataclasses.replace(
        plan.new_requests[0][1], stopping=StoppingParams(ignore_eos=True, stop_token_ids=(stop,))
    )
    looping.execute(dataclasses.replace(plan, new_requests=((1, request),)))
    result = looping.execute(windowed([(1, 3, 8, 0)], 8))
    assert result.token_ids == [tokens[1:4]]
    # The same with the first three samples banned: another token is chosen in place of the stop id.
    looping.execute(dataclasses.replace(plan, new_requests=((1, request),)))
    banned = looping.execute(windowed([(1, 3, 8, 3)], 8)).token_ids[0]
    assert banned[:2] == tokens[1:3]
    assert banned[2] != stop
    assert len(banned) > 3


def test_logprobs_are_those_asked_for_at_dispatch(runner: ModelRunner) -> None:
    """Before the first result is read, the slot goes to requests that ask for other numbers of
    log-probabilities.
    """
    plans = []
    for wanted, step in ((2, 0), (None, 1), (0, 2)):
        plan = prefill([1, 2, 3], 2, [7, 9], step)
        request = dataclasses.replace(plan.new_requests[0][1], logprobs=wanted)
        plans.append(dataclasses.replace(plan, new_requests=((2, request),)))
    pending = [runner.execute_async(plan) for plan in plans]
    two, none, only_sampled = (runner.wait(p).logprobs[0] for p in pending)
    assert [len(token.top) for token in two] == [2]
    assert none == ()
    assert [len(token.top) for token in only_sampled] == [0]


def test_cache_and_state_are_really_donated(runner: ModelRunner) -> None:
    """The old buffers are deleted and the cache stays at its address, so no step copies it. The weights are
    not donated.
    """
    before, state = runner.device.kv, runner.device.rows
    assert before is not None
    pointer = before[0].unsafe_buffer_pointer()
    runner.execute(prefill([1], 0, [0]))
    assert all(layer.is_deleted() for layer in before)
    assert state.tokens.is_deleted()
    assert runner.device.kv[0].unsafe_buffer_pointer() == pointer
    assert not runner.device.leaves[0].is_deleted()


def test_padding_writes_nowhere_and_reads_nothing(runner: ModelRunner) -> None:
    """Although all pages are full of NaN, a step makes the right token, and it writes only the positions of
    its own row.
    """
    shape = runner.device.kv[0].shape
    poison = np.full(shape, np.nan, np.float32)
    runner.device.kv = (jax.device_put(poison, runner.device.kv[0].sharding),)
    result = runner.execute(prefill([5, 6, 7, 8, 9], 1, [3, 11]))
    assert list(result.token_ids[0]) == toy_tokens([5, 6, 7, 8, 9], 1)
    cache = np.asarray(runner.device.kv[0])
    finite = {(int(p), int(o)) for p, o in zip(*np.nonzero(np.isfinite(cache[:, 1, 0, :, 0])), strict=True)}
    assert finite == {(3, 0), (3, 1), (3, 2), (3, 3), (11, 0)}


def test_pages_are_copied_in_all_layers_in_place_and_padding_copies_nothing() -> None:
    kv = tuple(jax.random.normal(jax.random.key(i), (5, 2, 1, 4, 3)) for i in range(3))
    before = [np.array(layer) for layer in kv]
    pointers = [layer.unsafe_buffer_pointer() for layer in kv]
    program = compile_program(
        make_page_copies(CacheSpec((PagedKV(1, 3),) * 3)), kv, pack_page_copies((), 4, (5,)), donate=(0,)
    )
    for copies in [(), ((4, 0), (2, 1)), ((0, 3),), ((1, 4), (1, 2), (1, 0), (1, 3))]:
        kv = program(kv, pack_page_copies(tuple(starmap(PageCopy, copies)), 4, (5,)))
        for layer in before:
            layer[[to for _, to in copies]] = layer[[at for at, _ in copies]]
        for layer, expected in zip(kv, before, strict=True):
            np.testing.assert_array_equal(layer, expected)
    assert [layer.unsafe_buffer_pointer() for layer in kv] == pointers


def test_a_fork_goes_on_from_a_copy_and_the_first_one_from_its_own_page(runner: ModelRunner) -> None:
    """In the step of the copy, the fork writes position 6 in the copied page. Positions 4 and 5 of that page
    come from the copy alone. The first output goes on in its own page.
    """
    counter = CompileCounter()
    counter.start()
    prompt = [1, 2, 3, 4, 5, 6, 7]
    tokens = toy_tokens(prompt, 3)
    pointer = runner.device.kv[0].unsafe_buffer_pointer()
    pending = [runner.execute_async(prefill(prompt, 0, [3, 5]))]
    fork = Request("r2", tuple(prompt), GREEDY, StoppingParams(ignore_eos=True), fork_of="r0")
    rows = (PlanRow("r0", 0, 7, 1, None, True), PlanRow("r2", 2, 6, 1, (7,), True))
    writes = (PageWrite(2, 0, (3, 8)),)
    copies = (PageCopy(5, 8),)
    plan = Plan(1, rows, new_requests=((2, fork),), page_writes=writes, page_copies=copies)
    pending.append(runner.execute_async(plan))
    pending.append(runner.execute_async(Plan(2, (PlanRow("r2", 2, 7, 1, None, True),))))
    made = [runner.wait(p).token_ids for p in pending]
    assert made == [[tokens[:1]], [tokens[1:2], tokens[:1]], [tokens[1:2]]]
    assert runner.device.kv[0].unsafe_buffer_pointer() == pointer
    counter.stop()
    assert counter.count == 0


def test_destroying_the_cache_frees_it_and_it_can_come_back(runner: ModelRunner) -> None:
    layer = runner.device.kv[0]
    runner.device.free_cache()
    assert layer.is_deleted()
    with pytest.raises(ConfigError, match="not initialised"):
        runner.execute(prefill([1], 0, [0]))
    runner.initialize_kv_cache((16,))
    assert list(runner.execute(prefill([1], 0, [0])).token_ids[0]) == toy_tokens([1], 1)


def test_order_of_setup_is_checked() -> None:
    runner = make_runner()
    with pytest.raises(ConfigError, match="before compile"):
        runner.compile()
    with pytest.raises(ConfigError, match="at least one page"):
        runner.initialize_kv_cache((0,))


def test_new_weights_serve_without_a_compile(runner: ModelRunner) -> None:
    counter = CompileCounter()
    counter.start()
    runner.device.replace_leaves({("offset",): np.full((1,), OFFSET + 6, np.float32)})
    assert list(runner.execute(prefill([1], 0, [0])).token_ids[0]) == toy_tokens([1], 1, offset=OFFSET + 6)
    with pytest.raises(ConfigError, match=r"float32\(2,\)"):
        runner.device.replace_leaves({("offset",): np.zeros((2,), np.float32)})
    with pytest.raises(ConfigError, match="no leaf"):
        runner.device.replace_leaves({("onset",): np.zeros((1,), np.float32)})
    assert list(runner.execute(prefill([1], 0, [0])).token_ids[0]) == toy_tokens([1], 1, offset=OFFSET + 6)
    counter.stop()
    assert counter.count == 0


def test_the_counter_counts() -> None:
    counter = CompileCounter()
    counter.start()
    jax.jit(lambda x: x * 3 + counter.count)(np.float32(1)).block_until_ready()
    counter.stop()
    assert counter.count == 1
    jax.jit(lambda x: x * 5)(np.float32(1)).block_until_ready()
    assert counter.count == 1


def test_layout_round_trip() -> None:
    """The programs read what the host writes through views; floats and 64-bit seeds keep their bits."""
    layout = Layout(ProgramKey(8, 4))
    buffer = np.zeros(layout.size, np.int32)
    assert layout.size == 2 + 8 + 4 * (NUM_FIELDS + MAX_STOP_TOKEN_IDS)
    header, fields, stop_ids, packed_tokens = layout.views(buffer)
    header[FLAGS], header[NUM_STEPS] = 9, 5
    packed_tokens[:] = range(8)
    packed_tokens[7] = FEEDBACK
    fields[:, SLOT] = [3, 1, 2, 0]
    params = ResolvedSampling(
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        min_p=0.05,
        seed=(7 << 32) | 0xFFFFFFFE,
        presence_penalty=0.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
    )
    fields[1, -PARAM_FIELDS:] = pack_params(Request("r", (1,), params, logprobs=4), 3)
    stop_ids[2, 5] = 44
    fields[:, MAX_SAMPLES], fields[:, BANS] = [1, 5, 0, 2], [0, 3, 0, 2]
    fields[:, PAGE_INDEX], fields[:, PAGE] = [7, 7, 2, 7], [0, 0, 9, 0]
    out, tokens = jax.jit(lambda b: (layout.unpack_rows(b), layout.unpack_tokens(b)))(buffer)
    alone = jax.jit(layout.unpack_rows)(buffer[: layout.rows_size])
    jax.tree.map(np.testing.assert_array_equal, alone, out)
    assert int(out.flags) == 9
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    rows = out.sampling
    assert rows.slots.tolist() == [3, 1, 2, 0]
    assert rows.features[1] == PENALTIES | SAMPLING | LOGPROBS
    assert rows.num_logprobs[1] == 4
    assert rows.feature_slots[1] == 3
    for name in (*INTS, *FLOATS):
        value = rows.number(name)[1]
        assert value == np.asarray(getattr(params, name), value.dtype), name
    assert rows.seed[1].tolist() == [7, 0xFFFFFFFE]
    assert rows.banned.tolist() == [False, True, False, True]
    assert int(out.num_steps) == 5
    assert out.max_samples.tolist() == [1, 5, 0, 2]
    assert out.bans.tolist() == [0, 3, 0, 2]
    assert rows.stop_ids[2, 5] == 44
    assert (out.page_indices.tolist(), out.pages[0].tolist()) == ([7, 7, 2, 7], [0, 0, 9, 0])


def test_a_small_value_does_not_become_0_which_means_off() -> None:
    """1e-46 is 0 in float32 and 1e-40 is denormal. The device would take both for 0, which means greedy, or
    switches a filter off.
    """
    layout = Layout(ProgramKey(8, 4))
    buffer = np.zeros(layout.size, np.int32)
    _, fields, _, _ = layout.views(buffer)
    for row, value in enumerate((1e-46, 1e-40, 5e-324, 0.0)):
        params = ResolvedSampling(temperature=value, top_p=value or 1.0, min_p=value)
        fields[row, -PARAM_FIELDS:] = pack_params(Request("r", (1,), params))
    rows = layout.unpack_rows(jax.numpy.asarray(buffer)).sampling
    for name in ("temperature", "top_p", "min_p"):
        column = rows.number(name)
        assert (column[:3] > 0).tolist() == [True] * 3, name
    assert [float(rows.number(name)[3]) for name in ("temperature", "top_p", "min_p")] == [0.0, 1.0, 0.0]


def test_too_many_eos_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="eos_token_ids"):
        RunnerConfig(
            buckets=Buckets((16,), (4,)),
            max_num_seqs=4,
            max_model_len=64,
            page_size=4,
            dtype=np.dtype(np.float32),
            kv_dtype=np.dtype(np.float32),
            vocab_size=99,
            eos_token_ids=tuple(range(32)),
        )
