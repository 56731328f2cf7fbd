"""Weight updates of both clients against a server written by hand, which checks every checksum itself."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import SimpleNamespace

import grpc
import ml_dtypes
import numpy as np
import pytest
from google.protobuf import text_format
from safetensors.numpy import save_file

from penstock import client as api
from penstock.client import AsyncClient, Client, Retry, TensorInfo, TensorReason, UpdateOutcome
from penstock.client.weights import sending
from penstock.v1 import weights_pb2
from tests.clients.failing import Failure

Code = grpc.StatusCode
LARGE = np.arange(1 << 20, dtype=np.float32)
"""Four MiB, and so 4096 chunks."""


def push_sync(addr, args, options, **client):
    with Client(addr, **client) as made:
        return made.update_weights(*args, **options)


def push_async(addr, args, options, **client):
    async def go():
        async with AsyncClient(addr, **client) as made:
            return await made.update_weights(*args, **options)

    return asyncio.run(go())


@pytest.fixture(params=[push_sync, push_async], ids=["sync", "async"])
def push(request, server):
    """Push to the fake server with one of the clients."""

    def call(*args, client=None, **options):
        return request.param(server.addr, args, {"label": "step-1", **options}, **(client or {}))

    return call


def test_tensors_arrive_in_chunks_and_the_report_is_a_value(server, push):
    big, scalar = np.arange(1000, dtype=np.float32), np.float16(1.5)
    found = push({"big": big, "scalar": scalar, "none": np.zeros((0, 4), np.int8)})
    assert server.updates.received == [{"big": big.tobytes(), "scalar": scalar.tobytes(), "none": b""}]
    assert server.updates.chunk_sizes == [1024, 1024, 1024, 928, 2]
    assert server.updates.commits == [4002]
    (begin,) = server.updates.begins
    specs = [
        (spec.name, weights_pb2.DataType.Name(spec.dtype), [*spec.shape]) for spec in begin.manifest.tensors
    ]
    assert specs == [
        ("big", "DATA_TYPE_F32", [1000]),
        ("scalar", "DATA_TYPE_F16", []),
        ("none", "DATA_TYPE_I8", [0, 4]),
    ]
    assert found == api.WeightsUpdate(
        update_id=begin.update_id,
        outcome=UpdateOutcome.COMMITTED,
        current=api.WeightsVersion("step-1", 1),
        previous=api.WeightsVersion("initial", 0),
        tensors_updated=3,
        bytes_received=4002,
        staged_s=2.5,
        paused_s=0.25,
        in_flight=api.InFlight(waited=1, aborted=2, kept=3, recomputed=4),
        digest=b"\x01\x02",
    )
    assert begin.update_id


def test_every_update_gets_an_id_of_its_own(server, push):
    for _ in range(2):
        push({"a": LARGE[:1]})
    first, second = server.updates.begins
    assert first.update_id != second.update_id


def test_options_are_sent_and_others_stay_unset(server, push):
    push({})
    (begin,) = server.updates.begins
    assert [field.name for field, _ in begin.ListFields()] == ["update_id", "version_label", "manifest"]
    push(
        {},
        label="step-2",
        update_id="u",
        policy="recompute",
        drain_timeout_s=1.5,
        partial=True,
        staging="in_place",
        expected_generation=api.WeightsVersion("x", 0),
        stage_only=True,
        refuse_non_finite=True,
    )
    assert server.updates.begins[1] == text_format.Parse(
        """
        update_id: "u" version_label: "step-2" in_flight: IN_FLIGHT_POLICY_RECOMPUTE
        drain_timeout { seconds: 1 nanos: 500000000 } partial: true staging: STAGING_MODE_IN_PLACE
        expected_generation: 0 stage_only: true refuse_non_finite: true manifest {}
        """,
        weights_pb2.UpdateWeightsBegin(),
    )


def test_a_uri_is_left_to_the_server(server, push):
    assert push(uri="file:///models/step-1").outcome is UpdateOutcome.COMMITTED
    (begin,) = server.updates.begins
    assert (begin.uri, begin.HasField("manifest")) == ("file:///models/step-1", False)
    assert (server.updates.chunk_sizes, server.updates.commits) == ([], [0])
    assert len(server.calls) == 1  # the size of chunks is not asked for


def test_only_validating_sends_no_tensor(server, push):
    found = push({"a": LARGE}, validate_only=True)
    assert found.outcome is UpdateOutcome.VALIDATED
    assert server.updates.chunk_sizes == []
    assert [spec.name for spec in server.updates.begins[0].manifest.tensors] == ["a"]


def test_only_staging(push):
    assert push({"a": LARGE[:1]}, stage_only=True).outcome is UpdateOutcome.STAGED


REFUSED = text_format.Parse(
    """
    errors { name: "new" reason: TENSOR_ERROR_REASON_UNKNOWN_NAME received { name: "new" dtype: 3 shape: 4 } }
    errors { name: "old" reason: TENSOR_ERROR_REASON_MISSING expected { name: "old" dtype: 1 } }
    errors { name: "odd" reason: 99 }
    truncated: true
    """,
    weights_pb2.TensorErrors(),
)


@pytest.mark.parametrize(
    ("code", "reason"), [(Code.INVALID_ARGUMENT, "INVALID_TENSORS"), (Code.DATA_LOSS, "CHECKSUM_MISMATCH")]
)
def test_refused_tensors_are_listed_and_nothing_more_is_sent(server, push, code, reason):
    server.updates.failure_after = (1, Failure(code, reason, "3 tensors are wrong", tensors=REFUSED))
    sent = []
    with pytest.raises(api.TensorsRefused, match="3 tensors are wrong") as caught:
        push({"a": LARGE}, progress=lambda now, total: sent.append(now))
    assert caught.value.tensors == (
        api.TensorProblem("new", TensorReason.UNKNOWN_NAME, received=TensorInfo("new", "f32", (4,))),
        api.TensorProblem("old", TensorReason.MISSING, expected=TensorInfo("old", "bf16", ())),
        api.TensorProblem("odd", TensorReason.UNKNOWN),
    )
    assert caught.value.has_more
    assert caught.value.update_id == server.updates.begins[0].update_id
    assert max(sent, default=0) < LARGE.nbytes
    assert server.updates.commits == []


def test_an_early_answer_ends_the_sending(server, push):
    """As after a reply that was lost, or when another server of the same trainer was first."""
    server.updates.answer_after = 3
    sent = []
    found = push({"a": LARGE}, progress=lambda now, total: sent.append(now))
    assert found.outcome is UpdateOutcome.ALREADY_COMMITTED
    assert max(sent) < LARGE.nbytes
    assert server.updates.commits == []


def test_a_lost_reply_is_asked_again_by_hand(server, push):
    server.updates.lose_reply = True
    with pytest.raises(api.Unreachable) as caught:
        push({"a": LARGE[:1]})
    again = push({"a": LARGE[:1]}, update_id=caught.value.update_id)
    assert again.outcome is UpdateOutcome.ALREADY_COMMITTED
    assert server.updates.committed == [caught.value.update_id]


def test_a_lost_reply_is_asked_again_by_retries(server, push):
    server.updates.lose_reply = True
    found = push({"a": LARGE[:1]}, client={"retries": Retry(2, initial_delay=0.01)})
    assert found.outcome is UpdateOutcome.ALREADY_COMMITTED
    assert server.updates.committed == [found.update_id]


def test_a_broken_update_is_sent_again_whole_under_its_id(server, push):
    server.updates.failure_after = (3, Failure(Code.UNAVAILABLE))
    found = push({"a": LARGE[:1000]}, client={"retries": Retry(2, initial_delay=0.01)})
    assert found.outcome is UpdateOutcome.COMMITTED
    assert [begin.update_id for begin in server.updates.begins] == [found.update_id] * 2
    assert server.updates.received[1] == {"a": LARGE[:1000].tobytes()}


def test_after_a_broken_connection_the_own_lost_attempt_may_still_be_under_way(server, push):
    under_way = Failure(Code.ABORTED, "UPDATE_UNDER_WAY")
    server.failure, server.failing_calls = under_way, {4}  # 1: server info, 2: the call that breaks
    server.updates.failure_after = (1, Failure(Code.UNAVAILABLE))
    server.failing_calls = {3}
    assert push({"a": LARGE[:1]}, client={"retries": Retry(3, initial_delay=0.01)}).update_id
    assert len(server.calls) == 4


def test_an_update_of_somebody_else_is_final(server, push):
    server.failure, server.failing_calls = Failure(Code.ABORTED, "UPDATE_UNDER_WAY"), {2}
    with pytest.raises(api.UpdateUnderWay):
        push({"a": LARGE[:1]}, client={"retries": Retry(3, initial_delay=0.01)})
    assert len(server.calls) == 2


class Unexpected(Exception):
    """Raised by a caller's own function."""


def test_what_the_callers_function_raises_ends_the_update(server, push):
    def fail(sent, total):
        if sent >= 2048:
            raise Unexpected

    with pytest.raises(Unexpected):
        push({"a": LARGE}, progress=fail)
    assert server.updates.ended.wait(30)
    assert server.updates.commits == []


def test_a_file_that_is_cut_short_while_it_is_sent_ends_the_update(server, push, tmp_path):
    file = tmp_path / "a.safetensors"
    save_file({"a": np.ones(9999, np.int8)}, file)
    with pytest.raises(OSError, match="shorter while it was read"):
        push(file, progress=lambda sent, total: file.write_bytes(b"") if sent == 2048 else None)
    assert server.updates.ended.wait(30)
    assert server.updates.commits == []


def test_progress_is_told_in_bytes(push):
    told = []
    push({"a": LARGE[:300], "b": LARGE[:10]}, progress=lambda sent, total: told.append((sent, total)))
    assert told == [(1024, 1240), (1240, 1240)]  # the two small chunks share a message


@pytest.mark.parametrize(
    ("progress", "is_terminal", "shown"),
    [(True, True, True), (None, True, True), (False, True, False), (True, False, False)],
)
def test_the_bar_is_for_terminals(push, capsys, monkeypatch, progress, is_terminal, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    push({"a": LARGE[:1]}, progress=progress)
    assert ("Sending weights" in capsys.readouterr().err) == shown


def test_a_server_that_reads_slowly_is_not_sent_more_than_a_little(server):
    """What has not been read waits in buffers, and so must not be all of it."""
    many = np.zeros(64 << 20, np.int8)
    server.updates.hold_after = 2
    server.updates.failure_after = (2, Failure(Code.INTERNAL))
    sent = [0]
    failures = []

    def run():
        try:
            push_sync(
                server.addr, ({"a": many},), {"label": "l", "progress": lambda now, _: sent.append(now)}
            )
        except api.PenstockClientError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert server.updates.holds.wait(60)
    before = -1
    while before != sent[-1]:  # until it sends nothing for a while
        before = sent[-1]
        time.sleep(0.5)
    assert sent[-1] < 16 << 20
    server.updates.go_on.set()
    thread.join(60)
    assert [type(error) for error in failures] == [api.ServerError]


def test_a_deadline_ends_the_update_and_tells_its_id(server, push):
    server.updates.hold_after = 2
    for timeout in (1, 5, 25):  # a busy machine may need longer until the update has begun
        with pytest.raises(api.DeadlineExceeded) as caught:
            push({"a": LARGE}, timeout=timeout)
        if server.updates.begins:
            break
    assert caught.value.update_id == server.updates.begins[0].update_id
    assert server.updates.ended.wait(30)


async def test_a_cancelled_task_ends_its_update(server):
    server.updates.hold_after = 2
    async with AsyncClient(server.addr) as client:
        task = asyncio.create_task(client.update_weights({"a": LARGE}, label="l"))
        assert await asyncio.to_thread(server.updates.holds.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(server.updates.ended.wait, 30)
    assert server.updates.commits == []


async def test_an_update_whose_client_is_closed_is_cancelled(server):
    server.updates.hold_after = 2
    client = AsyncClient(server.addr)
    task = asyncio.create_task(client.update_weights({"a": LARGE}, label="l", update_id="u"))
    assert await asyncio.to_thread(server.updates.holds.wait, 30)
    await client.close()
    with pytest.raises(api.Cancelled):
        await task


def test_an_interrupt_ends_the_update(server, monkeypatch):
    server.updates.hold_after = 2

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            assert server.updates.holds.wait(30)
            raise KeyboardInterrupt

    monkeypatch.setattr(sending, "threading", SimpleNamespace(Event=Interrupted))
    with pytest.raises(KeyboardInterrupt), Client(server.addr) as client:
        client.update_weights({"a": LARGE}, label="l")
    assert server.updates.ended.wait(30)
    assert server.updates.commits == []


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((), {}, TypeError, "give either tensors .* or uri"),
        (({},), {"uri": "file:///x"}, TypeError, "give either tensors .* or uri"),
        ((7,), {}, TypeError, "a mapping of names to arrays or a path, not int"),
        (({},), {"label": None}, TypeError, "give a label"),
        (({},), {"polcy": "wait"}, TypeError, "unknown option 'polcy'; did you mean 'policy'"),
        (
            ({},),
            {"policy": "now", "staging": "disk"},
            api.InvalidRequest,
            "in_flight: .*wait.*staging: .*host",
        ),
        (({},), {"label": 7}, TypeError, "label: "),
        (({},), {"drain_timeout_s": float("nan")}, api.InvalidRequest, "drain_timeout: must be at least 0"),
        (({},), {"expected_generation": -1}, api.InvalidRequest, "expected_generation"),
        (({1: LARGE},), {}, TypeError, "names of tensors are text, not 1"),
        (({"a": [1.0]},), {}, TypeError, "a: list is no array"),
        (
            ({"a": np.zeros(2), "b": LARGE, "c": np.zeros(2, np.int64)},),
            {},
            api.InvalidRequest,
            r"tensors\['a'\]: float64 cannot be sent; convert it to .*tensors\['c'\]: int64",
        ),
    ],
)
def test_wrong_calls_send_nothing(server, push, arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        push(*arguments, **options)
    assert server.calls == []


def test_bfloat16_keeps_its_bits(server, push):
    values = np.array([1.0, -2.5, np.inf], ml_dtypes.bfloat16)
    push({"a": values})
    assert server.updates.received[0]["a"] == bytes.fromhex("803f20c0807f")


async def test_one_server_at_a_time(server, second_server):
    addr = f"{server.addr},{second_server.addr}"
    with Client(addr) as client:
        calls = [
            lambda: client.update_weights({}, label="l"),
            lambda: client.commit_weights("u"),
            lambda: client.discard_weights("u"),
            client.pause,
            client.resume,
        ]
        for call in calls:
            with pytest.raises(ValueError, match="make a client for each address"):
                call()
    async with AsyncClient(addr) as aio:
        for made in (aio.update_weights({}, label="l"), aio.pause(), aio.resume(), aio.commit_weights("u")):
            with pytest.raises(ValueError, match="make a client for each address"):
                await made
    assert server.calls == second_server.calls == []
