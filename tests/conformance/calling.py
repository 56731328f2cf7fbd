"""Makes any call of the contract over a channel, by the descriptors of the generated code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from penstock.v1 import control_pb2, inference_pb2, weights_pb2

DEFINED = (control_pb2, inference_pb2, weights_pb2, health_pb2, error_details_pb2)
"""Imported so that the pool of descriptors has their services and messages."""
TIMEOUT_S = 60.0


def call(
    channel: grpc.Channel,
    method: str,
    requests: Sequence[Mapping[str, Any]],
    metadata: Mapping[str, str] | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> Any:
    """Begin the call of a method such as "penstock.v1.InferenceService/Stream".

    Iterating over what comes back gives the replies, and raises grpc.RpcError for a status other than OK.
    """
    service, _, name = method.partition("/")
    found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    request_type = message_factory.GetMessageClass(found.input_type)
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    kind: Any = kinds[found.client_streaming, found.server_streaming]
    stub: Any = kind(
        f"/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(found.output_type).FromString,
    )
    messages = [json_format.ParseDict(dict(request), request_type()) for request in requests]
    sent: Any = iter(messages) if found.client_streaming else messages[0]
    pairs = list((metadata or {}).items())
    if found.server_streaming:
        return stub(sent, metadata=pairs, timeout=timeout_s)
    return _one(stub, sent, pairs, timeout_s)


def _one(stub: Any, sent: Any, metadata: Any, timeout_s: float | None) -> Iterable[Any]:
    yield stub(sent, metadata=metadata, timeout=timeout_s)


def outcome(replies: Iterable[Any]) -> dict[str, Any]:
    """Run a call to its end. Returns its messages and its status in the form that drivers print."""
    messages: list[Any] = []
    status: dict[str, Any] = {"code": "OK", "message": "", "details": []}
    try:
        for reply in replies:
            messages.append(json_format.MessageToDict(reply))  # noqa: PERF401 - those before an error count
    except grpc.RpcError as failed:
        error: Any = failed
        rich = rpc_status.from_call(error)
        status = {
            "code": error.code().name,
            "message": error.details(),
            "details": [json_format.MessageToDict(detail) for detail in rich.details] if rich else [],
        }
    return {"messages": messages, "status": status}
