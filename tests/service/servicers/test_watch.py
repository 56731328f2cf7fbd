"""WatchLoad: what watchers are told, who is told what, and how a watch ends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.service.limits.admission import Kind
from penstock.service.limits.bounds import Bounds
from penstock.service.listening.listen_options import ListenOptions
from penstock.v1 import control_pb2, inference_pb2, telemetry_pb2
from tests.service.key_rig import CONTROL, as_, key, serving_keys, write
from tests.service.rig import WAIT_S, Kept, Rig, failure_of, fake, generate, serving, until
from tests.support.collector import at_gate
from tests.support.models.toy import toy_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHORT = Duration(nanos=100_000_000)
LONG = Duration(seconds=60)


@contextlib.asynccontextmanager
async def watching(rig: Rig, interval: Duration | None = SHORT, **more: Any) -> AsyncIterator[Any]:
    """Hold a watch, which ends with the block. Arguments of the call are in `call`."""
    call = more.pop("call", {})
    watch = rig.control.WatchLoad(telemetry_pb2.WatchLoadRequest(interval=interval, **more), **call)
    try:
        async with asyncio.timeout(3 * WAIT_S):
            yield watch
    finally:
        watch.cancel()


async def look(rig: Rig, **more: Any) -> control_pb2.WatchLoadResponse:
    """Return the first message of a watch."""
    async with watching(rig, **more) as watch:
        message: control_pb2.WatchLoadResponse = await watch.read()
        return message


async def look_until(rig: Rig, condition: Callable[[control_pb2.WatchLoadResponse], bool]) -> Any:
    """Return the first message for which the condition holds. What is measured is told a moment later."""
    async with watching(rig) as watch:
        while not condition(message := await watch.read()):
            pass
        return message


def num_ended(told: control_pb2.WatchLoadResponse) -> int:
    """How many requests have ended."""
    return sum(count for _, count in told.totals.ended.ListFields())


async def ask(rig: Rig, prompt: str, **fields: Any) -> Any:
    return await asyncio.wait_for(rig.inference.Generate(generate(prompt, **fields)), WAIT_S)


async def test_everything_is_counted_as_its_callers_were_told() -> None:
    """The witnesses are the answers that the callers got."""
    async with serving(fake(page_size=1, cached=["abc", "x"])) as rig:
        answers = [
            await ask(rig, "a"),
            await ask(rig, "abc", sampling={"n": 2}, stopping={"max_tokens": 3}),
            await ask(rig, "xy", stopping={"stop_token_ids": [ord("z")]}),
        ]
        told = await look_until(rig, lambda told: num_ended(told) == 4)
    usages = [answer.usage for answer in answers]
    totals = told.totals
    # a stop token is generated, and left out of what the caller gets
    assert totals.generated_tokens == sum(usage.completion_tokens for usage in usages) + 1
    # the engine counts outputs: the prompt of two outputs counts twice
    assert totals.prompt_tokens == 1 + 3 * 2 + 2
    assert totals.cached_prompt_tokens == 2 * 2 + 1  # never the last token of a prompt, so none of "a"
    assert totals.ended == telemetry_pb2.EndedRequests(eos=1, max_tokens=2, stop=1)
    assert totals.steps.decode > 0
    assert totals.steps.prefill == 3
    steps = totals.steps.decode + totals.steps.prefill
    assert totals.step_rows == steps + 3  # the second request's outputs shared three steps
    assert totals.since.ToNanoseconds() < told.at.ToNanoseconds()
    assert totals.step_time.emit.ToNanoseconds() > 0
    assert told.rates.generated_tokens_per_second > 0
    assert told.rates.rows_per_step == pytest.approx(totals.step_rows / steps)
    # both answers that had tokens one after the other have latencies between them
    assert told.latencies.time_to_first_token.count == 4
    assert told.latencies.end_to_end.count == 4
    assert told.latencies.inter_token.count == totals.generated_tokens - 4
    summary = told.latencies.end_to_end
    assert 0 < summary.p50.ToNanoseconds() <= summary.p99.ToNanoseconds() < WAIT_S * 1e9


async def test_other_ends_are_counted_apart() -> None:
    async with serving(fake(hold=True, max_num_seqs=4)) as rig:
        aborted = asyncio.ensure_future(rig.inference.Generate(generate("a", request_id="x")))
        gone = rig.inference.Generate(generate("b"))
        failed = asyncio.ensure_future(rig.inference.Generate(generate("c", request_id="f")))
        late = asyncio.ensure_future(
            rig.inference.Generate(generate("d", stopping={"time_limit": Duration(nanos=1000)}))
        )
        await until(lambda: len(rig.engine.seen) == 4)
        await rig.inference.Abort(inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=["x"])))
        gone.cancel()
        await until(lambda: len(rig.engine.cancelled) == 1)
        rig.engine.fail("f", RuntimeError("a bug"))
        await failure_of(failed)
        rig.engine.step()
        await aborted
        await late
        ended = (await look_until(rig, lambda told: num_ended(told) == 4)).totals.ended
    assert ended == telemetry_pb2.EndedRequests(aborted=1, cancelled=1, failed=1, time_limit=1)


async def test_inputs_of_embed_are_counted_with_what_ended() -> None:
    async with serving() as rig:
        inputs = [inference_pb2.EmbedInput(text=text) for text in ("a", "bc")]
        await rig.inference.Embed(inference_pb2.EmbedRequest(inputs=inputs))
        ended = asyncio.wait_for(look_until(rig, lambda told: num_ended(told) == 2), WAIT_S)
        assert (await ended).totals.ended == telemetry_pb2.EndedRequests(prompt_read=2)


async def test_the_load_is_that_of_get_load() -> None:
    async with serving(fake(hold=True, max_num_seqs=2)) as rig:
        calls = [rig.inference.Generate(generate(prompt)) for prompt in ("a", "bb", "ccc")]
        await until(lambda: len(rig.engine.seen) == 3)
        told = await look(rig)
        assert told.load == await rig.control.GetLoad(control_pb2.GetLoadRequest())
        assert (told.load.running_requests, told.load.queued_requests) == (2, 1)
        assert told.max_running_requests == 2
        for call in calls:
            call.cancel()


async def seconds_of(rig: Rig, interval: Duration | None, num_messages: int) -> float:
    """Return how long the first messages of a watch took, the call included: at least the intervals between
    them, however busy the machine is.
    """
    began_s = time.monotonic()
    async with watching(rig, interval) as watch:
        for _ in range(num_messages):
            await watch.read()
    return time.monotonic() - began_s


async def test_the_interval_is_the_callers(rig: Rig) -> None:
    """Messages do not come more often. The first one comes at once, whatever the interval."""
    assert await seconds_of(rig, SHORT, 5) > 0.399
    assert await seconds_of(rig, Duration(seconds=1, nanos=100_000_000), 2) > 1.099
    async with watching(rig, LONG) as watch:
        await watch.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.read(), 0.3)


async def test_without_an_interval_it_is_a_second(rig: Rig) -> None:
    assert await seconds_of(rig, None, 2) > 0.999


async def test_each_message_is_new() -> None:
    async with serving() as rig, watching(rig) as watch:
        for num_asked in range(1, 4):
            await ask(rig, "y")
            while num_ended(message := await watch.read()) < num_asked:
                pass
            assert num_ended(message) == num_asked


async def test_requests_are_listed_oldest_first() -> None:
    """Two run, of which one is the second output of a request, and the third waits: it ran until the prompt
    of the second was computed, which is of a higher priority.
    """
    async with serving(fake(hold=True, max_num_seqs=2, scheduling_policy="priority")) as rig:
        first = rig.inference.Generate(
            generate("abc", request_id="first", priority=5, sampling={"n": 2}, stopping={"max_tokens": 9})
        )
        await until(lambda: len(rig.engine.seen) == 2)
        second = rig.inference.Generate(generate("x", request_id="second"))
        await until(lambda: len(rig.engine.seen) == 3)
        rig.engine.step()
        await until(lambda: rig.engine.load().num_running == 2)  # now the prompt of both is computed
        rig.engine.step()
        await until(lambda: rig.engine.num_steps == 2)
        listed = (await look(rig, max_requests=10)).requests
        ages = [request.age.ToNanoseconds() for request in listed]
        for request in listed:
            request.ClearField("age")
        phase = telemetry_pb2.RequestPhase
        decoding: dict[str, Any] = {"prompt_tokens": 3, "priority": 5, "phase": phase.REQUEST_PHASE_DECODE}
        two: dict[str, Any] = {"computed_tokens": 4, "generated_tokens": 2, "output_index": 0}
        one: dict[str, Any] = {"computed_tokens": 3, "generated_tokens": 1, "output_index": 1}
        assert list(listed) == [
            telemetry_pb2.RequestStatus(request_id="first", **decoding, **two),
            telemetry_pb2.RequestStatus(request_id="first", **decoding, **one),
            telemetry_pb2.RequestStatus(
                request_id="second", prompt_tokens=1, phase=phase.REQUEST_PHASE_WAITING, preemptions=1
            ),
        ]
        assert ages == sorted(ages, reverse=True)
        assert ages[-1] > 0
        assert [r.request_id for r in (await look(rig, max_requests=1)).requests] == ["first"]
        assert not (await look(rig)).requests
        assert len((await look(rig, max_requests=3)).requests) == 3
        first.cancel()
        second.cancel()


async def test_only_control_sees_requests_and_it_sees_whose_they_are(tmp_path) -> None:
    file, engine = tmp_path / "keys.json", fake(hold=True)
    async with serving_keys(file, key("alice"), key("boss", CONTROL), engine=engine) as rig:
        running = rig.inference.Generate(generate("a", request_id="mine"), **as_("alice"))
        await until(lambda: len(engine.seen) == 1)
        async with watching(rig, max_requests=1, call=as_("alice")) as watch:
            failure = await failure_of(watch.read())
        assert (failure.code.name, failure.reason) == ("PERMISSION_DENIED", "FORBIDDEN")
        assert "WatchLoad with max_requests needs a key with the role control" in failure.message
        assert (await look(rig, call=as_("alice"))).load.running_requests == 1
        (request,) = (await look(rig, max_requests=5, call=as_("boss"))).requests
        assert (request.request_id, request.key_id) == ("mine", "alice")
        running.cancel()


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        ([key("boss", CONTROL, revoked=True)], "UNAUTHENTICATED"),
        ([key("other", CONTROL)], "UNAUTHENTICATED"),
        ([key("boss", CONTROL, expires=dt.datetime(2020, 1, 1, tzinfo=dt.UTC))], "KEY_EXPIRED"),
        ([key("boss")], "FORBIDDEN"),
        ([key("boss", CONTROL, models=("other",))], "FORBIDDEN"),
    ],
)
async def test_whose_key_is_taken_away_sees_nothing_more(tmp_path, left, reason) -> None:
    """A watch would otherwise go on for ever, and Abort cannot end it."""
    file = tmp_path / "keys.json"
    async with (
        serving_keys(file, key("boss", CONTROL)) as rig,
        watching(rig, max_requests=1, call=as_("boss")) as watch,
    ):
        await watch.read()
        write(file, left)
        await rig.server.reload_keys()
        assert (await failure_of(_all(watch))).reason == reason


async def test_whose_key_stays_goes_on_when_the_keys_are_read_again(tmp_path) -> None:
    file = tmp_path / "keys.json"
    async with (
        serving_keys(file, key("boss", CONTROL), key("x")) as rig,
        watching(rig, max_requests=1, call=as_("boss")) as watch,
    ):
        await watch.read()
        write(file, [key("boss", CONTROL)])
        await rig.server.reload_keys()
        for _ in range(3):
            assert await watch.read() is not grpc.aio.EOF


async def test_where_control_has_an_address_requests_are_listed_there_only() -> None:
    async with serving(listen=ListenOptions(control_port=0)) as main:
        async with watching(main, max_requests=1) as watch:
            failure = await failure_of(watch.read())
        assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "SERVED_ELSEWHERE")
        assert (await look(main)).HasField("totals")
        address = main.server.addresses.control_address
        assert address is not None
        async with grpc.aio.insecure_channel(address) as channel:
            assert (await look(Rig(main.engine, main.server, channel), max_requests=1)).HasField("totals")


@pytest.mark.parametrize(
    ("interval", "max_requests", "fields"),
    [
        (Duration(), 0, ["interval"]),
        (Duration(nanos=99_999_999), 0, ["interval"]),
        (Duration(seconds=60, nanos=1), 0, ["interval"]),
        (Duration(seconds=-1), 1001, ["interval", "max_requests"]),
        (Duration(seconds=1, nanos=-1), 0, ["interval"]),
    ],
)
async def test_bad_values(rig: Rig, interval: Duration, max_requests: int, fields: list[str]) -> None:
    async with watching(rig, interval, max_requests=max_requests) as watch:
        failure = await failure_of(watch.read())
        assert failure.reason == "INVALID_FIELD"
        assert list(failure.violations) == fields


async def test_a_server_without_metrics_tells_its_load_alone() -> None:
    async with serving(fake(metrics=False)) as rig:
        told = await look(rig, max_requests=1)
    assert told.load.kv_pages_total > 0
    assert not any(told.HasField(field) for field in ("totals", "rates", "latencies"))


async def test_many_watchers_share_what_is_measured() -> None:
    """However many watch, the engine is asked ten times in a second at most."""
    engine, asked = fake(), 0
    measure = engine.metrics

    def metrics(**how: Any) -> Any:
        nonlocal asked
        asked += 1
        return measure(**how)

    engine.metrics = metrics  # type: ignore[method-assign]
    async with serving(engine, bounds=Bounds(max_watch_rpcs=100)) as rig:
        assert asked == 0
        began_s = time.monotonic()

        async def five() -> None:
            async with watching(rig) as watch:
                for _ in range(5):
                    await watch.read()

        await asyncio.gather(*(five() for _ in range(50)))
        passed_s = time.monotonic() - began_s
        await until(lambda: rig.server.admission.active(Kind.WATCH) == 0)
        assert asked <= passed_s / 0.09 + 1


async def test_a_watch_ends_when_its_caller_goes() -> None:
    async with serving() as rig:
        async with watching(rig, LONG) as watch:
            await watch.read()
            assert rig.server.admission.active(Kind.WATCH) == 1
        await until(lambda: rig.server.admission.active(Kind.WATCH) == 0)


async def test_watches_have_places_of_their_own() -> None:
    async with serving(bounds=Bounds(max_watch_rpcs=2, max_control_rpcs=1)) as rig, watching(rig) as watch:
        await watch.read()
        async with watching(rig) as other:
            failure = await failure_of(other.read())
        assert (failure.reason, failure.info.metadata["limit"]) == ("BUSY", "max_watch_rpcs_per_address")
        await rig.control.GetLoad(control_pb2.GetLoadRequest())


@pytest.mark.parametrize("interval", [SHORT, LONG])
async def test_a_server_that_stops_says_so(interval: Duration) -> None:
    """It does so when it begins to stop, and does not wait for the next message."""
    async with serving(fake(hold=True), grace_s=WAIT_S) as rig, watching(rig, interval) as watch:
        await watch.read()
        running = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        stopping = asyncio.ensure_future(rig.server.stop())

        async def rest() -> None:
            while await watch.read() is not grpc.aio.EOF:
                pass

        assert (await failure_of(rest())).reason == "DRAINING"
        assert not running.done()
        rig.engine.release()
        assert (await running).outputs[0].text.endswith("z")
        assert await stopping


async def test_a_dead_engine_is_watched_all_the_same() -> None:
    async with serving() as rig, watching(rig) as watch:
        await watch.read()
        rig.engine.die()
        assert (await watch.read()).load.running_requests == 0


async def test_an_error_of_the_engine_ends_the_watch_and_not_the_next() -> None:
    engine = fake()
    works = engine.metrics

    def fails(**how: Any) -> Any:
        raise RuntimeError("a bug")

    async with serving(engine) as rig, watching(rig) as watch:
        await watch.read()
        engine.metrics = fails  # type: ignore[method-assign]
        failures = [await failure_of(_all(watch))]
        assert failures[0].reason == "INTERNAL"
        engine.metrics = works  # type: ignore[method-assign]
        await asyncio.sleep(0.1)  # while a snapshot is fresh it serves everybody
        assert (await look(rig)).HasField("totals")


async def _all(watch: Any) -> None:
    while await watch.read() is not grpc.aio.EOF:
        pass


async def test_the_real_engine_is_told_as_the_fake_one() -> None:
    """A request of a real scheduler, from its first token to its last. The engine's thread is held at the
    first one, so this also watches an engine that hangs.
    """
    engine = toy_engine()
    async with serving(Kept(cast("Any", engine))) as rig:
        gate = at_gate(engine, tokens=5)
        told = await look(rig, max_requests=5)
        (request,) = told.requests
        assert (request.request_id, request.prompt_tokens) == ("held", 1)
        assert request.phase == telemetry_pb2.RequestPhase.REQUEST_PHASE_DECODE
        assert (told.load.running_requests, told.load.kv_pages_used) == (1, 1)
        gate.open()
        gate.sink.last("held")
        told = await look_until(rig, lambda told: num_ended(told) == 1)
        assert not (await look(rig, max_requests=5)).requests
        assert (told.totals.prompt_tokens, told.totals.generated_tokens) == (1, 5)
        assert told.totals.ended == telemetry_pb2.EndedRequests(max_tokens=1)
        assert told.latencies.end_to_end.count == 1
        assert told.totals.step_time.wait.ToNanoseconds() > 0
    engine.shutdown()
