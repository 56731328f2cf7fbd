"""Asks a server's health whether it is ready, and waits until it is."""

# ruff: noqa: ASYNC109 - `timeout` is the deadline of the RPC, which gRPC also sends to the server

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from penstock.client.connection.channel import SERVING_SERVICE
from penstock.client.error_table import from_rpc_error
from penstock.client.errors import NotReady, Unreachable

_NOBODY_ANSWERED: Final = "nobody answered"
_REQUEST: Final = health_pb2.HealthCheckRequest(service=SERVING_SERVICE)
_ONE_ANSWER_S: Final = 1.0
_REASON_S: Final = 0.5
_PAUSE_S: Final = 0.05


class Readiness:
    """The health of a sync client's server. `check` is the stub's method, `metadata` goes with each call."""

    def __init__(self, check: Any, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._check = check
        self._metadata = metadata

    def why_not(self, timeout: float, wait: bool = True) -> str | None:
        """Tell what speaks against it, or None if it is SERVING. `wait` says whether to wait for a
        connection; only a call that does not reports why there is none.
        """
        try:
            reply = self._check(_REQUEST, timeout=timeout, metadata=self._metadata, wait_for_ready=wait)
        except grpc.RpcError as error:
            return _why_no_answer(error)
        return _why_not_ready(reply)

    def wait(self, timeout: float | None) -> None:
        """Wait until it is SERVING. Raises NotReady after `timeout` seconds; None waits for ever."""
        waiting = _Waiting(timeout)
        while waiting.goes_on(self.why_not(waiting.next_timeout())):
            time.sleep(_PAUSE_S)
        if waiting.is_unexplained:
            waiting.why = self.why_not(_REASON_S, wait=False)
        waiting.tell()


class AsyncReadiness:
    """The health of an asyncio client's server. Its methods are those of `Readiness`."""

    def __init__(self, check: Any, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._check = check
        self._metadata = metadata

    async def why_not(self, timeout: float, wait: bool = True) -> str | None:
        try:
            reply = await self._check(_REQUEST, timeout=timeout, metadata=self._metadata, wait_for_ready=wait)
        except grpc.RpcError as error:
            return _why_no_answer(error)
        return _why_not_ready(reply)

    async def wait(self, timeout: float | None) -> None:
        waiting = _Waiting(timeout)
        while True:
            if not waiting.goes_on(await self.why_not(waiting.next_timeout())):
                break
            await asyncio.sleep(_PAUSE_S)
        if waiting.is_unexplained:
            waiting.why = await self.why_not(_REASON_S, wait=False)
        waiting.tell()


class _Waiting:
    """How long to wait, and the best reason so far why the server was not ready."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self.why: str | None = _NOBODY_ANSWERED

    def next_timeout(self) -> float:
        return min(_ONE_ANSWER_S, self._deadline - time.monotonic())

    def goes_on(self, found: str | None) -> bool:
        """Say whether to ask again after this answer of `why_not`."""
        if found != _NOBODY_ANSWERED:
            self.why = found
        return found is not None and time.monotonic() < self._deadline

    @property
    def is_unexplained(self) -> bool:
        return self.why == _NOBODY_ANSWERED

    def tell(self) -> None:
        """Raise NotReady unless the last answer was that it is ready."""
        if self.why is not None:
            raise NotReady.local(f"the server was not ready within {self._timeout:g} s: {self.why}")


def _why_not_ready(reply: health_pb2.HealthCheckResponse) -> str | None:
    """Tell what a health check said against readiness; None if the server is SERVING."""
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return f"its health is {name}"


def _why_no_answer(error: grpc.RpcError) -> str:
    """Say why a health check failed. Raises its error if waiting does not help, because the server answered,
    and with more than "not yet".
    """
    code: grpc.StatusCode = error.code()
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return _NOBODY_ANSWERED
        case grpc.StatusCode.UNAVAILABLE:
            return error.details() or "nobody answers"
        case grpc.StatusCode.CANCELLED if isinstance(from_rpc_error(error), Unreachable):
            return "the connection ended"
        case grpc.StatusCode.NOT_FOUND:  # the health service answers before ours is registered
            return "its health is not known yet"
        case _:
            raise from_rpc_error(error) from error
