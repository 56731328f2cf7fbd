"""Engine, core and runner on the toy model, whose tokens can be computed by hand
(tests/support/models/toy.py).
"""

from __future__ import annotations

import dataclasses
import queue
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from penstock.runtime import Engine, SamplingParams, StoppingParams
from penstock.runtime.errors import (
    Draining,
    DuplicateRequestId,
    EngineFailure,
    InvalidRequest,
    NotReady,
    PromptTooLong,
    QueueFull,
    TensorsRefused,
)
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.loading.served_model import ServedModel
from penstock.runtime.loop.interface import AbortOutcome, InFlightPolicy, StepRecord, WeightsVersion
from penstock.runtime.requests.request import Finish, FinishReason, Request, StepOutput
from tests.support.collector import GREEDY, GREEDY_PARAMS, Collector, at_gate, long, submit
from tests.support.models.toy import EOS, VOCAB, ToyLM, plain_rules, toy_engine, toy_model, toy_tokens


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = toy_engine()
    yield engine
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


@pytest.mark.parametrize("prompt", [[1], [5, 6, 7], list(range(40)), [2] * 97])
def test_greedy_tokens_are_the_hand_computed_ones(engine: Engine, prompt: list[int]) -> None:
    """The prompts fit in one page, span several pages, or need several chunks of the budget of 16 tokens."""
    result = engine.generate(prompt, sampling=GREEDY_PARAMS, stopping=long(30))
    assert list(result.token_ids) == toy_tokens(prompt, 30)
    assert result.finish == Finish(FinishReason.MAX_TOKENS)


def test_requests_in_one_batch_get_the_tokens_they_get_alone(engine: Engine) -> None:
    """24 requests of different lengths share 4 rows."""
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + 5 * (i % 9))] for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        results = list(
            pool.map(lambda p: engine.generate(p, sampling=GREEDY_PARAMS, stopping=long(20)), prompts)
        )
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == toy_tokens(prompt, 20)


@pytest.mark.ci
def test_preempted_and_resumed_equals_undisturbed() -> None:
    """Four rows that each grow to 40 tokens share 12 pages of 4 tokens, so most of them are preempted several
    times.
    """
    engine = toy_engine(toy_model(max_model_len=44), kv_cache_bytes=12 * 4 * 2 * 4 * 4)
    try:
        assert engine.info.num_pages == 12
        with ThreadPoolExecutor(8) as pool:
            results = list(
                pool.map(
                    lambda i: engine.generate([i] * 10, sampling=GREEDY_PARAMS, stopping=long(30)), range(8)
                )
            )
        for i, result in enumerate(results):
            assert list(result.token_ids) == toy_tokens([i] * 10, 30)
        assert sum(r.timing.preemptions for r in results) > 0
        assert engine.load().pages_used == 0
        assert engine.compiles_after_warmup == 0
    finally:
        engine.shutdown()


def test_eos_ends_and_ignore_eos_goes_on(engine: Engine) -> None:
    prompt = next(
        p for p in ([a, b] for a in range(VOCAB) for b in range(VOCAB)) if EOS in toy_tokens(p, 12)[3:]
    )
    expected = toy_tokens(prompt, 12)
    until = expected.index(EOS) + 1
    result = engine.generate(prompt, sampling=GREEDY_PARAMS)
    assert list(result.token_ids) == expected[:until]
    assert result.finish == Finish(FinishReason.EOS, token_id=EOS)
    assert list(engine.generate(prompt, sampling=GREEDY_PARAMS, stopping=long(12)).token_ids) == expected


def test_min_tokens_masks_eos_and_stop_ids_until_reached(engine: Engine) -> None:
    """The toy model gives its next token the logit 10 and all others 0. If that token is masked, greedy
    sampling takes token 0.
    """
    prompt = [3, 4]
    first = toy_tokens(prompt, 1)[0]
    stop = StoppingParams(max_tokens=8, stop_token_ids=(first,), ignore_eos=True)
    result = engine.generate(prompt, sampling=GREEDY_PARAMS, stopping=stop)
    assert result.token_ids == ()  # the stop token is left out unless `include_stop`
    assert result.finish == Finish(FinishReason.STOP, token_id=first)
    kept = dataclasses.replace(stop, include_stop=True)
    assert engine.generate(prompt, sampling=GREEDY_PARAMS, stopping=kept).token_ids == (first,)
    held = StoppingParams(max_tokens=8, min_tokens=1, stop_token_ids=(first,), ignore_eos=True)
    tokens = list(engine.generate(prompt, sampling=GREEDY_PARAMS, stopping=held).token_ids)
    assert tokens[0] == 0
    assert tokens[1] == toy_tokens([*prompt, 0], 1)[0]


def test_the_context_ends_generation(engine: Engine) -> None:
    result = engine.generate([1] * 120, sampling=GREEDY_PARAMS, stopping=StoppingParams(ignore_eos=True))
    assert list(result.token_ids) == toy_tokens([1] * 120, 8)  # max_model_len is 128
    assert result.finish == Finish(FinishReason.CONTEXT_FULL)


def test_seeded_sampling_does_not_depend_on_the_batch(engine: Engine) -> None:
    """At temperature 50 the toy model's distribution is nearly flat, so tokens depend on the seed alone."""
    hot = SamplingParams(temperature=50.0, seed=2**63 + 5)
    alone = engine.generate([1, 2, 3], sampling=hot, stopping=long(20)).token_ids
    with ThreadPoolExecutor(12) as pool:
        noise = [pool.submit(engine.generate, [9] * (i + 1), stopping=long(40)) for i in range(11)]
        again = engine.generate([1, 2, 3], sampling=hot, stopping=long(20)).token_ids
        for other in noise:
            other.result()
    assert again == alone
    assert len(set(alone)) > 5
    other_seed = SamplingParams(temperature=50.0, seed=2**63 + 6)
    assert engine.generate([1, 2, 3], sampling=other_seed, stopping=long(20)).token_ids != alone
    unseeded = {
        engine.generate([1, 2, 3], sampling=SamplingParams(temperature=50.0), stopping=long(20)).token_ids
        for _ in range(3)
    }
    assert len(unseeded) == 3


def test_logprobs_are_those_of_the_toy(engine: Engine) -> None:
    """One logit is 10 and the other 60 are 0, so log p = 10 - log(e^10 + 60)."""
    result = engine.generate([1, 2], sampling=GREEDY_PARAMS, stopping=long(3), logprobs=2)
    peak = 10 - np.log(np.exp(10) + VOCAB - 1)
    assert result.logprobs is not None
    assert len(result.logprobs) == 3
    for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
        assert logprob.sampled == pytest.approx(peak, abs=1e-5)
        assert logprob.top[0][0] == token
        assert [v for _, v in logprob.top] == pytest.approx([peak, peak - 10], abs=1e-5)
    assert engine.generate([1, 2], sampling=GREEDY_PARAMS, stopping=long(3)).logprobs is None


@pytest.mark.ci
def test_more_logprobs_than_tokens_in_the_vocabulary() -> None:
    """A request may ask for up to max_logprobs. If the vocabulary has fewer tokens, all of them come back."""
    engine = toy_engine(max_logprobs=VOCAB + 9)
    try:
        result = engine.generate([1, 2], sampling=GREEDY_PARAMS, stopping=long(2), logprobs=VOCAB + 5)
        assert result.logprobs is not None
        assert [sorted(token for token, _ in step.top) for step in result.logprobs] == [
            list(range(VOCAB))
        ] * 2
        assert all(value < 0 for step in result.logprobs for _, value in step.top)
    finally:
        engine.shutdown()


def test_time_limit_gives_partial_output(engine: Engine) -> None:
    limit = StoppingParams(max_tokens=100, ignore_eos=True, time_limit_s=1e-6)
    result = engine.generate([1], sampling=GREEDY_PARAMS, stopping=limit)
    assert result.finish == Finish(FinishReason.TIME_LIMIT)
    assert list(result.token_ids) == toy_tokens([1], len(result.token_ids))
    endless = StoppingParams(max_tokens=2, ignore_eos=True, time_limit_s=1e300)
    assert list(engine.generate([1], sampling=GREEDY_PARAMS, stopping=endless).token_ids) == toy_tokens(
        [1], 2
    )


def test_abort_by_id_is_exact_and_reports_every_outcome(engine: Engine) -> None:
    gate, sink = at_gate(engine, "req-1", tokens=100), Collector()
    for name in ("req-10", "other"):
        submit(engine, sink, name)
    outcomes = engine.abort(["req-1", "nobody"], message="why")
    gate.open()
    assert outcomes == [("req-1", AbortOutcome.ABORTED), ("nobody", AbortOutcome.NOT_FOUND)]
    assert gate.sink.last("req-1").finish == Finish(FinishReason.ABORTED, message="why")
    assert sink.last("req-10").finish == Finish(FinishReason.MAX_TOKENS)
    assert gate.sink.tokens("req-1") == toy_tokens([1], 1)
    sink.last("other")
    assert engine.abort(["req-10"]) == [("req-10", AbortOutcome.ALREADY_FINISHED)]


def test_abort_by_prefix_and_all(engine: Engine) -> None:
    gate, sink = at_gate(engine, "a-1", tokens=100), Collector()
    for name in ("a-2", "b-1"):
        submit(engine, sink, name)
    assert dict(engine.abort(prefix="a-")) == {"a-1": AbortOutcome.ABORTED, "a-2": AbortOutcome.ABORTED}
    assert engine.abort(all_requests=True) == [("b-1", AbortOutcome.ABORTED)]
    gate.open()
    gate.sink.last("a-1")
    for name in ("a-2", "b-1"):
        sink.last(name)
    assert engine.load().pages_used == 0
    for bad in ({}, {"prefix": ""}, {"prefix": "a", "all_requests": True}):
        with pytest.raises(ValueError, match="exactly one"):
            engine.abort(**bad)


def test_an_aborted_id_can_be_used_again_at_once(engine: Engine) -> None:
    gate, again = at_gate(engine, "again", tokens=100), Collector()
    engine.abort(["again"])
    submit(engine, again, "again", [2], tokens=10)
    gate.open()
    assert again.last("again").finish == Finish(FinishReason.MAX_TOKENS)
    assert again.tokens("again") == toy_tokens([2], 10)


def test_cancel_frees_and_says_nothing(engine: Engine) -> None:
    gate = at_gate(engine, "gone", tokens=100)
    engine.cancel("gone")
    engine.cancel("never was")
    assert engine.load().pages_used == 0
    gate.open()
    engine.generate([1], sampling=GREEDY_PARAMS, stopping=long(2))
    assert not gate.sink.outputs["gone"][-1].last


def test_closing_a_stream_early_frees_the_request(engine: Engine) -> None:
    stream = engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(100), request_id="closed")
    next(stream)
    stream.close()
    assert engine.abort(["closed"])[0][1] is AbortOutcome.ALREADY_FINISHED
    assert engine.load().pages_used == 0


def test_a_stream_may_be_closed_before_its_first_value(engine: Engine) -> None:
    engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(100), request_id="unread").close()
    assert engine.abort(["unread"])[0][1] is AbortOutcome.ALREADY_FINISHED
    assert engine.load().pages_used == 0


def test_an_ended_stream_leaves_the_next_user_of_its_id_alone(engine: Engine) -> None:
    stream = engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(1), request_id="shared")
    assert next(stream).finish == Finish(FinishReason.MAX_TOKENS)
    gate = at_gate(engine, "shared", tokens=100)
    stream.close()
    gate.open()
    assert gate.sink.last("shared").finish == Finish(FinishReason.MAX_TOKENS)


def test_one_call_per_step_for_requests_that_share_a_sink(engine: Engine) -> None:
    """The requests arrive while the engine is held at the gate, so they enter and run side by side."""
    gate, sink, names = at_gate(engine), Collector(), ["s0", "s1", "s2"]
    for i, name in enumerate(names):
        submit(engine, sink, name, [i], tokens=50)
    gate.open()
    for i, name in enumerate(names):
        sink.last(name)
        assert sink.tokens(name) == toy_tokens([i], 50)
    assert [len(sink.outputs[name]) for name in names] == [sink.calls] * 3


def test_a_failing_sink_does_not_disturb_others(engine: Engine) -> None:
    def broken(outputs: Sequence[StepOutput]) -> None:
        raise RuntimeError("reader's fault")

    engine.submit(Request("broken", (1,), GREEDY, long(20)), broken)
    assert list(engine.generate([2], sampling=GREEDY_PARAMS, stopping=long(20)).token_ids) == toy_tokens(
        [2], 20
    )


def test_refusals_come_at_once_and_name_everything(engine: Engine) -> None:
    sink = Collector()
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(Request("bad", (1, VOCAB, -1), GREEDY, StoppingParams(stop_token_ids=(VOCAB,))), sink)
    assert [v.field for v in caught.value.violations] == [
        "prompt_token_ids.ids[1]",
        "prompt_token_ids.ids[2]",
        "stopping.stop_token_ids[0]",
    ]
    with pytest.raises(InvalidRequest, match=r"output\.logprobs"):
        engine.submit(Request("bad", (1,), logprobs=21), sink)
    with pytest.raises(PromptTooLong, match="128 tokens; at most 127"):
        engine.submit(Request("bad", (1,) * 128), sink)
    with pytest.raises(InvalidRequest, match="at most 31 ids"):
        engine.submit(Request("bad", (1,), stopping=StoppingParams(stop_token_ids=tuple(range(32)))), sink)
    gate = at_gate(engine, "twice")
    with pytest.raises(DuplicateRequestId):
        submit(engine, sink, "twice")
    gate.open()


def test_the_queue_has_a_limit() -> None:
    engine = toy_engine(max_queued_requests=2)
    try:
        gate, sink = at_gate(engine, "runs"), Collector()
        submit(engine, sink, "waits-1")
        submit(engine, sink, "waits-2")
        with pytest.raises(QueueFull):
            submit(engine, sink, "too many")
        assert engine.load().num_waiting == 2
        engine.abort(all_requests=True)
        gate.open()
    finally:
        engine.shutdown()


class TwoWeights(ToyLM):
    """The toy model with a second weight, so that an update can be partial."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nnx.Param(jnp.zeros((1,), jnp.float32))


def two_weight_toy() -> ServedModel:
    graphdef, weights = nnx.split(TwoWeights())
    rules = plain_rules(offset=(1,), other=(1,))
    return dataclasses.replace(toy_model(), graphdef=graphdef, weights=weights, rules=rules)


def new_offset(value: float) -> dict[str, np.ndarray]:
    return {"offset": np.full((1,), value, np.float32)}


@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_weights_are_swapped_between_steps(policy: InFlightPolicy) -> None:
    """Tokens change from one formula to the other exactly where the outputs' `weights_generation` changes."""
    engine = toy_engine()
    try:
        gate = at_gate(engine, "flying", tokens=110)
        updated = engine.update_weights(new_offset(5.0), label="five", in_flight=policy)
        gate.open()
        assert updated.result(60).current == engine.weights == WeightsVersion("five", 2)
        last = gate.sink.last("flying")
        outputs = gate.sink.outputs["flying"]
        old = [t for o in outputs if o.weights_generation == 1 for t in o.token_ids]
        new = [t for o in outputs if o.weights_generation == 2 for t in o.token_ids]
        assert old == toy_tokens([1], len(old))
        assert new == toy_tokens([1, *old], len(new), offset=5)
        assert last.finish is not None
        if policy is InFlightPolicy.ABORT:
            assert last.finish.reason is FinishReason.ABORTED
        else:
            assert len(old) + len(new) == 110
            # One token is being delivered when the update comes, and the next is in flight.
            assert len(old) == (110 if policy is InFlightPolicy.WAIT else 2)
        assert last.timing is not None
        assert last.timing.preemptions == (policy is InFlightPolicy.RECOMPUTE)  # prefilled again
        after = engine.generate([4, 4], sampling=GREEDY_PARAMS, stopping=long(10)).token_ids
        assert list(after) == toy_tokens([4, 4], 10, offset=5)
        assert engine.compiles_after_warmup == 0
    finally:
        engine.shutdown()


@pytest.mark.sweep
def test_partial_updates_staged_together_both_go_live() -> None:
    """The second update is staged before the first goes live, and must not bring back what the first has
    replaced.
    """
    engine = toy_engine(two_weight_toy())
    try:
        sink = Collector()
        submit(engine, sink, "holds both updates up")
        updates = [
            engine.update_weights({name: np.full((1,), 5, np.float32)}, label=name, partial=True)
            for name in ("offset", "other")
        ]
        assert [future.result(60).current.generation for future in updates] == [2, 3]
        assert [float(leaf[0]) for leaf in engine.runner.device.leaves] == [5, 5]
    finally:
        engine.shutdown()


def test_the_old_weights_are_freed_by_an_update() -> None:
    model = toy_model()
    leaf = weakref.ref(jax.tree.leaves(model.weights)[0])
    engine = toy_engine(model)
    try:
        del model
        assert leaf() is not None
        engine.update_weights(new_offset(5.0), label="five").result(60)
        engine.generate([1], sampling=GREEDY_PARAMS, stopping=long(1))
        assert leaf() is None
    finally:
        engine.shutdown()


def test_a_refused_update_leaves_the_old_weights_serving(engine: Engine) -> None:
    before = engine.weights
    with pytest.raises(TensorsRefused, match="nonsense"):
        engine.update_weights({"nonsense": np.zeros(1, np.float32)}, label="x")
    with pytest.raises(TensorsRefused, match=r"offset has shape \[2\], expected \[1\]"):
        engine.update_weights({"offset": np.zeros((2,), np.float32)}, label="x")
    assert engine.weights == before
    assert list(engine.generate([7], sampling=GREEDY_PARAMS, stopping=long(9)).token_ids) == toy_tokens(
        [7], 9
    )


def test_a_dead_engine_tells_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    sink = Collector()
    try:

        def boom(*_: object) -> None:
            raise RuntimeError("device lost")

        monkeypatch.setattr(ModelRunner, "execute_async", boom)
        submit(engine, sink, "a")
        assert isinstance(sink.last("a").error, EngineFailure)
        assert "device lost" in str(engine.failure)
        assert not engine.ready
        with pytest.raises(EngineFailure):
            submit(engine, sink, "b")
        assert engine.load().pages_used == 0
    finally:
        engine.shutdown()


def test_life_cycle() -> None:
    engine = toy_engine(start=False)
    sink = Collector()
    with pytest.raises(NotReady):
        submit(engine, sink, "early")
    engine.start()
    assert engine.ready
    submit(engine, sink, "runs", tokens=100)
    assert engine.drain(60)
    assert sink.last("runs").finish == Finish(FinishReason.MAX_TOKENS)
    with pytest.raises(Draining):
        submit(engine, sink, "late")
    engine.shutdown()
    engine.shutdown()


def test_shutdown_ends_what_runs() -> None:
    engine = toy_engine()
    sink = Collector()
    submit(engine, sink, "runs", tokens=120)
    sink.first("runs")
    engine.shutdown()
    assert sink.last("runs").finish is not None


def test_an_observer_sees_every_step() -> None:
    seen: queue.SimpleQueue[StepRecord] = queue.SimpleQueue()

    class Watch:
        def on_step(self, record: StepRecord) -> None:
            seen.put(record)

    engine = toy_engine(observer=Watch())
    try:
        engine.generate([1] * 20, sampling=GREEDY_PARAMS, stopping=long(3), request_id="watched")
    finally:
        engine.shutdown()
    records = [seen.get_nowait() for _ in range(seen.qsize())]
    # 20 prompt tokens with a budget of 16, then two decodes.
    assert [(r.num_tokens, r.decode_only) for r in records] == [(16, False), (4, False), (1, True), (1, True)]
    for r in records:
        assert r.request_ids == ("watched",)
        assert r.started_ns <= r.scheduled_ns <= r.dispatched_ns <= r.waited_ns <= r.committed_ns
