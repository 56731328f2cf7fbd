"""Every error names its request: by the caller's own id, or by one that the server made for it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.runtime import errors
from penstock.service.errors import DETAILS_KEY, PUSHBACK_KEY, Busy, to_status
from penstock.v1 import control_pb2, inference_pb2
from tests.service.rig import WAIT_S, Rig, failure_of, fake, generate, serving, stream, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_callers_own_id(rig: Rig) -> None:
    for call in (
        rig.inference.Generate(generate("", request_id="mine")),
        rig.inference.Stream(stream("", request_id="mine")).read(),
        rig.inference.Generate(generate("a" * 1000, request_id="mine")),
        rig.inference.Generate(generate("a", request_id="mine", adapter="x")),
    ):
        assert (await failure_of(call)).request_id == "mine"


async def test_a_field_of_tomorrow_hides_no_id(rig: Rig) -> None:
    data = generate("a", request_id="mine").SerializeToString() + b"\xfa\x3f\x01x"
    failure = await failure_of(rig.raw("InferenceService/Generate", data))
    assert (failure.reason, failure.request_id) == ("UNSUPPORTED_FEATURE", "mine")


async def test_ids_made_by_the_server(rig: Rig) -> None:
    """Also if there is no request yet, and for RPCs whose requests have no id."""
    check: Any = rig.channel.unary_unary("/grpc.health.v1.Health/Check")
    ids = [
        (await failure_of(call)).request_id
        for call in (
            rig.inference.Generate(generate("")),
            rig.inference.Stream(stream("")).read(),
            rig.raw("InferenceService/Generate", b"\xff"),
            rig.raw("ControlService/Nope", b""),
            rig.control.Tokenize(control_pb2.TokenizeRequest()),
            rig.inference.Abort(inference_pb2.AbortRequest()),
            rig.control.CommitWeights(control_pb2.CommitWeightsRequest()),
            check(b"\xff"),
        )
    ]
    assert len(set(ids)) == len(ids)
    assert all(len(request_id) == 32 for request_id in ids)


async def test_the_id_of_an_error_is_that_of_the_stream() -> None:
    """`started` tells the id that the server made, and an error that comes later has that id."""
    async with serving(fake(hold=True)) as rig:
        call = rig.inference.Stream(stream("a"))
        await until(lambda: bool(rig.engine.seen))
        rig.engine.step()
        async with asyncio.timeout(WAIT_S):
            started = (await call.read()).started
        assert rig.engine.seen[0].request_id == started.request_id
        rig.engine.die()
        failure = await failure_of(read_to_the_end(call))
    assert failure.request_id == started.request_id


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("request_id", ["x" * 100_000, "\U0001f600" * 100_000])
async def test_a_long_id_is_cut(request_id: str) -> None:
    """The id itself is refused, and the error must arrive."""
    status = to_status(errors.InvalidRequest([errors.Violation("f" * 1000, "d" * 1000)] * 100), request_id)
    found = error_details_pb2.RequestInfo()
    assert any(detail.Unpack(found) for detail in status.details)
    assert request_id.startswith(found.request_id)
    assert len(found.request_id) == 128
    assert 3 * len(status.message) + len(status.SerializeToString()) * 4 // 3 + len(DETAILS_KEY) < 8000


@pytest.mark.parametrize(
    ("error", "delay_s"),
    [
        (errors.QueueFull(3, 2.5), 2.5),
        (errors.QueueFull(3), None),
        (Busy("max_rpcs", 3, 0.75), 0.75),
        (errors.NotReady(), 2.0),
        (errors.Draining(), 1.0),
        (errors.UnavailableError("x"), 1.0),
        (errors.NonFiniteLogits(), None),
        (errors.InvalidRequest([errors.Violation("a", "b")]), None),
    ],
)
async def test_when_to_come_back(error: Exception, delay_s: float | None) -> None:
    """RetryInfo for clients that read it, and the same delay for gRPC's own retries; neither if it would not
    help.
    """
    engine = fake()

    def submit(request: Any, sink: Any, prepared: Any = None) -> None:
        raise error

    engine.submit = submit  # type: ignore[method-assign]
    # The service measures when to come back, and no request has ended yet.
    expected = 1.0 if isinstance(error, errors.QueueFull) else delay_s
    async with serving(engine) as rig:
        call: Any = rig.inference.Generate(generate("a"))
        failure = await failure_of(call)
        trailers = dict(await call.trailing_metadata())
    assert failure.retry_after_s == expected
    assert trailers.get(PUSHBACK_KEY) == (None if expected is None else f"{expected * 1000:.0f}")
    retry = error_details_pb2.RetryInfo()
    told = [retry.retry_delay.ToNanoseconds() / 1e9 for d in to_status(error).details if d.Unpack(retry)]
    assert told == ([] if delay_s is None else [delay_s])


async def test_grpc_retries_by_itself_when_it_is_told_to() -> None:
    """A client with a retry policy waits as long as the server says, and not for its own backoff
    of minutes.
    """
    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "300s",'
        ' "maxBackoff": "300s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}'
    )
    engine, refusals = fake(), [errors.UnavailableError("later"), errors.UnavailableError("later")]
    submit = engine.submit

    def unwilling(*args: Any) -> None:
        if refusals:
            raise refusals.pop()
        submit(*args)

    engine.submit = unwilling  # type: ignore[method-assign,assignment]
    async with serving(engine, channel_options=[("grpc.service_config", policy)]) as rig:
        async with asyncio.timeout(120):
            assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
    assert not refusals
