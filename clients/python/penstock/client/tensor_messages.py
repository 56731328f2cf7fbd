"""Makes values of what the contract says of tensors, in replies and in errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.client.values.server_values import TensorInfo
from penstock.client.values.weights_values import TensorProblem, TensorReason
from penstock.v1 import weights_pb2

_DTYPE_NAMES = {number: name for name, number in weights_pb2.DataType.items()}
_REASON_NAMES = {number: name for name, number in weights_pb2.TensorErrorReason.items()}
_REASONS = {reason.value: reason for reason in TensorReason}


def spelled(names: Mapping[Any, str], number: int, prefix: str) -> str:
    """The lower-case name of a number, or "feature_42" for one of a newer contract."""
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
