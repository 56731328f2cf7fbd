"""Makes the error to raise of a failed call. One table maps reasons to errors, and one statuses."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from penstock.client.errors import (
    AdapterExists,
    AdapterRefused,
    Busy,
    Cancelled,
    Conflict,
    CostlyGrammar,
    DeadlineExceeded,
    Draining,
    DrainTimeout,
    DuplicateRequestId,
    EngineDead,
    ExceedsKVCapacity,
    Forbidden,
    GenerationChanged,
    GroupEnded,
    InvalidRequest,
    KeyExpired,
    LimitExceeded,
    NotReady,
    PenstockClientError,
    PreconditionFailed,
    ProfileUnderWay,
    PromptTooLong,
    QueueFull,
    RateLimited,
    RefusedError,
    ResponseTooLarge,
    ServedElsewhere,
    ServerError,
    TensorsRefused,
    TooManyAdapters,
    Unauthenticated,
    UnavailableError,
    UnknownAdapter,
    UnknownModel,
    UnknownUpdate,
    Unreachable,
    Unsupported,
    UpdateUnderWay,
    WeightsTooOld,
)
from penstock.client.status import read_status

BY_REASON: Mapping[str, type[PenstockClientError]] = {
    "INVALID_FIELD": InvalidRequest,
    "PROMPT_TOO_LONG": PromptTooLong,
    "EXCEEDS_KV_CAPACITY": ExceedsKVCapacity,
    "UNSUPPORTED_FEATURE": Unsupported,
    "SERVED_ELSEWHERE": ServedElsewhere,
    "UNKNOWN_MODEL": UnknownModel,
    "UNKNOWN_ADAPTER": UnknownAdapter,
    "ADAPTER_FORMAT": AdapterRefused,
    "ADAPTER_EXISTS": AdapterExists,
    "TOO_MANY_ADAPTERS": TooManyAdapters,
    "DUPLICATE_REQUEST_ID": DuplicateRequestId,
    "QUEUE_FULL": QueueFull,
    "COSTLY_GRAMMAR": CostlyGrammar,
    "DRAINING": Draining,
    "NOT_READY": NotReady,
    "BUSY": Busy,
    "RATE_LIMITED": RateLimited,
    "RESPONSE_TOO_LARGE": ResponseTooLarge,
    "UNAUTHENTICATED": Unauthenticated,
    "KEY_EXPIRED": KeyExpired,
    "FORBIDDEN": Forbidden,
    "ENGINE_DEAD": EngineDead,
    "GROUP_ENDED": GroupEnded,
    "WEIGHTS_TOO_OLD": WeightsTooOld,
    "INVALID_TENSORS": TensorsRefused,
    "CHECKSUM_MISMATCH": TensorsRefused,
    "GENERATION_CHANGED": GenerationChanged,
    "UPDATE_UNDER_WAY": UpdateUnderWay,
    "UNKNOWN_UPDATE": UnknownUpdate,
    "PROFILE_UNDER_WAY": ProfileUnderWay,
    "DRAIN_TIMEOUT": DrainTimeout,
}

BY_CODE: Mapping[grpc.StatusCode, type[PenstockClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: RefusedError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestId,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionFailed,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.ABORTED: Conflict,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}
"""The errors for reasons that are absent or unknown. A code that is not here is a ServerError."""


_CANCELLED_HERE = (
    "Locally cancelled by application!",
    "Channel closed!",
    "Channel deallocated!",
    "Call cancelled in fork child",
)
"""The messages of gRPC for a call that was cancelled on this side."""


def from_rpc_error(error: grpc.RpcError, *, began: bool = False, update_id: str = "") -> PenstockClientError:
    """Make the exception to raise `from error`. `began` says whether a part of the answer has come;
    `update_id` is that of the weight update which the call was for.

    A call whose connection ends, for example because the server shuts down, may end with CANCELLED and no
    details, although nobody here cancelled it. Before the answer began that is Unreachable.
    """
    details = read_status(error)
    kind = BY_REASON.get(details.reason) or BY_CODE.get(details.code, ServerError)
    if kind is Cancelled and not (began or details.reason or details.message in _CANCELLED_HERE):
        kind = Unreachable
    if kind is Unreachable and details.reason:  # the server did answer
        kind = UnavailableError
    found = kind(details)
    found.update_id = update_id
    return found
