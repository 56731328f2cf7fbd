"""Reads the status of a failed call, with the details that Penstock packs into it, such as those of
tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed

from penstock.client.values.server_values import TensorInfo
from penstock.client.values.weights_values import TensorProblem, TensorReason
from penstock.v1 import weights_pb2

_DTYPE_NAMES = {number: name for name, number in weights_pb2.DataType.items()}
_REASON_NAMES = {number: name for name, number in weights_pb2.TensorErrorReason.items()}
_REASONS = {reason.value: reason for reason in TensorReason}


def spelled(names: Mapping[Any, str], number: int, prefix: str) -> str:
    """Return the lower-case name of a number, or "feature_42" for one of a newer contract."""
    name = names.get(number)
    return f"{prefix}{number}".lower() if name is None else name.removeprefix(prefix).lower()


def tensor_info(message: weights_pb2.TensorSpec) -> TensorInfo:
    return TensorInfo(message.name, spelled(_DTYPE_NAMES, message.dtype, "DATA_TYPE_"), tuple(message.shape))


def tensor_problem(message: weights_pb2.TensorError) -> TensorProblem:
    reason = spelled(_REASON_NAMES, message.reason, "TENSOR_ERROR_REASON_")
    return TensorProblem(
        name=message.name,
        reason=_REASONS.get(reason, TensorReason.UNKNOWN),
        expected=tensor_info(message.expected) if message.HasField("expected") else None,
        received=tensor_info(message.received) if message.HasField("received") else None,
    )


_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with one field; `field` is the contract's dotted path, such as "sampling.top_p"."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class StatusDetails:
    """The status of a failed call, unpacked."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    """ErrorInfo.reason, such as "QUEUE_FULL"; empty if the failure did not come from Penstock."""
    metadata: tuple[tuple[str, str], ...] = ()
    violations: tuple[Violation, ...] = ()
    retry_after: float | None = None
    request_id: str = ""
    """The request's id in google.rpc.RequestInfo, as in the server's log; empty if the server did not say."""
    tensors: tuple[TensorProblem, ...] = ()
    """The tensors of a weight update that the server refused."""
    has_more_tensors: bool = False
    """Whether it refused more than a status can carry."""


class _FailedCall(Protocol):
    """What a failed sync call and an AioRpcError have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...


def read_status(error: grpc.RpcError) -> StatusDetails:
    """Unpack the status of a failed call. Details that cannot be read are left out."""
    call = cast("_FailedCall", error)
    status = status_pb2.Status()
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                continue
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry, request = error_details_pb2.RetryInfo(), error_details_pb2.RequestInfo()
    refused = weights_pb2.TensorErrors()
    for detail in status.details:
        for kind in (info, bad, retry, request, refused):
            detail.Unpack(kind)
    if info.domain != "penstock":  # the reasons of a proxy are its own, even where they have the same names
        info.Clear()
    return StatusDetails(
        code=call.code(),
        message=call.details() or "",
        reason=info.reason,
        metadata=tuple(sorted(info.metadata.items())),
        violations=tuple(Violation(v.field, v.description) for v in bad.field_violations),
        retry_after=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        request_id=request.request_id,
        tensors=tuple(map(tensor_problem, refused.errors)),
        has_more_tensors=refused.truncated,
    )
