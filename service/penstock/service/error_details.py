"""Details of a status that list everything that is wrong, as far as it fits: violations, and bad tensors."""

from __future__ import annotations

from collections.abc import Sequence

from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.runtime.errors import Violation
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason
from penstock.v1 import weights_pb2

MAX_VIOLATION_CHARS = 300
MAX_VIOLATIONS_BYTES = 2500
MAX_TENSOR_NAME_CHARS = 300
MAX_TENSOR_DIMENSIONS = 16
MAX_TENSORS_BYTES = 4000
DATA_TYPES = {name.removeprefix("DATA_TYPE_"): value for name, value in weights_pb2.DataType.items()}
REASONS = {
    reason: weights_pb2.TensorErrorReason.Value(f"TENSOR_ERROR_REASON_{reason.name}")
    for reason in TensorReason
}


def bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    """Name every violation that fits, and one more that tells how many do not."""
    bad = error_details_pb2.BadRequest()
    size = 0
    for i, violation in enumerate(violations):
        field = cut(violation.field, MAX_VIOLATION_CHARS)
        description = cut(violation.description, MAX_VIOLATION_CHARS)
        size += len(field) + len(description) + 8
        if size > MAX_VIOLATIONS_BYTES:
            bad.field_violations.add(field="", description=f"and {len(violations) - i} more violations")
            break
        bad.field_violations.add(field=field, description=description)
    return bad


def tensor_errors(problems: Sequence[TensorProblem]) -> weights_pb2.TensorErrors:
    """Name every bad tensor that fits; `truncated` tells that there are more."""
    found = weights_pb2.TensorErrors()
    size = 0
    for problem in problems:
        error = weights_pb2.TensorError(
            name=cut(problem.name, MAX_TENSOR_NAME_CHARS),
            reason=REASONS[problem.reason],
            expected=_spec(problem.expected),
            received=_spec(problem.received),
        )
        size += error.ByteSize() + 4
        if size > MAX_TENSORS_BYTES:
            found.truncated = True
            break
        found.errors.append(error)
    return found


def _spec(tensor: SentTensor | None) -> weights_pb2.TensorSpec | None:
    """Write the tensor as the contract writes it. What a caller may make as large as it likes is cut."""
    if tensor is None:
        return None
    return weights_pb2.TensorSpec(
        name=cut(tensor.name, MAX_TENSOR_NAME_CHARS),
        dtype=DATA_TYPES.get(tensor.dtype, weights_pb2.DATA_TYPE_UNSPECIFIED),
        shape=tensor.shape[:MAX_TENSOR_DIMENSIONS],
        crc32c=tensor.crc32c,
        sha256=tensor.sha256[:32],
    )


def cut(text: str, limit: int) -> str:
    """Cut to at most `limit` ASCII characters: the wire escapes others to three times their bytes."""
    short = text[: limit + 1].encode("ascii", "backslashreplace").decode()
    return short if len(short) <= limit else short[: limit - 3] + "..."
