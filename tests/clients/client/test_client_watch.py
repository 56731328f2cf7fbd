"""Watching a server's load with both clients, against the handwritten server."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Draining,
    Forbidden,
    InvalidRequest,
    LatencySummary,
    LoadReport,
    NotReady,
    ProtocolError,
    RequestPhase,
    Retry,
    WeightsVersion,
)
from penstock.v1 import control_pb2, telemetry_pb2
from tests.clients.failing import Failure
from tests.clients.watching import DRAINING, MESSAGE, REPORT

NOT_READY = Failure(grpc.StatusCode.UNAVAILABLE, "NOT_READY", "the server loads")


def watch_sync(addr, most, options, retries):
    with Client(addr, retries=retries) as client, client.watch_load(**options) as stream:
        return [report for _, report in zip(range(most), stream, strict=False)]


def watch_async(addr, most, options, retries):
    async def go():
        found = []
        async with AsyncClient(addr, retries=retries) as client, client.watch_load(**options) as stream:
            async for report in stream:
                found.append(report)
                if len(found) == most:
                    break
        return found

    return asyncio.run(go())


@pytest.fixture(params=[watch_sync, watch_async], ids=["sync", "async"])
def watch(request, server):
    def run(most=1, retries=None, **options):
        return request.param(server.addr, most, options, retries)

    return run


def test_a_report_as_a_value(watch):
    assert watch(max_requests=10) == [REPORT]


def test_what_was_asked_reaches_the_server(server, watch):
    watch()
    watch(interval=0.25, max_requests=2)
    assert server.calls == [
        telemetry_pb2.WatchLoadRequest(),
        telemetry_pb2.WatchLoadRequest(interval=Duration(nanos=250_000_000), max_requests=2),
    ]
    assert all(left is None or left > 1e9 for left in server.remaining)  # there is no deadline


def test_a_server_without_metrics(server, watch):
    """Then the latest of what is told are the load and its limits; nothing that was not told is made up."""
    bare = control_pb2.WatchLoadResponse(load=MESSAGE.load, at=MESSAGE.at, max_running_requests=64)
    server.watch.reports = (bare,)
    (report,) = watch()
    assert report == LoadReport(REPORT.at, REPORT.load, kv_pages_cached=0, max_running_requests=64)
    assert report.load.weights == WeightsVersion("step-7", 7)


def test_no_latency_is_not_a_latency_of_zero(watch):
    (report,) = watch()
    assert report.latencies.queue == LatencySummary(0, None, None, None, None)


def test_a_phase_of_a_newer_server(server, watch):
    newer = control_pb2.WatchLoadResponse(requests=[telemetry_pb2.RequestStatus(phase=77)])  # type: ignore[arg-type]
    server.watch.reports = (newer,)
    (report,) = watch(max_requests=1)
    assert report.requests[0].phase is RequestPhase.UNKNOWN


@pytest.mark.parametrize("seconds", [10**15, -(10**15)])
def test_a_time_that_does_not_exist(server, watch, seconds):
    """It is the server's fault, and ends the watch."""
    server.watch.reports = (control_pb2.WatchLoadResponse(at=Timestamp(seconds=seconds)),)
    with pytest.raises(ProtocolError, match="a time that does not exist"):
        watch(most=2)
    assert server.watch.cancelled.wait(30)


def test_leaving_the_block_ends_the_watch_on_the_server(server, watch):
    watch()
    assert server.watch.cancelled.wait(30)


def test_every_report_comes_and_then_how_it_ended(server, watch):
    server.watch.reports = (MESSAGE, MESSAGE, MESSAGE)
    server.watch.failures = [DRAINING]
    with pytest.raises(Draining):
        watch(most=4)
    assert len(watch(most=3)) == 3


def test_a_watch_that_cannot_begin_is_tried_again_and_one_that_has_begun_is_not(server, watch):
    retry = Retry(attempts=3, initial_delay=0.01)
    server.failures = [NOT_READY, NOT_READY]
    assert watch(retries=retry, max_requests=3) == [REPORT]
    assert len(server.calls) == 3
    server.failures = [NOT_READY] * 3
    with pytest.raises(NotReady):
        watch(retries=retry)
    server.watch.failures = [DRAINING]
    with pytest.raises(Draining):
        watch(most=2, retries=retry)
    assert len(server.calls) == 3 + 3 + 1


def test_a_caller_without_control_may_not_list_requests(server, watch):
    server.watch.may_list = False
    with pytest.raises(Forbidden):
        watch(max_requests=1)
    assert watch() != []


def test_its_own_timeout(watch):
    with pytest.raises(DeadlineExceeded):
        watch(most=2, timeout=0.2)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"interval": 1e30}, ["interval"]),
        ({"interval": float("nan"), "max_requests": -1}, ["interval", "max_requests"]),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_here(server, watch, options, fields):
    with pytest.raises(InvalidRequest) as refused:
        watch(**options)
    assert [violation.field for violation in refused.value.violations] == fields
    assert server.calls == []


def test_another_thread_may_close_it(server):
    with Client(server.addr) as client:
        stream = client.watch_load()
        next(stream)
        threading.Timer(0.1, stream.close).start()
        assert list(stream) == []
    assert server.watch.cancelled.wait(30)


def test_another_task_may_close_it(server):
    async def go():
        async with AsyncClient(server.addr) as client:
            stream = client.watch_load()
            await anext(stream)
            waiting = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0.05)
            await stream.aclose()
            assert await asyncio.wait_for(waiting, 20) is None

    asyncio.run(go())
    assert server.watch.cancelled.wait(30)


def test_dropping_it_ends_the_watch(server):
    with Client(server.addr) as client:
        next(client.watch_load())
        assert server.watch.cancelled.wait(30)
