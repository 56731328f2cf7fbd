"""How the sync client makes its calls: over which channel, how often, and with which errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from penstock.client.base import BaseClient
from penstock.client.connection.address import Endpoint
from penstock.client.connection.channel import INFO_TIMEOUT, Attempts, Metadata
from penstock.client.connection.readiness import Readiness
from penstock.client.error_table import from_rpc_error
from penstock.client.generation.receiving import ServerStream
from penstock.v1 import control_pb2_grpc, inference_pb2_grpc

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")
ValueT = TypeVar("ValueT")


class Calls(BaseClient[grpc.Channel]):
    """What `Client` makes all its calls with."""

    inference: inference_pb2_grpc.InferenceServiceStub
    control: control_pb2_grpc.ControlServiceStub

    @staticmethod
    def _open(found: Endpoint) -> grpc.Channel:
        if found.credentials is None:
            return grpc.insecure_channel(found.target, options=found.options)
        return grpc.secure_channel(found.target, found.credentials, options=found.options)

    def _health(self) -> Readiness:
        return Readiness(self._check_health, self.metadata)

    def _unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ReplyT],
        request: RequestT,
        timeout: float | None,
        metadata: Metadata | None,
        otherwise: float | None = INFO_TIMEOUT,
    ) -> ReplyT:
        sent = self._sent(metadata)
        return self._repeated(
            lambda left: method(request, timeout=left, metadata=sent), self._attempts(timeout, otherwise)
        )

    def _server_stream(
        self,
        method: grpc.UnaryStreamMultiCallable[RequestT, ReplyT],
        request: RequestT,
        timeout: float | None,
        metadata: Metadata | None,
        value_of: Callable[[ReplyT], ValueT],
    ) -> ServerStream[ValueT]:
        sent = self._sent(metadata)
        return ServerStream(
            lambda left: method(request, timeout=left, metadata=sent), self._attempts(timeout), value_of
        )

    def _repeated(
        self, attempt: Callable[[float | None], ReplyT], attempts: Attempts, update_id: str = ""
    ) -> ReplyT:
        """Make a call as often as `attempts` says. `attempt` is given its timeout in seconds."""
        while True:
            try:
                return attempt(attempts.timeout())
            except grpc.RpcError as error:
                failure = from_rpc_error(error, update_id=update_id)
                delay = attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            time.sleep(delay)
