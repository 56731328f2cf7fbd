"""Maps errors to gRPC statuses: one table with one row for every class of the error tree, and the details of
each.

Each status carries google.rpc.ErrorInfo (the domain "penstock", a reason in upper case, facts in `metadata`)
and RequestInfo (the request's id). Where it helps it also carries BadRequest (every violation), TensorErrors
(every bad tensor of a weight update) or RetryInfo. Peers may refuse trailing metadata above 8 KiB, which
would hide the error behind another one, so everything is cut to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.runtime import errors
from penstock.runtime.requests.request import MAX_REQUEST_ID_CHARS
from penstock.service import access_errors
from penstock.service.error_details import bad_request, cut, tensor_errors

DOMAIN = "penstock"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Tells gRPC's own retries, which a client's service config may enable, how long to wait instead of their
backoff.
"""
MAX_MESSAGE_CHARS = 400
MAX_METADATA_CHARS = 700
Code = grpc.StatusCode


class StalledReader(errors.RequestError):
    """A client did not read its stream for longer than the server waits, so the server ended it and freed its
    pages.

    Expected: the client, or the network to it, is too slow. The status reaches the client when it reads on.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(
            f"the stream was ended, because nothing of it was read for {limit_s:g} s; read faster"
        )


class ResponseTooLarge(errors.InvalidRequest):
    """The reply would be larger than the server sends, or became larger while it was generated.

    Expected: the caller can ask for less, or use a stream, which need not fit as a whole. `max_bytes` is the
    limit.
    """

    def __init__(self, violations: Sequence[errors.Violation], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        super().__init__(violations)


class MessageTooLarge(errors.RequestError):
    """The request message is larger than this server reads."""

    def __init__(self, num_bytes: int, most: int) -> None:
        self.num_bytes, self.most = num_bytes, most
        super().__init__(f"the request has {num_bytes} bytes; this server takes at most {most}")


class Busy(errors.UnavailableError):
    """One of the server's bounds on what may go on at once is reached.

    Expected: the same call succeeds later. `limit` is the bound's name, `most` its value.
    """

    def __init__(self, limit: str, most: int, retry_after_s: float = 1.0) -> None:
        self.limit, self.most, self.retry_after_s = limit, most, retry_after_s
        super().__init__(f"too many calls at once ({limit} is {most}); retry in {retry_after_s:.2g} s")


class StalledSender(errors.RequestError):
    """The headers of a call arrived, and its message did not; or the next one of a call that sends many.

    Expected: the client, or the network to it, is too slow, or somebody opens calls without using them.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(f"the request's next message did not come within {limit_s:g} s")


class RequestAborted(errors.RequestError):
    """A request for embeddings or scores was ended before it had all of them.

    Expected: somebody called Abort, or a weight update or a pause ended what ran.
    """

    def __init__(self, message: str) -> None:
        super().__init__("the request was aborted" + (f": {message}" if message else ""))


class UnknownService(errors.RequestError):
    """A health check names a service that this server does not have.

    Expected: the name in the probe is wrong.
    """

    def __init__(self, service: str) -> None:
        self.service = service
        super().__init__(f"no service {service[:100]!r} is known here")


class ServedElsewhere(errors.RequestError):
    """This server has an address of its own for control, and the call came to the other address.

    Expected: the client was given the wrong one of two addresses.
    """

    def __init__(self, what: str, where: str) -> None:
        self.what = what
        super().__init__(f"{what} is not served at this address, but at {where}")


@dataclass(frozen=True, slots=True)
class StatusRow:
    """How one class of errors looks on the wire."""

    code: grpc.StatusCode
    reason: str
    metadata: Callable[[Any], dict[str, str]] = lambda error: {}
    """Returns the facts about an error that ErrorInfo carries."""
    retry_after_s: Callable[[Any], float | None] = lambda error: None
    """Returns the seconds after which the same call may succeed, for RetryInfo; None if the error does not
    say.
    """


def _measured(error: Any) -> float | None:
    """Return the time that the error itself has measured."""
    delay: float | None = error.retry_after_s
    return delay


TABLE: Mapping[type[errors.PenstockError], StatusRow] = {
    errors.PenstockError: StatusRow(Code.INTERNAL, "INTERNAL"),
    errors.ConfigError: StatusRow(Code.FAILED_PRECONDITION, "CONFIG"),
    errors.UnknownArchitecture: StatusRow(Code.FAILED_PRECONDITION, "UNKNOWN_ARCHITECTURE"),
    errors.CheckpointError: StatusRow(Code.FAILED_PRECONDITION, "CHECKPOINT"),
    errors.RequestError: StatusRow(Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    errors.InvalidRequest: StatusRow(Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    ResponseTooLarge: StatusRow(
        Code.INVALID_ARGUMENT, "RESPONSE_TOO_LARGE", lambda e: {"max_bytes": str(e.max_bytes)}
    ),
    errors.UnsupportedFeature: StatusRow(
        Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE", lambda e: {"field": ",".join(e.fields)}
    ),
    errors.PromptTooLong: StatusRow(
        Code.INVALID_ARGUMENT,
        "PROMPT_TOO_LONG",
        lambda e: {"prompt_tokens": str(e.num_prompt_tokens), "max_prompt_tokens": str(e.max_prompt_tokens)},
    ),
    errors.ExceedsKVCapacity: StatusRow(
        Code.INVALID_ARGUMENT,
        "EXCEEDS_KV_CAPACITY",
        lambda e: {"needed_tokens": str(e.needed_tokens), "capacity_tokens": str(e.capacity_tokens)},
    ),
    errors.DuplicateRequestId: StatusRow(
        Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", lambda e: {"request_id": e.request_id}
    ),
    errors.UnknownModel: StatusRow(
        Code.NOT_FOUND, "UNKNOWN_MODEL", lambda e: {"model": e.name, "served_model": e.served}
    ),
    errors.UnknownAdapterError: StatusRow(Code.NOT_FOUND, "UNKNOWN_ADAPTER", lambda e: {"adapter": e.name}),
    errors.WeightsTooOld: StatusRow(
        Code.FAILED_PRECONDITION,
        "WEIGHTS_TOO_OLD",
        lambda e: {"min_generation": str(e.wanted), "generation": str(e.serving)},
    ),
    access_errors.Unauthenticated: StatusRow(Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    access_errors.KeyExpired: StatusRow(
        Code.UNAUTHENTICATED, "KEY_EXPIRED", lambda e: {"expired": e.expired.isoformat()}
    ),
    access_errors.Forbidden: StatusRow(Code.PERMISSION_DENIED, "FORBIDDEN"),
    access_errors.RateLimited: StatusRow(
        Code.RESOURCE_EXHAUSTED,
        "RATE_LIMITED",
        lambda e: {"limit": e.limit, "per_minute": str(e.per_minute)},
        _measured,
    ),
    StalledReader: StatusRow(
        Code.RESOURCE_EXHAUSTED, "STALLED_READER", lambda e: {"limit_s": f"{e.limit_s:g}"}
    ),
    ServedElsewhere: StatusRow(Code.UNIMPLEMENTED, "SERVED_ELSEWHERE"),
    MessageTooLarge: StatusRow(
        Code.RESOURCE_EXHAUSTED,
        "MESSAGE_TOO_LARGE",
        lambda e: {"bytes": str(e.num_bytes), "max_bytes": str(e.most)},
    ),
    errors.GenerationError: StatusRow(Code.INTERNAL, "GENERATION_FAILED"),
    errors.NonFiniteLogits: StatusRow(Code.INTERNAL, "NON_FINITE_LOGITS"),
    RequestAborted: StatusRow(Code.ABORTED, "REQUEST_ABORTED"),
    UnknownService: StatusRow(Code.NOT_FOUND, "UNKNOWN_SERVICE", lambda e: {"service": e.service}),
    StalledSender: StatusRow(
        Code.RESOURCE_EXHAUSTED, "STALLED_SENDER", lambda e: {"limit_s": f"{e.limit_s:g}"}
    ),
    errors.UnavailableError: StatusRow(Code.UNAVAILABLE, "UNAVAILABLE", retry_after_s=lambda e: 1.0),
    errors.QueueFull: StatusRow(
        Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", lambda e: {"limit": str(e.limit)}, _measured
    ),
    Busy: StatusRow(
        Code.RESOURCE_EXHAUSTED, "BUSY", lambda e: {"limit": e.limit, "max": str(e.most)}, _measured
    ),
    errors.CostlyGrammar: StatusRow(
        Code.RESOURCE_EXHAUSTED,
        "COSTLY_GRAMMAR",
        lambda e: {"field": e.field},
        _measured,
    ),
    # Another server may take the request at once. This one takes it, if at all, after a restart.
    errors.Draining: StatusRow(Code.UNAVAILABLE, "DRAINING", retry_after_s=lambda e: 1.0),
    errors.NotReady: StatusRow(Code.UNAVAILABLE, "NOT_READY", retry_after_s=lambda e: 2.0),
    # Another server may take the request at once. This one takes it after a whole update.
    errors.WeightsIncomplete: StatusRow(Code.UNAVAILABLE, "WEIGHTS_INCOMPLETE", retry_after_s=lambda e: 1.0),
    errors.ChangeRefused: StatusRow(Code.FAILED_PRECONDITION, "CHANGE_REFUSED"),
    errors.DrainTimeout: StatusRow(
        Code.DEADLINE_EXCEEDED, "DRAIN_TIMEOUT", lambda e: {"timeout_s": f"{e.timeout_s:g}"}
    ),
    errors.PausedWithRequests: StatusRow(
        Code.FAILED_PRECONDITION, "PAUSED", lambda e: {"requests": str(e.num_requests)}
    ),
    errors.PauseTakenBack: StatusRow(Code.ABORTED, "PAUSE_TAKEN_BACK"),
    errors.WeightsError: StatusRow(Code.FAILED_PRECONDITION, "WEIGHTS_REFUSED"),
    errors.TensorsRefused: StatusRow(
        Code.INVALID_ARGUMENT, "INVALID_TENSORS", lambda e: {"tensors": str(len(e.problems))}
    ),
    errors.ChecksumMismatch: StatusRow(
        Code.DATA_LOSS, "CHECKSUM_MISMATCH", lambda e: {"tensors": str(len(e.problems))}
    ),
    errors.GenerationChanged: StatusRow(
        Code.ABORTED,
        "GENERATION_CHANGED",
        lambda e: {"expected": str(e.expected), "current": str(e.current)},
    ),
    errors.UpdateUnderWay: StatusRow(
        Code.ABORTED,
        "UPDATE_UNDER_WAY",
        lambda e: {"update_id": e.update_id, "staged": str(e.staged).lower()},
        lambda e: None if e.staged else 1.0,  # what is staged goes away only if somebody does something
    ),
    errors.UnknownUpdate: StatusRow(Code.NOT_FOUND, "UNKNOWN_UPDATE", lambda e: {"update_id": e.update_id}),
    errors.AdapterError: StatusRow(Code.FAILED_PRECONDITION, "ADAPTER_REFUSED"),
    errors.AdapterFormatError: StatusRow(
        Code.INVALID_ARGUMENT,
        "ADAPTER_FORMAT",
        lambda e: {name: value for name in ("tensor", "field") if (value := getattr(e, name)) is not None},
    ),
    errors.AdapterExistsError: StatusRow(
        Code.FAILED_PRECONDITION, "ADAPTER_EXISTS", lambda e: {"adapter": e.name}
    ),
    errors.TooManyAdaptersError: StatusRow(
        Code.RESOURCE_EXHAUSTED, "TOO_MANY_ADAPTERS", lambda e: {"max": str(e.limit)}
    ),
    errors.ProfileError: StatusRow(Code.FAILED_PRECONDITION, "PROFILE_REFUSED"),
    errors.ProfileUnderWay: StatusRow(Code.ABORTED, "PROFILE_UNDER_WAY", retry_after_s=lambda e: 1.0),
    errors.ProfileFailed: StatusRow(Code.INTERNAL, "PROFILE_FAILED"),
    # INTERNAL, so that clients do not send the request that may have killed this engine to the next one.
    # Later requests get ENGINE_DEAD, which clients may retry.
    errors.EngineFailure: StatusRow(Code.INTERNAL, "ENGINE_FAILURE"),
    # The processes start again, and another server may take the request at once.
    errors.GroupEnded: StatusRow(
        Code.UNAVAILABLE, "GROUP_ENDED", lambda e: {"cause": e.reason}, retry_after_s=lambda e: 2.0
    ),
    errors.EngineDead: StatusRow(Code.UNAVAILABLE, "ENGINE_DEAD", retry_after_s=lambda e: 2.0),
}

BUG = StatusRow(Code.INTERNAL, "INTERNAL")
"""The row of an exception that is not in the tree, which is a bug. Its text stays in the log."""


def row_of(error: BaseException) -> StatusRow:
    """Find the row of the error's class, or of the nearest class above it."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            return TABLE[cls]
    return BUG


def to_status(error: BaseException, request_id: str = "") -> status_pb2.Status:
    """Make the google.rpc.Status of an error, with all its details. `request_id` is the id of the request
    that failed.
    """
    row = row_of(error)
    text = str(error) if isinstance(error, errors.PenstockError) else "internal error; see the server's log"
    metadata = {key: cut(value, MAX_METADATA_CHARS) for key, value in row.metadata(error).items()}
    info = error_details_pb2.ErrorInfo(reason=row.reason, domain=DOMAIN, metadata=metadata)
    number: int = row.code.value[0]
    details = [info, *_extras(error, row)]
    if request_id:
        details.append(error_details_pb2.RequestInfo(request_id=request_id[:MAX_REQUEST_ID_CHARS]))
    return status_pb2.Status(
        code=number, message=cut(text, MAX_MESSAGE_CHARS), details=[_any(detail) for detail in details]
    )


def trailers(error: BaseException, status: status_pb2.Status) -> tuple[tuple[str, str | bytes], ...]:
    """Make the trailing metadata that carry the status."""
    found: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    delay = row_of(error).retry_after_s(error)
    if delay is not None:
        found.append((PUSHBACK_KEY, str(math.ceil(delay * 1000))))
    return tuple(found)


def _extras(error: BaseException, row: StatusRow) -> Sequence[Message]:
    extras: list[Message] = []
    if isinstance(error, errors.InvalidRequest):
        extras.append(bad_request(error.violations))
    if isinstance(error, errors.TensorsRefused):
        extras.append(tensor_errors(error.problems))
    delay_s = row.retry_after_s(error)
    if delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(delay_s * 1e9))
        extras.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return extras


def _any(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
