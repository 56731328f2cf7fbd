"""Metrics of random traffic on the engine's real loop: they say what the requests really got.

The witness is a plain account of every output by itself, from what its sink got and from the times in the
records, without the shortcuts of the meters.
"""

from __future__ import annotations

import bisect
import random
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.loop.journal import Cancelled, Ended
from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.instruments import Instrument
from penstock.runtime.measuring.snapshot import HistogramPoint
from penstock.runtime.requests.request import RequestTiming
from tests.support.meters import Engine, Meters
from tests.support.scheduler.traffic_entries import Told, run_traffic

SEEDS = list(range(6))
DYING = 3
"""The engine of these seeds dies."""


@cache
def traffic(seed: int) -> Told:
    return run_traffic(seed, dies=seed % DYING == DYING - 1)


def folded(told: Told) -> Meters:
    assert told.totals is not None
    meters = Meters(Engine(totals=told.totals))
    meters.read(told.entries)
    return meters


def ends(told: Told) -> dict[str, Ended | Cancelled]:
    return {
        entry.request.request_id: entry for entry in told.entries if isinstance(entry, (Ended, Cancelled))
    }


def timing_of(end: Ended | Cancelled) -> RequestTiming | None:
    return end.timing if isinstance(end, Cancelled) else end.output.timing


def steps(told: Told) -> list[StepRecord]:
    return [entry for entry in told.entries if isinstance(entry, StepRecord)]


def check_histogram(meters: Meters, instrument: Instrument, values: list[float], *labels: str) -> None:
    """Check that the histogram has these values, and no others."""
    found = meters.histogram(instrument, *labels)
    expected = [0] * (len(instrument.buckets) + 1)
    for value in values:
        expected[bisect.bisect_left(instrument.buckets, value)] += 1
    assert found.count == len(values), instrument.name
    assert found.bucket_counts == tuple(expected), instrument.name
    assert found.sum == pytest.approx(sum(values)), instrument.name


@pytest.mark.parametrize("seed", SEEDS)
def test_counters_equal_what_requests_got(seed: int) -> None:
    told = traffic(seed)
    meters, ended = folded(told), ends(told)
    assert set(ended) == {request.request_id for request in told.requests}, "each output ends once"
    reasons: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    generated = 0
    for request in told.requests:
        name, end = request.request_id, ended[request.request_id]
        tokens = told.sink.tokens(name)
        if isinstance(end, Cancelled):
            assert name in told.cancelled
            reasons["cancelled"] += 1
            assert end.num_tokens >= len(tokens), "what was posted last may not have reached its sink"
            generated += end.num_tokens
            continue
        last = told.sink.outputs[name][-1]
        assert last.last
        reasons["error" if last.finish is None else last.finish.reason.value] += 1
        if last.error is not None:
            errors[type(last.error).__name__] += 1
        if last.timing is not None:  # an engine that dies may take tokens with it
            generated += len(tokens)
        else:
            generated += end.num_tokens
    counts = {labels[0]: count for labels, count in meters.points(defined.OUTPUTS_FINISHED).items() if count}
    assert counts == reasons
    assert meters.points(defined.OUTPUTS_FAILED) == {(name,): count for name, count in errors.items()}
    assert meters.value(defined.TOKENS_GENERATED) == generated
    times = [timing_of(end) for end in ended.values()]
    if None not in times:  # else the engine died
        preemptions = sum(timing.preemptions for timing in times if timing is not None)
        assert meters.value(defined.PREEMPTIONS) == preemptions


@pytest.mark.parametrize("seed", SEEDS)
def test_times_are_those_of_each_output_by_itself(seed: int) -> None:
    told = traffic(seed)
    meters = folded(told)
    last_ns: dict[str, int] = {}
    latencies: list[float] = []
    prompts = {request.request_id: len(request.prompt_token_ids) for request in told.requests}
    for record in steps(told):
        for output in record.outputs:
            count = len(output.token_ids)
            if count and output.request_id in last_ns:
                gap_s = (record.waited_ns - last_ns[output.request_id]) / count / 1e9
                latencies += [gap_s] * count
            if count:
                last_ns[output.request_id] = record.waited_ns
    check_histogram(meters, defined.INTER_TOKEN_LATENCY, latencies)
    assert meters.value(defined.TOKENS_PROMPT) == sum(prompts[name] for name in last_ns)
    gen_ai = ("text_completion", "penstock", "toy")
    assert meters.histogram(defined.TIME_TO_FIRST_TOKEN, *gen_ai).count == len(last_ns)
    known = [(end, timing) for end in ends(told).values() if (timing := timing_of(end)) is not None]
    check_histogram(meters, defined.GENERATED_TOKENS, [float(end.num_tokens) for end in ends(told).values()])
    check_histogram(
        meters,
        defined.DECODE_TIME,
        [(t.finished_ns - t.first_token_ns) / 1e9 for _, t in known if t.first_token_ns],
    )
    check_histogram(
        meters,
        defined.RUNNING_TIME,
        [(t.finished_ns - t.scheduled_ns) / 1e9 for _, t in known if t.scheduled_ns],
    )
    assert meters.histogram(defined.QUEUE_TIME).count == len(told.requests)
    for end, timing in known:
        # All tokens but the first came one after the other until the last.
        if isinstance(end, Ended) and end.output.token_ids:
            assert last_ns[end.request.request_id] == timing.finished_ns


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_are_counted_as_they_were(seed: int) -> None:
    told = traffic(seed)
    meters, records = folded(told), steps(told)
    kinds = Counter(record.kind.value for record in records)
    assert {k[0]: v for k, v in meters.points(defined.STEPS).items() if v} == kinds
    check_histogram(meters, defined.STEP_ROWS, [float(record.num_rows) for record in records])
    single = sum(record.num_tokens for record in records if record.num_steps == 1)
    windows = [record for record in records if record.num_steps > 1]
    made = sum(len(output.token_ids) for record in windows for output in record.outputs)
    assert meters.value(defined.STEP_TOKENS_COMPUTED) == single + made


def test_the_traffic_has_all_that_the_properties_are_about() -> None:
    """So none of the tests above passes because nothing happened."""
    all_told = [traffic(seed) for seed in SEEDS]
    reasons = sum((Counter(folded(told).meters.metrics().totals.ended) for told in all_told), Counter[str]())
    for reason in ("eos", "max_tokens", "aborted", "cancelled", "error"):
        assert reasons[reason], reason
    kinds = {record.kind.value for told in all_told for record in steps(told)}
    assert kinds == {"prefill", "decode", "mixed", "window"}
    assert any(told.totals is not None and told.totals.preemptions for told in all_told)
    assert any("\x00" in request.request_id for told in all_told for request in told.requests)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SEEDS), st.integers(0, 2**32 - 1))
def test_any_split_into_batches_gives_the_same(seed: int, split: int) -> None:
    told, rng = traffic(seed), random.Random(split)
    whole = folded(told)
    parts = Meters(whole.engine)
    left = list(told.entries)
    while left:
        size = rng.choice([1, 1, 2, 5, 50])
        parts.read(left[:size])
        del left[:size]
        if rng.random() < 0.05:
            parts.meters.metrics()
    assert parts.all_points() == whole.all_points()
    assert parts.meters.metrics().totals == whole.meters.metrics().totals


@pytest.mark.parametrize("seed", SEEDS)
def test_the_counts_of_all_buckets_add_up(seed: int) -> None:
    for name, points in folded(traffic(seed)).all_points().items():
        for point in points.values():
            if isinstance(point, HistogramPoint):
                assert sum(point.bucket_counts) == point.count, name
