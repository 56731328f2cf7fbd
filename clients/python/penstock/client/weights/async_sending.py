"""Sends the messages of an update on a stream of the asyncio client, as `sending` does for the sync one.

grpc.aio forgets how a call ended if a write fails because it has ended: it then says INTERNAL, and the answer
is lost (https://github.com/grpc/grpc/issues/36066). A server may well answer before it has all messages. So
the call is made as one with a stream of answers, of which exactly one comes: reading it does not depend on
the status. And the status is noted when it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar, cast

import grpc
import grpc.aio

from penstock.client.errors import ProtocolError
from penstock.client.weights.progress import Tracker
from penstock.client.weights.update import Step, Update, steps
from penstock.v1 import weights_pb2

Call = grpc.aio.StreamStreamCall[weights_pb2.UpdateWeightsRequest, weights_pb2.UpdateWeightsResponse]
ValueT = TypeVar("ValueT")

_METHOD: Final = "/penstock.v1.InferenceService/UpdateWeights"
_LOST: Final = "Internal error from Core"
"""What grpc.aio says of a call whose status it has forgotten."""
_STATUS_S: Final = 5.0
"""How long to wait for the status of a call that has ended."""


def start(
    channel: grpc.aio.Channel, timeout: float | None, metadata: tuple[tuple[str, str | bytes], ...]
) -> Call:
    """Start a call of UpdateWeights."""
    method = channel.stream_stream(
        _METHOD,
        request_serializer=weights_pb2.UpdateWeightsRequest.SerializeToString,
        response_deserializer=weights_pb2.UpdateWeightsResponse.FromString,
    )
    return cast("Call", method(timeout=timeout, metadata=metadata))  # the hints lack the messages' types


async def send(call: Call, update: Update, chunk_bytes: int) -> weights_pb2.UpdateWeightsResponse:
    """Send one attempt and return the answer. Raises grpc.RpcError, and whatever reading a tensor or the
    caller's progress function raises. Tensors are read in a thread, because that may take long.
    """
    ending = _Ending(call)
    reading = asyncio.ensure_future(call.read())
    try:
        await _write(call, update, chunk_bytes, reading)
        reply = await reading
    except grpc.RpcError:
        raise (await ending.error()) from None
    finally:
        call.cancel()  # does nothing to a call that has ended
        reading.cancel()
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            await reading
    if not isinstance(reply, weights_pb2.UpdateWeightsResponse):
        raise ProtocolError.local("the server ended the update without a report")
    return reply


async def _write(call: Call, update: Update, chunk_bytes: int, reading: asyncio.Future[Any]) -> None:
    """Write all messages, or as many as the server wants: when it has answered, writing fails."""
    has_ended = (grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
    messages = steps(update, chunk_bytes)
    with Tracker(update) as tracker:
        while not reading.done():
            step: Step | None = await asyncio.to_thread(next, messages, None)
            try:
                await (call.done_writing() if step is None else call.write(step[0]))
            except has_ended:
                return
            if step is None:
                return
            tracker.add(step[1])


class _Ending:
    """Notes how a call ends."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._error: grpc.aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    def _note(self, _: object) -> None:
        """Called each time that grpc.aio sets the status, which it then knows, so that nothing waits."""
        if self._known.is_set():
            return
        call = self._call
        self._error = grpc.aio.AioRpcError(
            _at_once(call.code()),
            _at_once(call.initial_metadata()),
            _at_once(call.trailing_metadata()),
            _at_once(call.details()),
        )
        if self._error.details() != _LOST:
            self._known.set()

    async def error(self) -> grpc.RpcError:
        """The error of a call that has failed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._known.wait(), _STATUS_S)
        assert self._error is not None
        return self._error


def _at_once(coroutine: Coroutine[Any, Any, ValueT]) -> ValueT:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        value: ValueT = finished.value
        return value
    raise RuntimeError("a coroutine waits that should not")
