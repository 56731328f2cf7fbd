"""What a server measures of itself, read from its own port while it serves."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from functools import partial
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import rpc_attributes
from opentelemetry.semconv._incubating.metrics import rpc_metrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from penstock.runtime.errors import ConfigError
from penstock.runtime.measuring.engine_instruments import ENGINE_INSTRUMENTS
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.snapshot import HistogramPoint
from penstock.service.errors import Busy
from penstock.service.options import ServerOptions
from penstock.service.server import PenstockServer
from penstock.service.telemetry.metrics import exports, service_meters
from penstock.service.telemetry.metrics import service_instruments as defined
from penstock.service.telemetry.metrics.endpoint import Pages
from penstock.service.telemetry.metrics.families import family_name
from penstock.service.telemetry.metrics.options import MetricsOptions
from penstock.service.telemetry.metrics.service_meters import UNKNOWN_METHOD, ServiceMeters
from penstock.service.threads.lanes import Lanes
from penstock.v1 import control_pb2
from tests.service.rig import Rig, collect, failure_of, fake, generate, serving, stream, until
from tests.service.telemetry.metrics.sample_metrics import promtool_complaints
from tests.support.otlp import WAIT_S, Recorder

PORT = MetricsOptions(metrics_port=0)
GENERATE = "penstock.v1.InferenceService/Generate"
CALLS = "rpc_server_call_duration_seconds_count"


@pytest.fixture(autouse=True)
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page from a moment ago is served again."""
    monkeypatch.setattr(exports, "Pages", partial(Pages, keep_s=0.0))


def metrics_on() -> Any:
    return serving(metrics=PORT)


async def page_of(server: PenstockServer, accept: str = "application/openmetrics-text") -> str:
    def read() -> str:
        request = urllib.request.Request(
            f"http://{server.metrics.address}/metrics", headers={"Accept": accept}
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            text: str = reply.read().decode()
            return text

    return await asyncio.to_thread(read)


async def value(rig: Rig, name: str, **labels: str) -> float:
    """Return the value of the only sample with this name and, among others, these labels; 0 if there is
    none.
    """
    found = [
        sample.value
        for family in text_string_to_metric_families(await page_of(rig.server))
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1, found
    return found[0] if found else 0


async def counts(rig: Rig, method: str, code: str, number: int) -> None:
    """Wait until the server has counted so many calls: it counts one when its answer has gone."""
    labels = {"rpc_system_name": "grpc", "rpc_method": method, "rpc_response_status_code": code}
    async with asyncio.timeout(WAIT_S):
        while await value(rig, CALLS, **labels) != number:  # noqa: ASYNC110 -- what is watched has no event
            await asyncio.sleep(0.005)


async def test_calls_are_counted_by_method_and_status():
    async with metrics_on() as rig:
        await rig.inference.Generate(generate("y"))
        await rig.inference.Generate(generate("y"))
        await failure_of(rig.inference.Generate(generate("y", stopping={"max_tokens": 0})))
        await collect(rig.inference.Stream(stream("y")))
        await counts(rig, GENERATE, "OK", 2)
        await counts(rig, GENERATE, "INVALID_ARGUMENT", 1)
        await counts(rig, "penstock.v1.InferenceService/Stream", "OK", 1)


async def test_methods_that_the_server_does_not_have_are_one():
    async with metrics_on() as rig:
        for name in ("a", "b", "c"):
            call: Any = rig.channel.unary_unary(f"/some.Service/{name}")
            await failure_of(call(b""))
        await counts(rig, UNKNOWN_METHOD, "UNIMPLEMENTED", 3)
        assert "some.Service" not in await page_of(rig.server)


async def test_cancelled_calls_are_counted():
    async with serving(fake(hold=True), metrics=PORT) as rig:
        call = rig.inference.Stream(stream("a"))
        await call.read()
        assert await value(rig, "penstock_calls_active", kind="work") == 1
        call.cancel()
        await until(lambda: rig.server.admission.active_work == 0)
        await counts(rig, "penstock.v1.InferenceService/Stream", "CANCELLED", 1)
        assert await value(rig, "penstock_calls_active", kind="work") == 0


async def test_errors_are_counted_by_reason():
    async with metrics_on() as rig:
        for _ in range(2):
            await failure_of(rig.inference.Generate(generate("y", stopping={"max_tokens": 0})))
        assert await value(rig, "penstock_requests_refused_total", reason="INVALID_FIELD") == 2


async def test_the_port_answers_before_there_is_a_model():
    gate = threading.Event()
    async with serving(fake(start=lambda: gate.wait(WAIT_S)), start=False, metrics=PORT) as rig:
        starting = asyncio.create_task(rig.server.start_engine())
        await failure_of(rig.inference.Generate(generate("y")))
        assert await value(rig, "penstock_ready") == 0
        assert await value(rig, "penstock_requests_refused_total", reason="NOT_READY") == 1
        gate.set()
        await starting
        assert await value(rig, "penstock_ready") == 1


async def test_lanes():
    async with metrics_on() as rig:
        lanes = rig.serving.lanes
        gate, entered = threading.Event(), threading.Event()

        def work():
            entered.set()
            assert gate.wait(WAIT_S)

        held = asyncio.create_task(lanes.template(work))
        await asyncio.to_thread(entered.wait, WAIT_S)
        assert await value(rig, "penstock_lane_work", lane="templates") == 1
        assert await value(rig, "penstock_lane_capacity", lane="templates") == 8
        assert await value(rig, "penstock_lane_time_seconds_count", lane="templates") == 0
        gate.set()
        await held
        assert await value(rig, "penstock_lane_work", lane="templates") == 0
        assert await value(rig, "penstock_lane_time_seconds_count", lane="templates") == 1


async def test_what_a_lane_refuses_is_counted():
    registry = Registry()
    lanes = Lanes(ServiceMeters(registry))
    gate = threading.Event()
    lane = lanes.by_name["weights"]
    running = lane.begin(lambda: gate.wait(WAIT_S))
    with pytest.raises(Busy):
        await lane.run(lambda: None, lane.most)
    gate.set()
    await running
    lanes.close()
    (refused,) = [m for m in registry.snapshot().metrics if m.instrument == defined.LANE_REFUSED]
    assert refused.points[("weights",)] == 1
    assert {name for (name,) in refused.points} == set(lanes.by_name), "the others are shown with 0"
    assert sum(refused.points.values()) == 1  # type: ignore[arg-type]


async def test_deltas_that_a_slow_reader_has_merged():
    engine = fake(hold=True)
    async with serving(engine, metrics=PORT) as rig:
        call = rig.inference.Stream(stream("a", min_tokens_per_message=5))
        assert (await call.read()).HasField("started")
        engine.step(5)
        await call.read()
        assert await value(rig, "penstock_streams_merged_total") == 4
        call.cancel()


async def test_bytes_that_wait():
    engine = fake(hold=True)
    async with serving(engine, metrics=PORT) as rig:
        answering = asyncio.create_task(_answered(rig))
        await until(lambda: bool(engine.seen))
        engine.step(3)
        await until(lambda: rig.serving.budget.used > 0)
        assert await value(rig, "penstock_replies_waiting_bytes") > 0
        engine.release()
        await answering


async def _answered(rig: Rig) -> Any:
    return await rig.inference.Generate(generate("a"))


async def test_the_event_loop_is_watched():
    async with metrics_on() as rig:
        async with asyncio.timeout(WAIT_S):
            while await value(rig, "penstock_event_loop_lag_seconds_count") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_the_event_loop_is_no_longer_watched_after_the_end(monkeypatch):
    monkeypatch.setattr(service_meters, "LAG_INTERVAL_S", 0.01)
    registry = Registry()
    lag = service_meters.LoopLag(registry)

    def count() -> int:
        (metric,) = registry.snapshot().metrics
        (point,) = metric.points.values()
        assert isinstance(point, HistogramPoint)
        return point.count

    lag.start()
    await until(lambda: count() >= 2)
    lag.stop()
    counted = count()
    await asyncio.sleep(0.1)
    assert count() == counted


async def test_spans_are_counted():
    recorder = Recorder()
    async with serving(tracing=recorder.tracing, metrics=PORT) as rig:
        await rig.inference.Generate(generate("y"))
        exported = len(recorder.finished)
        assert exported > 0
        assert await value(rig, "penstock_spans_total", outcome="exported") == exported
        assert await value(rig, "penstock_spans_total", outcome="dropped") == 0


async def test_without_traces_there_are_no_spans():
    async with metrics_on() as rig:
        assert "penstock_spans" not in await page_of(rig.server)


async def test_the_engine_is_measured_beside():
    async with metrics_on() as rig:
        reply = await rig.inference.Generate(generate("w"))
        assert reply.outputs[0].text == "xyz"
        assert await value(rig, "penstock_tokens_generated_total") == 4  # with the end token
        assert await value(rig, "penstock_outputs_finished_total", reason="eos") == 1
        shown = {
            family.name
            for family in text_string_to_metric_families(await page_of(rig.server))
            if not family.name.startswith(("process_", "python_"))
        }
        always = {family_name(one) for one in (*ENGINE_INSTRUMENTS, *defined.SERVICE_INSTRUMENTS)}
        assert shown <= always
        assert always - shown <= WITHOUT_VALUES


WITHOUT_VALUES = {
    *("penstock_spans", "penstock_lane_time_seconds", "penstock_requests_refused"),
    *("penstock_outputs_failed", "penstock_memory_bytes", "penstock_adapter_requests"),
    *("penstock_speculation_proposed", "penstock_speculation_accepted"),
    *(family_name(one) for one in ENGINE_INSTRUMENTS if one.name.startswith("penstock.weights.")),
}
"""Metrics that have no values there: without traces, errors and adapters, and of an engine that is a toy."""


async def test_exemplars_lead_to_the_trace_of_the_request():
    recorder = Recorder()
    async with serving(tracing=recorder.tracing, metrics=PORT) as rig:
        await rig.inference.Generate(generate("y"))
        page = await page_of(rig.server)
    (call,) = [span for span in recorder.finished if span.name == GENERATE]
    spans = {span.span_id for span in recorder.finished if span.trace_id == call.trace_id}
    found = {
        (family.name, sample.exemplar.labels["trace_id"], sample.exemplar.labels["span_id"])
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert {trace for _, trace, _ in found} == {call.trace_id}
    assert {span for _, _, span in found} <= spans
    assert {name for name, _, _ in found} >= {
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_request_duration_seconds",
    }


async def test_without_traces_there_are_no_exemplars():
    async with metrics_on() as rig:
        await rig.inference.Generate(generate("y"))
        assert "trace_id" not in await page_of(rig.server)


async def test_a_dead_engine_can_still_be_asked():
    async with metrics_on() as rig:
        await rig.inference.Generate(generate("y"))
        rig.engine.die()
        await asyncio.wait_for(rig.server.wait_for_failure(), WAIT_S)
        assert await value(rig, "penstock_ready") == 0
        assert await value(rig, "penstock_outputs_finished_total", reason="eos") == 1


async def test_vllms_names():
    async with serving(metrics=MetricsOptions(metrics_port=0, metrics_names="vllm")) as rig:
        await rig.inference.Generate(generate("w"))
        assert await value(rig, "vllm:generation_tokens_total", model_name="fake") == 4
        assert await value(rig, "vllm:request_success_total", finished_reason="stop") == 1
        assert await value(rig, "vllm:e2e_request_latency_seconds_count", engine="0") == 1
        labels = {"model_name": "fake", "block_size": "64", "num_gpu_blocks": str(rig.engine.info.num_pages)}
        assert await value(rig, "vllm:cache_config_info", **labels) == 1
    async with metrics_on() as rig:
        assert "vllm:" not in await page_of(rig.server)


async def test_promtool_has_nothing_to_say_of_a_server():
    async with metrics_on() as rig:
        await rig.inference.Generate(generate("y"))
        await failure_of(rig.inference.Generate(generate("y", stopping={"max_tokens": 0})))
        page = await page_of(rig.server, "")
        assert "penstock_requests_refused_total" in page
        assert promtool_complaints(page.encode()) == []


async def test_the_port_is_closed_with_the_server():
    async with metrics_on() as rig:
        address = rig.server.metrics.address
        assert address is not None
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


async def test_without_the_option_there_is_no_port():
    async with serving() as rig:
        assert rig.server.metrics.address is None


async def test_a_port_that_is_taken_is_told_at_once():
    async with metrics_on() as rig:
        assert rig.server.metrics.address is not None
        taken = int(rig.server.metrics.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken}"):
            async with serving(metrics=MetricsOptions(metrics_port=taken)):
                pass
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{rig.server.port}"):
            async with serving(metrics=MetricsOptions(metrics_port=rig.server.port)):
                pass
        await rig.control.GetLoad(control_pb2.GetLoadRequest())


async def test_a_server_that_cannot_listen_gives_the_port_back():
    async with metrics_on() as rig:
        with socket.create_server(("127.0.0.1", 0)) as found:
            free = found.getsockname()[1]
        options = ServerOptions(port=rig.server.port, metrics=MetricsOptions(metrics_port=free))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{rig.server.port}"):
            PenstockServer(options)
        socket.create_server(("127.0.0.1", free)).close()


def test_names_are_those_of_the_semantic_conventions():
    """The conventions are the witness, so that dashboards made for them read our metrics."""
    assert defined.CALL_DURATION.name == rpc_metrics.RPC_SERVER_CALL_DURATION
    assert defined.CALL_DURATION.labels == (
        rpc_attributes.RPC_SYSTEM_NAME,
        rpc_attributes.RPC_METHOD,
        rpc_attributes.RPC_RESPONSE_STATUS_CODE,
    )
    assert rpc_attributes.RpcSystemNameValues.GRPC.value == "grpc"
