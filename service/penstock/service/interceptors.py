"""One server interceptor around every penstock RPC: decode, trace, map errors.

Requests are decoded here and not by gRPC, whose own failure to decode is an untyped INTERNAL: a garbled
request is INVALID_ARGUMENT, and fields that protobuf would drop in silence are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from penstock.runtime.errors import InvalidRequest, PenstockError, Violation
from penstock.service.errors import DETAILS_KEY, row_of, to_status
from penstock.service.support import check_wire
from penstock.service.telemetry import CURRENT_RPC, RpcTrace, Telemetry

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = "Callable[[Any, Context], Any]"
PACKAGE = "/penstock.v1."
DEADLINE_SLACK_S = 0.1
"""gRPC tells a handler of a deadline as of a cancel, and the client's may come a little before ours."""


def decode(parse: Callable[[bytes], M], data: bytes) -> M:
    """The request, or InvalidRequest/UnsupportedFeature where bytes or fields are not the contract's."""
    try:
        message = parse(data)
    except (DecodeError, ValueError) as error:  # ValueError: a string that is not UTF-8
        raise InvalidRequest([Violation("", f"the request cannot be decoded: {error}")]) from error
    check_wire(message)
    return message


class PenstockInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of penstock.v1; health and reflection pass as they are."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(PACKAGE):
            return cast("Handler | None", handler)
        method = handler_call_details.method[1:]
        parse = handler.request_deserializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, parse, handler.unary_unary), None, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, parse, handler.unary_stream), None, handler.response_serializer
            )
        assert handler.stream_unary is not None, "the contract has no bidirectional stream"
        return grpc.stream_unary_rpc_method_handler(
            self._upload(method, parse, handler.stream_unary), None, handler.response_serializer
        )

    def _unary(self, method: str, parse: Any, behaviour: Behaviour) -> Behaviour:
        async def handle(data: bytes, context: Context) -> Any:
            rpc = self._start(method, context)
            try:
                reply = await behaviour(decode(parse, data), context)
            except BaseException as error:  # noqa: BLE001 -- every way out ends the span; `_fail` raises
                await _fail(error, rpc, context)
            rpc.end(grpc.StatusCode.OK)
            return reply

        return handle

    def _stream(self, method: str, parse: Any, behaviour: Behaviour) -> Behaviour:
        async def handle(data: bytes, context: Context) -> AsyncIterator[Any]:
            rpc = self._start(method, context)
            try:
                replies = behaviour(decode(parse, data), context)
                try:
                    async for reply in replies:
                        yield reply
                finally:
                    await replies.aclose()
            except BaseException as error:  # noqa: BLE001 -- as above
                await _fail(error, rpc, context)
            rpc.end(grpc.StatusCode.OK)

        return handle

    def _upload(self, method: str, parse: Any, behaviour: Behaviour) -> Behaviour:
        async def decoded(chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in chunks:
                yield decode(parse, data)

        async def handle(chunks: AsyncIterator[bytes], context: Context) -> Any:
            rpc = self._start(method, context)
            try:
                reply = await behaviour(decoded(chunks), context)
            except BaseException as error:  # noqa: BLE001 -- as above
                await _fail(error, rpc, context)
            rpc.end(grpc.StatusCode.OK)
            return reply

        return handle

    def _start(self, method: str, context: Context) -> RpcTrace:
        rpc = self._telemetry.rpc(method, cast("Any", context.invocation_metadata() or ()))
        CURRENT_RPC.set(rpc.span)  # this task is the RPC's own, so nobody needs to reset it
        return rpc


async def _fail(error: BaseException, rpc: RpcTrace, context: Context) -> None:
    """End the RPC as the error says; always raises."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        remaining_s = cast("float | None", context.time_remaining())  # None: no deadline
        late = remaining_s is not None and remaining_s < DEADLINE_SLACK_S
        rpc.end(grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED)
        raise error
    if not isinstance(error, Exception):
        rpc.end(grpc.StatusCode.INTERNAL, type(error).__name__)
        raise error
    row = row_of(error)
    if not isinstance(error, PenstockError):
        log.error("a bug in the service", exc_info=error)
    status = to_status(error)
    rpc.end(row.code, row.reason)
    await context.abort(row.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
