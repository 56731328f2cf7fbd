"""Failures in the form in which a server of the contract sends them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed

from penstock.v1 import weights_pb2


@dataclass
class Failure:
    """A status with details, as a server of the contract sends it."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = "no"
    metadata: dict[str, str] = field(default_factory=dict)
    violations: list[tuple[str, str]] = field(default_factory=list)
    retry_after: Duration | None = None
    request_id: str = ""
    tensors: weights_pb2.TensorErrors | None = None
    domain: str = "penstock"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        parts: list[Any] = []
        if self.reason:
            parts.append(
                error_details_pb2.ErrorInfo(reason=self.reason, domain=self.domain, metadata=self.metadata)
            )
        if self.violations:
            bad = error_details_pb2.BadRequest()
            for name, description in self.violations:
                bad.field_violations.add(field=name, description=description)
            parts.append(bad)
        if self.retry_after is not None:
            parts.append(error_details_pb2.RetryInfo(retry_delay=self.retry_after))
        if self.request_id:
            parts.append(error_details_pb2.RequestInfo(request_id=self.request_id))
        if self.tensors is not None:
            parts.append(self.tensors)
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for part in parts:
            packed = AnyMessage()
            packed.Pack(part)
            status.details.append(packed)
        return (("grpc-status-details-bin", status.SerializeToString()),) if parts else ()
