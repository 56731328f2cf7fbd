"""Entries folded into metrics, by hand: a few outputs whose every time is a round number."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.runtime.errors import EngineFailure
from penstock.runtime.loop.interface import InFlightReport, Paused, StepRecord, StepShape
from penstock.runtime.loop.journal import Cancelled, Changed, Ended, Preempted, Queued
from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.instruments import Instrument, Kind
from penstock.runtime.measuring.snapshot import Exemplar, HistogramPoint
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    Request,
    RequestTiming,
    StepOutput,
    StoppingParams,
)
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.plan import Plan, PlanRow, Speculated
from tests.support.meters import NO_TOTALS, Meters

MS = 1_000_000
START = 0
"""The moment at which a test begins: now, because the last minute is told of it."""
GEN_AI = ("text_completion", "penstock", "toy")


@pytest.fixture(autouse=True)
def start_now() -> None:
    """Not when this module is imported: that may be long before its tests run."""
    global START
    START = time.monotonic_ns()


def request(name: str, num_prompt: int = 3, **more: object) -> Request:
    return replace(Request(name, tuple(range(num_prompt)), stopping=StoppingParams(99)), **more)  # type: ignore[arg-type]


def queued(at_ms: int, asked: Request) -> Queued:
    return Queued(START + at_ms * MS, asked)


def prefill(name: str, num_tokens: int, *, samples: bool = True) -> PlanRow:
    return PlanRow(name, 0, 0, num_tokens, tuple(range(num_tokens)), samples)


def decode(name: str, most: int = 1, proposed: int = 0) -> PlanRow:
    return PlanRow(name, 0, 9, 1 + proposed, None, True, max_samples=most)


def step(
    at_ms: int,
    rows: Sequence[PlanRow],
    made: dict[str, int],
    *,
    new: Sequence[Request] = (),
    window: int = 1,
    shape: StepShape | None = None,
    speculated: tuple[Speculated, ...] = (),
) -> StepRecord:
    """Make a step that made so many tokens for each output, which were on the host at `at_ms`. It began 10 ms
    before: 1 ms to schedule, 1 to pack, 2 to dispatch, 2 of something else, 4 to wait; then 1 to emit.
    """
    plan = Plan(0, tuple(rows), num_steps=window, new_requests=tuple(enumerate(new)))
    outputs = [StepOutput(name, tuple(range(count))) for name, count in made.items()]
    times = [START + (at_ms + ms) * MS for ms in (-10, -9, -8, -6, -4, 0, 0, 1)]
    return StepRecord._make([plan, outputs, Load.idle(10), shape, *times, speculated])


def ended(
    asked: Request,
    timing: RequestTiming,
    num_tokens: int,
    reason: FinishReason = FinishReason.MAX_TOKENS,
    error: Exception | None = None,
) -> Ended:
    finish = None if error is not None else Finish(reason)
    output = StepOutput(asked.request_id, finish=finish, timing=timing, error=error)
    return Ended(timing.finished_ns, asked, output, num_tokens)


def timing(arrived: int, scheduled: int, first: int, finished: int, *, cached: int = 0) -> RequestTiming:
    """Make a timing from times in ms; a negative one never came."""
    return RequestTiming(
        arrived_ns=START + arrived * MS,
        received_ns=START + arrived * MS,
        scheduled_ns=START + scheduled * MS if scheduled >= 0 else 0,
        first_token_ns=START + first * MS if first >= 0 else 0,
        finished_ns=START + finished * MS,
        cached_prompt_tokens=cached,
    )


def test_one_output_from_its_arrival_to_its_end() -> None:
    """Received at 0, queued at 10, entered at 90 ms, first token at 100, then one each 20 ms, four in all."""
    meters = Meters()
    asked = request("a", 5, received_ns=START)
    meters.read([queued(10, asked), step(100, [prefill("a", 5)], {"a": 1}, new=[asked])])
    meters.read([step(at, [decode("a")], {"a": 1}) for at in (120, 140, 160)])
    times = replace(timing(10, 90, 100, 160, cached=2), received_ns=START)
    meters.read([ended(asked, times, 4)])

    def check(instrument: Instrument, count: int, total: float, *labels: str) -> None:
        found = meters.histogram(instrument, *labels)
        assert found.count == count, instrument.name
        assert found.sum == pytest.approx(total), instrument.name

    check(defined.TIME_TO_FIRST_TOKEN, 1, 0.100, *GEN_AI)
    check(defined.QUEUE_TIME, 1, 0.080)
    check(defined.PREFILL_TIME, 1, 0.010)
    check(defined.DECODE_TIME, 1, 0.060)
    check(defined.RUNNING_TIME, 1, 0.070)
    check(defined.INTER_TOKEN_LATENCY, 3, 0.060)
    check(defined.TIME_PER_OUTPUT_TOKEN, 1, 0.020, *GEN_AI)
    check(defined.REQUEST_DURATION, 1, 0.160, *GEN_AI, "")
    check(defined.PROMPT_TOKENS, 1, 5)
    check(defined.GENERATED_TOKENS, 1, 4)
    # The buckets around 20 ms are (0.01, 0.02] and (0.02, 0.04].
    latencies = meters.histogram(defined.INTER_TOKEN_LATENCY)
    assert latencies.bucket_counts[defined.TIME_TO_FIRST_TOKEN_BUCKETS.index(0.02)] == 3
    assert meters.value(defined.TOKENS_PROMPT) == 5
    assert meters.value(defined.TOKENS_GENERATED) == 4
    assert meters.value(defined.TOKENS_CACHED) == 2
    assert meters.value(defined.OUTPUTS_FINISHED, "max_tokens") == 1


def test_rows_that_are_together_have_one_latency() -> None:
    """Two outputs in the same steps, of which one joins later; then the rows change places."""
    meters = Meters()
    a, b = request("a"), request("b")
    meters.read([queued(0, a), queued(0, b)])
    meters.read([step(10, [prefill("a", 3)], {"a": 1}, new=[a])])
    meters.read([step(30, [decode("a"), prefill("b", 3)], {"a": 1, "b": 1}, new=[b])])  # a: 20
    meters.read([step(40, [decode("a"), decode("b")], {"a": 1, "b": 1})])  # 10, 10
    meters.read([step(70, [decode("a"), decode("b")], {"a": 1, "b": 1})])  # 30, 30
    meters.read([step(75, [decode("b"), decode("a")], {"b": 1, "a": 1})])  # 5, 5
    meters.read([step(85, [decode("b")], {"b": 1})])  # b: 10
    meters.read([step(100, [decode("a")], {"a": 1})])  # a: 25
    found = meters.histogram(defined.INTER_TOKEN_LATENCY)
    assert found.count == 9
    assert found.sum == pytest.approx((20 + 10 + 10 + 30 + 30 + 5 + 5 + 10 + 25) / 1000)
    told = meters.meters.metrics().latencies
    assert told.inter_token.count == 9
    assert told.time_to_first_token.count == 2
    assert told.time_to_first_token.mean == pytest.approx(0.020)


def test_the_tokens_of_a_window_share_its_time() -> None:
    """A window of four steps: one output makes four tokens, the other ends after two. Then again."""
    meters = Meters()
    a, b = request("a"), request("b")
    meters.read([queued(0, a), queued(0, b)])
    rows = [prefill("a", 3), prefill("b", 3)]
    meters.read([step(10, rows, {"a": 1, "b": 1}, new=[a, b], shape=StepShape(16, 4))])
    rows, shape = [decode("a", 4), decode("b", 4)], StepShape(4, 4)
    meters.read([step(50, rows, {"a": 4, "b": 4}, window=4, shape=shape)])
    meters.read([step(90, rows, {"a": 4, "b": 2}, window=4, shape=shape)])
    found = meters.histogram(defined.INTER_TOKEN_LATENCY)
    assert found.count == 4 + 4 + 4 + 2
    assert found.sum == pytest.approx(4 * 0.040)
    assert meters.value(defined.STEPS, "window") == 2
    assert meters.value(defined.STEPS, "prefill") == 1
    # The prefill has 6 of 16 places; the windows 8 and 6 of 4 rows in each of 4 steps.
    assert meters.value(defined.STEP_TOKENS_COMPUTED) == 6 + 8 + 6
    assert meters.value(defined.STEP_TOKENS_PADDING) == 10 + 8 + 10


def test_proposed_tokens_by_their_position_and_the_times_between_those_that_came_together() -> None:
    """In a step of 20 ms one output gets three tokens, another one, and a third fails and gets none. In the
    next there are as many tokens as outputs, which do not have one each.
    """
    meters = Meters()
    asked = [request(name) for name in "abc"]
    meters.read([queued(0, one) for one in asked])
    rows = [prefill(one.request_id, 3) for one in asked]
    meters.read([step(10, rows, {"a": 1, "b": 1, "c": 1}, new=asked)])
    found: tuple[Speculated, ...] = (Speculated("lookup", (2, 1), (1, 1)),)
    rows = [decode("a", proposed=2), decode("b", proposed=1), decode("c")]
    shape = StepShape(8, 8)
    meters.read([step(30, rows, {"a": 3, "b": 1, "c": 0}, shape=shape, speculated=found)])
    found = (Speculated("lookup", (1, 0, 1), (1, 0, 0)), Speculated("other", (1,), (0,)))
    meters.read([step(50, rows, {"a": 2, "b": 1, "c": 0}, speculated=found)])
    assert meters.value(defined.STEP_TOKENS_COMPUTED) == 9 + 6 + 6
    assert meters.value(defined.STEP_TOKENS_PADDING) == 2
    latencies = meters.histogram(defined.INTER_TOKEN_LATENCY)
    assert latencies.count == 3 + 1 + 2 + 1
    assert latencies.sum == pytest.approx(4 * 0.020)
    assert meters.points(defined.SPECULATION_PROPOSED) == {
        ("lookup", "1"): 3, ("lookup", "2"): 1, ("lookup", "3"): 1, ("other", "1"): 1
    }  # fmt: skip
    assert meters.points(defined.SPECULATION_ACCEPTED) == {
        ("lookup", "1"): 2, ("lookup", "2"): 1, ("lookup", "3"): 0, ("other", "1"): 0
    }  # fmt: skip
    told = meters.meters.metrics()
    assert (told.totals.proposed_tokens, told.totals.accepted_tokens) == (6, 3)
    assert told.rates.accepted_share == 0.5


def test_an_id_that_is_used_again_is_another_output() -> None:
    meters = Meters()
    a = request("a")
    meters.read([queued(0, a), step(10, [prefill("a", 3)], {"a": 1}, new=[a])])
    meters.read([ended(a, timing(0, 0, 10, 10), 1)])
    meters.read([queued(15, a), step(20, [prefill("a", 3)], {"a": 1}, new=[a])])
    assert meters.histogram(defined.INTER_TOKEN_LATENCY).count == 0
    first = meters.histogram(defined.TIME_TO_FIRST_TOKEN, *GEN_AI)
    assert first.count == 2
    assert first.sum == pytest.approx(0.015)


def test_a_preempted_output_enters_once_and_waits_for_its_token() -> None:
    meters = Meters()
    a = request("a")
    meters.read([queued(0, a), step(10, [prefill("a", 3)], {"a": 1}, new=[a])])
    meters.read([Preempted(START + 15 * MS, ("a",), (4,))])
    meters.read([step(110, [prefill("a", 4)], {"a": 1}, new=[a])])
    assert meters.histogram(defined.QUEUE_TIME).count == 1
    assert meters.histogram(defined.TIME_TO_FIRST_TOKEN, *GEN_AI).count == 1
    assert meters.histogram(defined.INTER_TOKEN_LATENCY).sum == pytest.approx(0.100)
    assert meters.value(defined.TOKENS_PROMPT) == 3


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_counts_as_itself(reason: FinishReason) -> None:
    meters = Meters()
    a = request("a")
    meters.read([queued(0, a), ended(a, timing(0, 10, 20, 60), 3, reason)])
    others = {other.value for other in FinishReason} | {"cancelled", "error"}
    counts = {name: meters.value(defined.OUTPUTS_FINISHED, name) for name in others}
    assert counts == {name: int(name == reason.value) for name in others}
    assert meters.histogram(defined.REQUEST_DURATION, *GEN_AI, "").count == 1
    is_whole = reason is not FinishReason.ABORTED
    assert meters.histogram(defined.TIME_PER_OUTPUT_TOKEN, *GEN_AI).count == int(is_whole)


def test_outputs_that_fail_or_are_cancelled() -> None:
    meters = Meters()
    a, b, c = request("a"), request("b"), request("c")
    meters.read([queued(0, a), queued(0, b), queued(0, c)])
    meters.read([ended(a, timing(0, 10, 20, 60), 3, error=EngineFailure("gone"))])
    meters.read([Cancelled(START + 70 * MS, b, timing(0, 10, 20, 70), 5)])
    without_times = StepOutput("c", error=EngineFailure("gone"))
    meters.read([Ended(START + 80 * MS, c, without_times, 0)])
    assert meters.value(defined.OUTPUTS_FINISHED, "error") == 2
    assert meters.value(defined.OUTPUTS_FINISHED, "cancelled") == 1
    assert meters.points(defined.OUTPUTS_FAILED) == {("EngineFailure",): 2}
    assert meters.histogram(defined.REQUEST_DURATION, *GEN_AI, "EngineFailure").sum == pytest.approx(0.060)
    assert meters.histogram(defined.REQUEST_DURATION, *GEN_AI, "cancelled").sum == pytest.approx(0.070)
    assert meters.histogram(defined.TIME_PER_OUTPUT_TOKEN, *GEN_AI).count == 0
    assert meters.histogram(defined.GENERATED_TOKENS).sum == 8


def test_an_output_that_never_ran_waited_until_its_end() -> None:
    meters = Meters()
    a = request("a")
    meters.read([queued(0, a), ended(a, timing(0, -1, -1, 500), 0, FinishReason.TIME_LIMIT)])
    assert meters.histogram(defined.QUEUE_TIME).sum == pytest.approx(0.5)
    for instrument in (defined.PREFILL_TIME, defined.DECODE_TIME, defined.RUNNING_TIME):
        assert meters.histogram(instrument).count == 0
    assert meters.value(defined.TOKENS_PROMPT) == 0


def test_times_have_the_span_of_their_request() -> None:
    meters = Meters()
    before = time.time()
    traced = request("a", trace_id="a" * 32, span_id="b" * 16, operation="chat")
    meters.read([queued(0, traced), step(40, [prefill("a", 3)], {"a": 1}, new=[traced])])
    found = meters.histogram(defined.TIME_TO_FIRST_TOKEN, "chat", "penstock", "toy")
    (exemplar,) = [one for one in found.exemplars if one is not None]
    assert exemplar == Exemplar(0.04, "a" * 32, "b" * 16, exemplar.at_s)
    assert exemplar.at_s == pytest.approx(before, abs=60)
    assert found.exemplars.index(exemplar) == found.bucket_counts.index(1)


def test_an_exemplar_has_the_time_of_a_clock_that_was_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    meters, unix_ns = Meters(), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: unix_ns() + 86_400 * 10**9)
    traced = request("a", trace_id="a" * 32, span_id="b" * 16, operation="chat")
    before = (time.time_ns() - time.monotonic_ns() + START + 40 * MS) / 1e9
    meters.read([queued(0, traced), step(40, [prefill("a", 3)], {"a": 1}, new=[traced])])
    found = meters.histogram(defined.TIME_TO_FIRST_TOKEN, "chat", "penstock", "toy")
    (exemplar,) = [one for one in found.exemplars if one is not None]
    assert exemplar.at_s == pytest.approx(before, abs=60)


def test_steps_by_their_kind_and_the_parts_of_their_time() -> None:
    meters = Meters()
    meters.read([step(10, [prefill("a", 7, samples=False)], {}, shape=StepShape(16, 4))])
    meters.read([step(30, [prefill("a", 2), decode("b")], {}, shape=StepShape(4, 4))])
    meters.read([step(60, [decode("a"), decode("b")], {}, shape=StepShape(2, 2))])
    meters.read([step(61, [decode("a")], {}, shape=None)])
    counts = {"prefill": 1, "mixed": 1, "decode": 2, "window": 0}
    assert meters.points(defined.STEPS) == {(kind,): count for kind, count in counts.items()}
    assert meters.value(defined.STEP_TOKENS_COMPUTED) == 7 + 3 + 2 + 1
    assert meters.value(defined.STEP_TOKENS_PADDING) == 9 + 1 + 0
    parts = {"schedule": 0.004, "pack": 0.004, "dispatch": 0.008, "wait": 0.016, "emit": 0.004}
    assert meters.points(defined.STEP_TIME) == {(part,): pytest.approx(s) for part, s in parts.items()}
    # A step takes 6 ms from its dispatch, but the last one began when the one before it was done.
    assert meters.histogram(defined.STEP_DURATION, "mixed").sum == pytest.approx(0.006)
    decodes = meters.histogram(defined.STEP_DURATION, "decode")
    assert decodes.count == 2
    assert decodes.sum == pytest.approx(0.006 + 0.001)
    assert meters.histogram(defined.STEP_ROWS).sum == 1 + 2 + 2 + 1
    assert meters.meters.metrics().totals.step_rows == 6


def test_what_the_engine_keeps_is_shown_as_it_is_now() -> None:
    meters = Meters()
    engine = meters.engine
    load = {"num_running": 2, "num_waiting": 3, "waiting_prompt_tokens": 70}
    engine.load = Load(pages_used=4, pages_cached=1, pages_total=10, **load)
    engine.totals = replace(
        NO_TOTALS, preemptions=1, recomputed_tokens=2, prefix_queried_tokens=30, prefix_hit_tokens=12
    )
    engine.totals = replace(engine.totals, put_off_rows=5)
    engine.paused = engine.broken = True
    engine.generation, engine.compiles, engine.dropped = 7, 8, 9
    assert meters.value(defined.OUTPUTS_RUNNING) == 2
    assert meters.value(defined.OUTPUTS_WAITING) == 3
    assert meters.value(defined.WAITING_PROMPT_TOKENS) == 70
    assert meters.points(defined.KV_PAGES) == {("used",): 4, ("cached",): 1, ("free",): 5}
    assert meters.value(defined.KV_USAGE) == 0.4
    assert meters.value(defined.PREEMPTIONS) == 1
    assert meters.value(defined.TOKENS_RECOMPUTED) == 2
    assert meters.value(defined.PREFIX_CACHE_QUERIED) == 30
    assert meters.value(defined.PREFIX_CACHE_HIT) == 12
    assert meters.value(defined.GRAMMAR_PUT_OFF_ROWS) == 5
    assert meters.value(defined.PAUSED) == 1
    assert meters.value(defined.WEIGHTS_BROKEN) == 1
    assert meters.value(defined.WEIGHTS_GENERATION) == 7
    assert meters.value(defined.COMPILES_AFTER_WARMUP) == 8
    assert meters.value(defined.JOURNAL_DROPPED) == 9
    assert meters.points(defined.MEMORY) == {("weights",): 1000}
    assert meters.points(defined.BUILD_INFO) == {
        ("1.2", "0.9", "cpu", "toy", "bfloat16", "none", "bfloat16"): 1
    }
    engine.paused = engine.broken = False
    assert meters.value(defined.PAUSED) == meters.value(defined.WEIGHTS_BROKEN) == 0


def test_all_instruments_are_shown_and_known_labels_are_there_from_the_start() -> None:
    """So a rate over a counter sees its first increment. The updater has the meters of weight updates."""
    meters = Meters()
    shown = {m.instrument: m.points for m in meters.registry.snapshot().metrics}
    of_updates = {one for one in defined.ENGINE_INSTRUMENTS if one.name.startswith("penstock.weights.")}
    of_updates -= {defined.WEIGHTS_GENERATION, defined.WEIGHTS_BROKEN}
    assert set(shown) == set(defined.ENGINE_INSTRUMENTS) - of_updates
    rare = (defined.OUTPUTS_FAILED, defined.SPECULATION_PROPOSED, defined.SPECULATION_ACCEPTED)
    for instrument, points in shown.items():
        if instrument.kind is Kind.COUNTER and instrument not in rare:
            assert points, instrument.name
            assert set(points.values()) == {0}, instrument.name


def test_rates_and_shares_of_the_last_seconds() -> None:
    """All of it in less than a second, so it counts as one second."""
    meters = Meters()
    a = request("a", 5)
    meters.read([queued(0, a), step(10, [prefill("a", 5)], {"a": 1}, new=[a], shape=StepShape(8, 4))])
    meters.read([step(at, [decode("a")], {"a": 1}, shape=StepShape(2, 2)) for at in (20, 30)])
    meters.engine.totals = replace(NO_TOTALS, prefix_queried_tokens=40, prefix_hit_tokens=10)
    meters.read([ended(a, timing(0, 0, 10, 30), 3)])
    rates = meters.meters.metrics().rates
    seconds = 5 / rates.prompt_tokens_per_s
    assert 1 <= seconds <= 60
    assert rates.generated_tokens_per_s * seconds == pytest.approx(3)
    assert rates.ended_per_s * seconds == pytest.approx(1)
    assert rates.steps_per_s * seconds == pytest.approx(3)
    assert rates.rows_per_step == 1
    assert rates.padding_share == pytest.approx((3 + 1 + 1) / (8 + 2 + 2))
    assert rates.prefix_hit_share == pytest.approx(0.25)


def test_without_anything_all_is_zero() -> None:
    found = Meters().meters.metrics()
    assert found.rates.rows_per_step == found.rates.padding_share == found.rates.prefix_hit_share == 0
    assert found.rates.generated_tokens_per_s == found.rates.accepted_share == 0
    assert found.latencies.inter_token.count == 0
    assert found.latencies.end_to_end.p99 == 0
    assert found.totals.ended == dict.fromkeys(
        [*(reason.value for reason in FinishReason), "cancelled", "error"], 0
    )
    assert found.load == Load.idle(10)
    assert found.started_at_s <= found.at_s


def test_when_entries_were_lost_times_that_they_told_are_not_made_up() -> None:
    """The end of "a" was lost, and the beginning of "b"."""
    meters = Meters()
    a, b = request("a"), request("b")
    meters.read([queued(0, a), step(10, [prefill("a", 3)], {"a": 1}, new=[a])])
    meters.engine.dropped = 5
    meters.read([step(20, [decode("a")], {"a": 1})])
    meters.read([step(500, [decode("a"), decode("b")], {"a": 1, "b": 1})])
    meters.read([step(600, [decode("a"), decode("b")], {"a": 1, "b": 1})])
    meters.read([ended(b, timing(0, 0, 30, 600), 9)])
    assert meters.value(defined.TOKENS_GENERATED) == 6
    assert meters.histogram(defined.INTER_TOKEN_LATENCY).sum == pytest.approx(0.010)
    assert meters.histogram(defined.TIME_TO_FIRST_TOKEN, *GEN_AI).count == 1
    assert meters.histogram(defined.QUEUE_TIME).count == 1
    assert meters.value(defined.OUTPUTS_FINISHED, "max_tokens") == 1
    meters.read([queued(700, a), step(710, [prefill("a", 3)], {"a": 1}, new=[a])])
    assert meters.histogram(defined.TIME_TO_FIRST_TOKEN, *GEN_AI).count == 2, "what is new is measured"


def test_entries_of_other_kinds_are_passed_over() -> None:
    meters = Meters()
    before = meters.all_points()
    meters.read([Changed(START, Paused(InFlightReport())), Preempted(START, ("a",), (1,))])
    assert meters.all_points() == before


def test_metrics_may_be_asked_while_entries_are_read() -> None:
    meters = Meters()
    done = threading.Event()
    failures: list[Exception] = []

    def ask() -> None:
        try:
            while not done.is_set():
                meters.meters.metrics()
                meters.registry.snapshot()
        except Exception as error:  # noqa: BLE001  whatever it is, the test fails
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(300):
        one = request(f"r{i}")
        meters.read(
            [queued(i, one), step(i + 5, [prefill(one.request_id, 3)], {one.request_id: 1}, new=[one])]
        )
        error = type(f"Error{i % 50}", (Exception,), {})()
        meters.read([ended(one, timing(i, i, i + 5, i + 5), 1, error=error)])
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert meters.value(defined.OUTPUTS_FINISHED, "error") == 300
    total = sum(
        point.count
        for point in meters.points(defined.REQUEST_DURATION).values()
        if isinstance(point, HistogramPoint)
    )
    assert total == 300
