"""Every reason and every status becomes its class of error, with what the server said."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock import client as api
from penstock.client import AsyncClient, Client
from penstock.client.error_table import BY_CODE, BY_REASON

Code = grpc.StatusCode

REASONS = [
    ("INVALID_FIELD", Code.INVALID_ARGUMENT, api.InvalidRequest),
    ("PROMPT_TOO_LONG", Code.INVALID_ARGUMENT, api.PromptTooLong),
    ("EXCEEDS_KV_CAPACITY", Code.INVALID_ARGUMENT, api.ExceedsKVCapacity),
    ("UNSUPPORTED_FEATURE", Code.UNIMPLEMENTED, api.Unsupported),
    ("SERVED_ELSEWHERE", Code.UNIMPLEMENTED, api.ServedElsewhere),
    ("UNKNOWN_MODEL", Code.NOT_FOUND, api.UnknownModel),
    ("UNKNOWN_ADAPTER", Code.NOT_FOUND, api.UnknownAdapter),
    ("ADAPTER_FORMAT", Code.INVALID_ARGUMENT, api.AdapterRefused),
    ("ADAPTER_EXISTS", Code.FAILED_PRECONDITION, api.AdapterExists),
    ("TOO_MANY_ADAPTERS", Code.RESOURCE_EXHAUSTED, api.TooManyAdapters),
    ("DUPLICATE_REQUEST_ID", Code.ALREADY_EXISTS, api.DuplicateRequestId),
    ("QUEUE_FULL", Code.RESOURCE_EXHAUSTED, api.QueueFull),
    ("DRAINING", Code.UNAVAILABLE, api.Draining),
    ("NOT_READY", Code.UNAVAILABLE, api.NotReady),
    ("BUSY", Code.RESOURCE_EXHAUSTED, api.Busy),
    ("COSTLY_GRAMMAR", Code.RESOURCE_EXHAUSTED, api.CostlyGrammar),
    ("RATE_LIMITED", Code.RESOURCE_EXHAUSTED, api.RateLimited),
    ("RESPONSE_TOO_LARGE", Code.INVALID_ARGUMENT, api.ResponseTooLarge),
    ("UNAUTHENTICATED", Code.UNAUTHENTICATED, api.Unauthenticated),
    ("KEY_EXPIRED", Code.UNAUTHENTICATED, api.KeyExpired),
    ("FORBIDDEN", Code.PERMISSION_DENIED, api.Forbidden),
    ("ENGINE_DEAD", Code.UNAVAILABLE, api.EngineDead),
    ("GROUP_ENDED", Code.UNAVAILABLE, api.GroupEnded),
    ("WEIGHTS_TOO_OLD", Code.FAILED_PRECONDITION, api.WeightsTooOld),
    ("INVALID_TENSORS", Code.INVALID_ARGUMENT, api.TensorsRefused),
    ("CHECKSUM_MISMATCH", Code.DATA_LOSS, api.TensorsRefused),
    ("GENERATION_CHANGED", Code.ABORTED, api.GenerationChanged),
    ("UPDATE_UNDER_WAY", Code.ABORTED, api.UpdateUnderWay),
    ("PROFILE_UNDER_WAY", Code.ABORTED, api.ProfileUnderWay),
    ("UNKNOWN_UPDATE", Code.NOT_FOUND, api.UnknownUpdate),
    ("DRAIN_TIMEOUT", Code.DEADLINE_EXCEEDED, api.DrainTimeout),
]
CODES = [
    (Code.INVALID_ARGUMENT, api.InvalidRequest),
    (Code.OUT_OF_RANGE, api.InvalidRequest),
    (Code.NOT_FOUND, api.RefusedError),
    (Code.ALREADY_EXISTS, api.DuplicateRequestId),
    (Code.FAILED_PRECONDITION, api.PreconditionFailed),
    (Code.UNIMPLEMENTED, api.Unsupported),
    (Code.UNAUTHENTICATED, api.Unauthenticated),
    (Code.PERMISSION_DENIED, api.Forbidden),
    (Code.RESOURCE_EXHAUSTED, api.LimitExceeded),
    (Code.UNAVAILABLE, api.Unreachable),
    (Code.ABORTED, api.Conflict),
    (Code.DEADLINE_EXCEEDED, api.DeadlineExceeded),
    (Code.CANCELLED, api.Cancelled),
    (Code.INTERNAL, api.ServerError),
    (Code.DATA_LOSS, api.ServerError),
    (Code.UNKNOWN, api.ServerError),
]


def test_the_lists_above_are_complete():
    assert {reason for reason, _, _ in REASONS} == set(BY_REASON)
    assert {code for code, _ in CODES} == set(Code) - {Code.OK}
    assert {code for code, kind in CODES if kind is not api.ServerError} == set(BY_CODE)


@pytest.mark.parametrize(("reason", "code", "kind"), REASONS)
def test_reason(server, failure, reason, code, kind):
    server.failure = failure(code, reason, "told so", {"limit": "9"})
    with Client(server.addr) as client, pytest.raises(api.PenstockClientError, match="told so") as caught:
        client.generate("p")
    assert type(caught.value) is kind
    assert (caught.value.reason, caught.value.code, caught.value.metadata) == (reason, code, {"limit": "9"})
    assert isinstance(caught.value.__cause__, grpc.RpcError)


@pytest.mark.parametrize(("reason", "code", "kind"), REASONS)
async def test_reason_async(server, failure, reason, code, kind):
    server.failure = failure(code, reason, "told so", {"limit": "9"})
    async with AsyncClient(server.addr) as client:
        with pytest.raises(api.PenstockClientError, match="told so") as caught:
            await client.generate("p")
    assert type(caught.value) is kind
    assert (caught.value.reason, caught.value.code, caught.value.metadata) == (reason, code, {"limit": "9"})
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)


@pytest.mark.parametrize("reason", ["", "A_REASON_OF_TOMORROW"])
@pytest.mark.parametrize(("code", "kind"), CODES)
def test_without_a_known_reason_the_status_counts(server, failure, reason, code, kind):
    server.failure = failure(code, reason, "told so")
    with Client(server.addr) as client, pytest.raises(api.PenstockClientError, match="told so") as caught:
        list(client.stream("p"))
    if code is Code.UNAVAILABLE and reason:  # the server did answer
        kind = api.UnavailableError
    # cancelled by nobody here, and before any answer: the connection ended
    if code is Code.CANCELLED and not reason:
        kind = api.Unreachable
    assert type(caught.value) is kind
    assert caught.value.reason == reason


def test_a_reason_of_somebody_else_is_none(server, failure):
    """A proxy may have a QUEUE_FULL of its own, which says nothing of the server behind it."""
    server.failure = failure(
        Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "quota", {"limit": "9"}, domain="proxy.example"
    )
    with Client(server.addr) as client, pytest.raises(api.LimitExceeded, match="quota") as caught:
        client.generate("p")
    assert (type(caught.value), caught.value.reason, caught.value.metadata) == (api.LimitExceeded, "", {})


@pytest.mark.parametrize("code", [Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.INTERNAL])
async def test_status_async_in_unary_and_stream(server, failure, code):
    server.failure = failure(code, "", "told so")
    kind = api.Unreachable if code is Code.CANCELLED else dict(CODES)[code]
    async with AsyncClient(server.addr) as client:
        with pytest.raises(kind, match="told so"):
            await client.load()
        with pytest.raises(kind, match="told so"):
            await client.stream("p").result()


def test_violations(server, failure):
    violations = [("sampling.top_p", "must be at most 1"), ("stopping.stop[0]", "is empty")]
    server.failure = failure(Code.INVALID_ARGUMENT, "INVALID_FIELD", violations=violations)
    with Client(server.addr) as client, pytest.raises(api.InvalidRequest) as caught:
        client.generate("p")
    assert [(v.field, v.description) for v in caught.value.violations] == violations


def test_unsupported_fields(server, failure):
    server.failure = failure(
        Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE", metadata={"field": "adapter,sampling.n"}
    )
    with Client(server.addr) as client, pytest.raises(api.Unsupported) as caught:
        client.generate("p")
    assert caught.value.fields == ("adapter", "sampling.n")


def test_retry_after(server, failure):
    with Client(server.addr) as client:
        server.failure = failure(
            Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=Duration(seconds=2, nanos=500_000_000)
        )
        with pytest.raises(api.QueueFull) as caught:
            client.generate("p")
        assert caught.value.retry_after == 2.5
        server.failure = failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        with pytest.raises(api.QueueFull) as caught:
            client.generate("p")
        assert caught.value.retry_after is None


def test_details_that_cannot_be_read_do_not_hide_the_error(server, failure):
    server.failure = failure(Code.UNAVAILABLE, message="told so")
    server.failure.trailing_metadata = lambda: (("grpc-status-details-bin", b"\xff\xff"),)
    with Client(server.addr) as client, pytest.raises(api.Unreachable, match="told so"):
        client.generate("p")


def test_nobody_answers():
    with Client("127.0.0.1:1") as client, pytest.raises(api.Unreachable):
        client.load()


def test_deadline(server):
    server.hold_after = 1
    with Client(server.addr) as client:
        for timeout_s in (0.5, 5.0, 50.0):  # a busy machine may need longer until the server has the call
            with pytest.raises(api.DeadlineExceeded):
                client.stream("p", timeout=timeout_s).result()
            if server.cancelled.wait(1.0):
                break
    assert server.cancelled.wait(30)
