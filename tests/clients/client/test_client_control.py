"""Staged weights and pauses, in both clients, against the handwritten server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from google.protobuf import text_format

from penstock.client import (
    AsyncClient,
    Client,
    CommittedWeights,
    InFlight,
    InvalidRequest,
    Paused,
    Started,
    UpdateOutcome,
    WeightsVersion,
)
from penstock.v1 import control_pb2

NO_LIMIT_S = 1e9
"""What a server sees of a call without a deadline is more than this."""


def call_sync(addr, method, *args, **options):
    with Client(addr) as client:
        return getattr(client, method)(*args, **options)


def call_async(addr, method, *args, **options):
    async def go():
        async with AsyncClient(addr) as client:
            return await getattr(client, method)(*args, **options)

    return asyncio.run(go())


@pytest.fixture(params=[call_sync, call_async], ids=["sync", "async"])
def call(request, server):
    return lambda *args, **options: request.param(server.addr, *args, **options)


def test_commit(server, call):
    assert call("commit_weights", "u", policy="abort", drain_timeout_s=2) == CommittedWeights(
        update_id="u",
        outcome=UpdateOutcome.COMMITTED,
        current=WeightsVersion("step-1", 1),
        previous=WeightsVersion("initial", 0),
        paused_s=0.25,
        in_flight=InFlight(kept=3),
        digest=b"\x01\x02",
    )
    call("commit_weights", "u")
    assert server.calls == [
        text_format.Parse(text, control_pb2.CommitWeightsRequest())
        for text in (
            'update_id: "u" in_flight: IN_FLIGHT_POLICY_ABORT drain_timeout { seconds: 2 }',
            'update_id: "u"',
        )
    ]
    assert min(server.remaining) > NO_LIMIT_S


def test_discard(server, call):
    assert call("discard_weights", "staged") is True
    assert call("discard_weights", "other") is False


def test_pause_and_resume(server, call):
    paused = call("pause", policy="recompute", free_kv_cache=True, offload_weights=True)
    assert paused == Paused(InFlight(aborted=2), freed_bytes=4096)
    call("pause")
    assert call("resume") is None
    assert server.calls == [
        text_format.Parse(
            "in_flight: IN_FLIGHT_POLICY_RECOMPUTE free_kv_cache: true offload_weights: true",
            control_pb2.PauseRequest(),
        ),
        control_pb2.PauseRequest(),
        control_pb2.ResumeRequest(),
    ]
    assert min(server.remaining) > NO_LIMIT_S


def test_every_wrong_value_is_told_and_nothing_is_sent(server, call):
    with pytest.raises(InvalidRequest) as caught:
        call("pause", policy="stop", drain_timeout_s=-1)
    assert [v.field for v in caught.value.violations] == ["in_flight", "drain_timeout"]
    assert server.calls == []


def test_info_tells_the_weights_in_use(server, call):
    server.model_info = text_format.Parse(
        'weights_digest: "\\001" weights_since { seconds: 86400 nanos: 500000000 } staged_update_id: "u"',
        control_pb2.GetModelInfoResponse(),
    )
    info = call("model_info")
    assert (info.weights_digest, info.staged_update_id) == (b"\x01", "u")
    assert info.weights_since == datetime(1970, 1, 2, 0, 0, 0, 500_000, tzinfo=UTC)


def test_a_started_stream_tells_of_a_pause(server):
    server.replies[0].started.paused = True
    with Client(server.addr) as client, client.stream("p") as stream:
        started = next(stream)
    assert isinstance(started, Started)
    assert started.paused
