"""What each address serves if control has an address of its own (`--control-port`).

Both addresses serve health, reflection, the RPCs that only read, and Abort. The main address serves Generate,
Stream, Embed, Score, Rerank and Classify; the control address serves what changes the server for everybody.
At the main address no caller has the control role, whatever its key says: whoever reaches only that address
can do no more than use the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, cast

import grpc

from penstock.service.access.callers import CURRENT_CALLER, Role
from penstock.service.access.roles import RULES
from penstock.service.errors import ServedElsewhere

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_INFERENCE = "/penstock.v1.InferenceService"
_ABORT = f"{_INFERENCE}/Abort"
_WATCH = "/penstock.v1.ControlService/WatchLoad"
GENERATING = frozenset(
    {
        *(f"{_INFERENCE}/{name}" for name in ("Generate", "Stream", "Embed", "Score", "Rerank", "Classify")),
        "/vllm.grpc.engine.VllmEngine/Generate",
    }
)
"""What runs on the model, and so belongs to the main address."""
_FOLLOW = "/penstock.service.group.GroupService/Follow"
"""Followers of a group have the role control; it is no RPC of the contract."""
CONTROLLING = frozenset(f"/{method}" for method, rule in RULES.items() if rule.role is Role.CONTROL)


class Surface(grpc.aio.ServerInterceptor):
    """Refuses what one address does not serve. It must come after the interceptor that maps errors."""

    def __init__(
        self, elsewhere: frozenset[str], where: Callable[[], str], *, own_requests_only: bool = False
    ) -> None:
        """Refuse calls of the methods `elsewhere`; the error tells `where` to go. With `own_requests_only`
        Abort ends only the caller's own requests, whatever its role, and WatchLoad lists none.
        """
        self._elsewhere = elsewhere
        self._where = where
        self._own_requests_only = own_requests_only

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        handler: Any = await continuation(handler_call_details)
        if handler is not None and method in self._elsewhere:
            return _refusing(handler, self._refusal(_name(method)))
        if handler is not None and method == _ABORT and self._own_requests_only:
            return grpc.unary_unary_rpc_method_handler(
                self._abort(handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        if handler is not None and method == _WATCH and self._own_requests_only:
            return grpc.unary_stream_rpc_method_handler(
                self._watch(handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        return cast("Handler | None", handler)

    def _abort(self, behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Make a handler that aborts only the caller's own requests. Callers without an id cannot be told
        apart, so they must name ids.
        """

        async def handle(request: Any, context: Any) -> Any:
            caller = CURRENT_CALLER.get()
            if not caller.id and request.WhichOneof("target") in ("all", "request_id_prefix"):
                raise self._refusal("Abort of all requests, or of those with a prefix,")
            CURRENT_CALLER.set(dataclasses.replace(caller, roles=caller.roles - {Role.CONTROL}))
            return await behaviour(request, context)

        return handle

    def _watch(self, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Make a handler that lists no requests, because the list names those of all callers."""

        def handle(request: Any, context: Any) -> Any:
            if request.max_requests:
                raise self._refusal("WatchLoad with max_requests")
            return behaviour(request, context)

        return handle

    def _refusal(self, what: str) -> ServedElsewhere:
        return ServedElsewhere(what, self._where())


def main_surface(control_port: Callable[[], int | None]) -> Surface:
    """Make the surface of the main address, which has no control. `control_port` returns the port once it is
    known.
    """
    return Surface(
        CONTROLLING | {_FOLLOW}, lambda: f"the control port, {control_port()}", own_requests_only=True
    )


def control_surface() -> Surface:
    """Make the surface of the control address, which has no generation."""
    return Surface(GENERATING, lambda: "the server's main address")


def _name(method: str) -> str:
    return method.rpartition("/")[2]


def _refusing(handler: Any, error: ServedElsewhere) -> Handler:
    """Make a handler of the same kind that raises the error."""

    def refuse(request: Any, context: Any) -> NoReturn:
        raise error

    made = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return made(refuse, handler.request_deserializer, handler.response_serializer)
