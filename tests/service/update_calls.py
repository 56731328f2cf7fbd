"""Calls of UpdateWeights and PushAdapter whose status always arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

import grpc

from penstock.v1 import adapters_pb2, control_pb2_grpc, inference_pb2_grpc, weights_pb2


async def update_weights(
    address: str, messages: Iterable[weights_pb2.UpdateWeightsRequest], **call: Any
) -> weights_pb2.UpdateWeightsResponse:
    """Send these messages, end the stream, and return the answer. Cancelling this cancels the call. `call`
    are options of the stub. Raises AioRpcError, as asyncio's stubs do.
    """
    reply: weights_pb2.UpdateWeightsResponse = await _streamed(
        address, inference_pb2_grpc.InferenceServiceStub, "UpdateWeights", messages, **call
    )
    return reply


async def push_adapter(
    address: str, messages: Iterable[adapters_pb2.PushAdapterRequest], **call: Any
) -> adapters_pb2.PushAdapterResponse:
    """As `update_weights`, for an adapter."""
    reply: adapters_pb2.PushAdapterResponse = await _streamed(
        address, control_pb2_grpc.ControlServiceStub, "PushAdapter", messages, **call
    )
    return reply


async def _streamed(address: str, service: Any, method: str, messages: Iterable[Any], **call: Any) -> Any:
    """Make the call by a sync stub, because asyncio's forgets the status of a call that the server ends while
    a message is written (https://github.com/grpc/grpc/issues/36066).
    """
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def note(_: object) -> None:
        """Note the end; called on a thread of gRPC's, maybe when the test is over."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    with grpc.insecure_channel(address) as channel:
        running = getattr(service(channel), method).future(iter(list(messages)), **call)
        running.add_done_callback(note)
        try:
            await ended.wait()
            return running.result()
        except grpc.RpcError:
            trailing = grpc.aio.Metadata.from_tuple(tuple(running.trailing_metadata() or ()))
            raise grpc.aio.AioRpcError(
                running.code(), grpc.aio.Metadata(), trailing, running.details()
            ) from None
        finally:
            running.cancel()  # does nothing to a call that has ended
