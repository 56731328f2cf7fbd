"""`Engine.metrics` and an engine's registry, on an engine that computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import Queue

import pytest

from penstock.runtime import AsyncEngine, Engine, StoppingParams
from penstock.runtime.errors import ConfigError, WeightsIncomplete
from penstock.runtime.execution.kv_sizing import DeviceMemory
from penstock.runtime.loop.interface import InFlightPolicy, InFlightReport
from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.instruments import Instrument
from penstock.runtime.measuring.snapshot import HistogramPoint
from penstock.runtime.requests.request import Request, StepOutput
from tests.support.collector import GREEDY, GREEDY_PARAMS, Collector, long, submit
from tests.support.models.toy import toy_backend, toy_engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = toy_engine(max_decode_steps=4)
    yield engine
    engine.shutdown()


def value(engine: Engine, instrument: Instrument, *labels: str) -> float:
    (metric,) = [m for m in engine.registry.snapshot().metrics if m.instrument is instrument]
    found = metric.points[labels]
    assert not isinstance(found, HistogramPoint)
    return found


def said_of(engine: Engine) -> dict[str, str]:
    """Return the labels of the metric that says what runs."""
    (metric,) = [m for m in engine.registry.snapshot().metrics if m.instrument is defined.BUILD_INFO]
    ((labels, one),) = metric.points.items()
    assert one == 1
    return dict(zip(defined.BUILD_INFO.labels, labels, strict=True))


def test_metrics_are_those_of_the_answers(engine: Engine) -> None:
    before = engine.metrics()
    long = StoppingParams(max_tokens=20, ignore_eos=True)
    one = engine.generate([1, 2, 3], sampling=GREEDY_PARAMS, stopping=long)
    three = engine.generate([4, 5], n=3, stopping=StoppingParams(max_tokens=7, ignore_eos=True))
    found = engine.metrics()
    old, new = before.totals, found.totals
    assert new.generated_tokens - old.generated_tokens == 20 + 3 * 7
    assert sum(len(output.token_ids) for output in (*one.outputs, *three.outputs)) == 20 + 3 * 7
    assert new.prompt_tokens - old.prompt_tokens == 3 + 3 * 2
    assert new.ended["max_tokens"] - old.ended["max_tokens"] == 4
    assert new.steps["window"] > old.steps["window"]
    assert sum(new.steps.values()) <= new.step_rows
    assert new.computed_tokens > old.computed_tokens
    assert new.padding_tokens > old.padding_tokens, "programs are larger than these steps"
    assert all(new.step_time_s[part] > old.step_time_s[part] for part in ("schedule", "pack", "dispatch"))
    assert new.compiles_after_warmup == new.dropped_entries == 0
    assert found.rates.generated_tokens_per_s > 0
    assert found.rates.rows_per_step >= 1
    latencies, past = found.latencies, before.latencies
    assert latencies.time_to_first_token.count - past.time_to_first_token.count == 4
    assert latencies.inter_token.count - past.inter_token.count == 19 + 3 * 6
    assert latencies.end_to_end.count - past.end_to_end.count == 4
    assert 0 < latencies.inter_token.p50 <= latencies.inter_token.p99 <= latencies.end_to_end.p99
    assert found.load.num_running == found.load.num_waiting == 0
    assert before.started_at_s == pytest.approx(found.started_at_s, abs=1)
    assert before.at_s <= found.at_s


def test_metrics_have_what_was_told_before_they_were_asked(engine: Engine) -> None:
    """Also the tokens of a request whose last output has just come."""
    for i in range(20):
        before = engine.metrics().totals
        sink = Collector()
        submit(engine, sink, f"now{i}", tokens=5)
        sink.last(f"now{i}")
        after = engine.metrics().totals
        assert after.generated_tokens - before.generated_tokens == 5
        assert after.ended["max_tokens"] - before.ended["max_tokens"] == 1
        submit(engine, sink, f"then{i}", tokens=3)
        sink.last(f"then{i}")
        assert value(engine, defined.TOKENS_GENERATED) - after.generated_tokens == 3


def test_metrics_of_a_running_output(engine: Engine) -> None:
    collector, holds = Collector(), Queue[Future[InFlightReport]]()

    def sink(outputs: Sequence[StepOutput]) -> None:
        if not collector.calls:  # on the engine's thread, which so makes no further step
            holds.put(engine.changes.hold_for_update(InFlightPolicy.KEEP))
        collector(outputs)

    engine.submit(Request("running", (1,), GREEDY, long(100)), sink)
    holds.get(timeout=60).result(60)
    try:
        shown = {metric.instrument: metric.points for metric in engine.registry.snapshot().metrics}
        assert shown[defined.OUTPUTS_RUNNING] == {(): 1}
        used = shown[defined.KV_PAGES][("used",)]
        assert used == engine.load().pages_used > 0
        assert shown[defined.KV_USAGE] == {(): used / engine.info.num_pages}
    finally:
        engine.changes.drop_hold()
    collector.last("running")


def test_coroutines_have_them_too(engine: Engine) -> None:
    async def ask() -> int:
        own = AsyncEngine(engine)
        before = (await own.metrics()).totals.generated_tokens
        await own.generate([1], stopping=StoppingParams(max_tokens=3, ignore_eos=True))
        return (await own.metrics()).totals.generated_tokens - before

    assert asyncio.run(ask()) == 3


def test_memory_is_that_of_weights_and_cache(engine: Engine) -> None:
    kv_bytes = engine.config.kv_cache_bytes
    assert value(engine, defined.MEMORY, "weights") == 4  # the toy's only weight
    assert value(engine, defined.MEMORY, "kv_cache") == kv_bytes
    assert value(engine, defined.MEMORY, "resident") > 10_000_000
    engine.pause(InFlightPolicy.ABORT, free_kv_cache=True).result(60)
    assert value(engine, defined.PAUSED) == 1
    assert value(engine, defined.MEMORY, "kv_cache") == 0
    engine.resume().result(60)
    assert value(engine, defined.PAUSED) == 0
    assert value(engine, defined.MEMORY, "kv_cache") == kv_bytes


def test_a_device_that_reports_its_memory() -> None:
    backend = replace(toy_backend(), memory=lambda: DeviceMemory(limit_bytes=10**9, used_bytes=4711))
    engine = toy_engine(start=False, backend=backend, kv_cache_bytes=64_000)
    try:
        assert value(engine, defined.MEMORY, "device") == 4711
        assert value(engine, defined.MEMORY, "kv_cache") == engine.config.kv_cache_bytes
    finally:
        engine.shutdown()
    assert value(engine, defined.MEMORY, "kv_cache") == value(engine, defined.MEMORY, "weights") == 0


def test_weights_and_build(engine: Engine) -> None:
    assert value(engine, defined.WEIGHTS_GENERATION) == engine.weights.generation
    assert value(engine, defined.WEIGHTS_BROKEN) == 0
    said = said_of(engine)
    assert (said["model"], said["dtype"], said["quantization"]) == ("toy", "float32", "none")
    assert said["kv_cache_dtype"] == "float32"
    assert said["platform"] == engine.info.devices[0].partition(":")[0]
    assert said["version"]
    assert said["jax"]


@pytest.mark.ci
def test_a_kv_cache_of_int8() -> None:
    """What is counted for it is what the device holds."""
    engine = toy_engine(start=False, kv_cache_dtype="int8", kv_cache_bytes=64_000)
    try:
        assert said_of(engine)["kv_cache_dtype"] == "int8"
        assert value(engine, defined.MEMORY, "kv_cache") == engine.config.kv_cache_bytes
        assert 63_000 < engine.config.kv_cache_bytes <= 64_000
    finally:
        engine.shutdown()


def test_an_engine_without_metrics() -> None:
    engine = toy_engine(start=False, metrics=False)
    try:
        assert not engine.journal.is_read
        with pytest.raises(ConfigError, match="without"):
            engine.metrics()
        with pytest.raises(ConfigError):
            asyncio.run(AsyncEngine(engine).metrics())
        shown = {metric.instrument for metric in engine.registry.snapshot().metrics}
        assert defined.TOKENS_GENERATED not in shown
    finally:
        engine.shutdown()


def test_broken_weights_and_the_end_of_an_engine() -> None:
    engine = toy_engine()
    sink = Collector()
    submit(engine, sink, "a", tokens=100)
    sink.first("a")
    engine.changes.hold_for_update(InFlightPolicy.KEEP).result(60)
    engine.changes.break_weights("half of it came")
    assert isinstance(sink.last("a").error, WeightsIncomplete)
    assert value(engine, defined.WEIGHTS_BROKEN) == 1
    assert engine.metrics().totals.ended["error"] == 1
    engine.shutdown()
    after = engine.metrics()
    assert after.totals.ended["error"] == 1, "what was counted is known after the end"
    assert after.load.num_running == 0


def test_metrics_are_shown_while_a_thread_hangs_with_the_engines_lock(engine: Engine) -> None:
    """As they were before, but for what needs no lock."""
    finished = value(engine, defined.OUTPUTS_FINISHED, "max_tokens")
    with ThreadPoolExecutor(1) as pool, engine.guard.lock:
        asked = pool.submit(lambda: (engine.metrics(), engine.registry.snapshot()))
        metrics, snapshot = asked.result(60)
    assert metrics.load == engine.load()
    (ended,) = [one for one in snapshot.metrics if one.instrument is defined.OUTPUTS_FINISHED]
    assert ended.points[("max_tokens",)] == finished
