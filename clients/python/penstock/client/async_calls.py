"""How the asyncio client makes its calls: over which channel, how often, and with which errors."""

# ruff: noqa: ASYNC109 - `timeout` is the deadline of the RPC, which gRPC also sends to the server

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet

import grpc
import grpc.aio

from penstock.client.base import BaseClient
from penstock.client.connection.address import Endpoint
from penstock.client.connection.channel import INFO_TIMEOUT, Attempts, Metadata
from penstock.client.connection.readiness import AsyncReadiness
from penstock.client.error_table import from_rpc_error
from penstock.client.generation.receiving import AsyncServerStream, cancelled_call, is_task_cancelled
from penstock.v1 import control_pb2_grpc, inference_pb2_grpc

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")
ValueT = TypeVar("ValueT")
CallT = TypeVar("CallT", bound=grpc.aio.Call)


class AsyncCalls(BaseClient[grpc.aio.Channel]):
    """What `AsyncClient` makes all its calls with."""

    inference: inference_pb2_grpc.InferenceServiceAsyncStub
    control: control_pb2_grpc.ControlServiceAsyncStub

    @staticmethod
    def _open(found: Endpoint) -> grpc.aio.Channel:
        if found.credentials is None:
            return grpc.aio.insecure_channel(found.target, options=found.options)
        return grpc.aio.secure_channel(found.target, found.credentials, options=found.options)

    @cached_property
    def _calls(self) -> WeakSet[Any]:
        """The calls that somebody still holds."""
        return WeakSet()

    def _noted(self, start: Callable[[float | None], CallT]) -> Callable[[float | None], CallT]:
        """Return the same start of a call, which `_cancel_calls` finds then. The close of grpc.aio's channel
        finds a call only while one of its tasks runs; another call would go on until the server ends it.
        """

        def noted(timeout: float | None) -> CallT:
            call = start(timeout)
            self._calls.add(call)
            return call

        return noted

    def _cancel_calls(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def _health(self) -> AsyncReadiness:
        return AsyncReadiness(self._check_health, self.metadata)

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ReplyT],
        request: RequestT,
        timeout: float | None,
        metadata: Metadata | None,
        otherwise: float | None = INFO_TIMEOUT,
    ) -> ReplyT:
        sent = self._sent(metadata)

        async def answer(call: grpc.aio.UnaryUnaryCall[RequestT, ReplyT]) -> ReplyT:
            return await call

        return await self._repeated(
            lambda left: method(request, timeout=left, metadata=sent),
            self._attempts(timeout, otherwise),
            answer,
        )

    def _server_stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[RequestT, ReplyT],
        request: RequestT,
        timeout: float | None,
        metadata: Metadata | None,
        value_of: Callable[[ReplyT], ValueT],
    ) -> AsyncServerStream[ValueT]:
        sent = self._sent(metadata)
        start = self._noted(lambda left: method(request, timeout=left, metadata=sent))
        return AsyncServerStream(start, self._attempts(timeout), value_of)

    async def _repeated(
        self,
        start: Callable[[float | None], CallT],
        attempts: Attempts,
        answer: Callable[[CallT], Awaitable[ReplyT]],
        update_id: str = "",
    ) -> ReplyT:
        """Start a call and wait for its answer, as often as `attempts` says."""
        begin = self._noted(start)
        while True:
            call = begin(attempts.timeout())
            try:
                return await answer(call)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, update_id=update_id)
                delay = attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            except asyncio.CancelledError:
                if is_task_cancelled():
                    raise
                raise await cancelled_call(call) from None
            await asyncio.sleep(delay)
