"""Every error the client raises, made from the status of a call in one table.

PenstockClientError                `reason`, `code`, `metadata`, `request_id`, `retry_after`
├── RefusedError                   the caller can mend the request; sending it again as it is fails again
│   ├── InvalidRequest             `violations` lists every bad field
│   ├── PromptTooLong              the prompt leaves no room in the context
│   ├── ExceedsKVCapacity          could never fit the server's KV cache
│   ├── ResponseTooLarge           the answer that was asked for would be larger than the server sends
│   ├── Unsupported                `fields` this server lacks
│   ├── ServedElsewhere            the server does this at another of its addresses
│   ├── UnknownModel, UnknownAdapter
│   ├── DuplicateRequestId         a request with that id is active
│   ├── PreconditionFailed         e.g. min_weights is newer than the weights in use
│   └── Denied                     credentials are at fault
│       ├── Unauthenticated        they are missing or wrong
│       │   └── KeyExpired
│       └── Forbidden              they are right, but do not allow this
├── UnavailableError               the same request may succeed later, or elsewhere
│   ├── QueueFull                  too many requests wait
│   ├── CostlyGrammar              its grammar took the server too long a short while ago
│   ├── Busy                       another bound on what runs at once: `limit`, its name
│   ├── RateLimited                this caller's key has used up its rate
│   ├── Draining                   the server is shutting down
│   ├── NotReady                   the server is still loading or warming up
│   ├── EngineDead                 the server's engine is dead; the server will be restarted
│   └── Unreachable                nobody answers at that address
├── LimitExceeded                  another limit: a message's size, a stalled reader
├── Conflict                       lost against another caller (weights compare-and-set)
├── DeadlineExceeded               the call's `timeout` passed; the server freed the request
├── Cancelled                      the call was cancelled
└── ServerError                    a bug or a failure on the server's side
    └── ProtocolError              the server broke the order of a stream

Their `__cause__` is the grpc error. All of them can be pickled and copied, which loses that cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import grpc

from penstock.client.status import StatusDetails, Violation, read_status


def _rebuilt(
    kind: type[PenstockClientError], args: tuple[Any, ...], state: dict[str, Any]
) -> PenstockClientError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class PenstockClientError(Exception):
    """Root of all errors of the client."""

    def __init__(self, details: StatusDetails) -> None:
        super().__init__(details.message or details.code.name)
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # Else it would be rebuilt by __init__(*args), and args are the message, not what __init__ takes.
        return _rebuilt, (type(self), self.args, self.__dict__)

    @property
    def code(self) -> grpc.StatusCode:
        return self.details.code

    @property
    def reason(self) -> str:
        return self.details.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """ErrorInfo.metadata, e.g. both numbers of PROMPT_TOO_LONG."""
        return dict(self.details.metadata)

    @property
    def request_id(self) -> str:
        """The request's id, by which the server's log knows it; empty when the server did not say."""
        return self.details.request_id

    @property
    def retry_after(self) -> float | None:
        """Seconds the server asks to wait; None: it did not say."""
        return self.details.retry_after


class RefusedError(PenstockClientError):
    """The caller can mend the request."""


class InvalidRequest(RefusedError):
    """Fields are missing or out of range."""

    @property
    def violations(self) -> tuple[Violation, ...]:
        return self.details.violations

    @classmethod
    def local(cls, violations: Sequence[Violation]) -> Self:
        """Found before anything was sent."""
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        details = StatusDetails(
            grpc.StatusCode.INVALID_ARGUMENT, text, "INVALID_FIELD", (), tuple(violations)
        )
        return cls(details)


class PromptTooLong(RefusedError):
    """The prompt leaves no room in the context; the message has both numbers."""


class ExceedsKVCapacity(RefusedError):
    """Even alone on the server the request would not fit."""


class ResponseTooLarge(RefusedError):
    """The answer that was asked for would be larger than the server sends; the metadata has the numbers."""


class Unsupported(RefusedError):
    """A feature of the contract that this server lacks."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The contract's dotted paths; empty when the whole method is missing."""
        return tuple(f.strip() for f in self.metadata.get("field", "").split(",") if f.strip())


class ServedElsewhere(RefusedError):
    """The server has an address of its own for control, and this is the wrong one of the two."""


class UnknownModel(RefusedError):
    """The request names a model that is not served here."""


class UnknownAdapter(RefusedError):
    """The request names an adapter that is not loaded here."""


class DuplicateRequestId(RefusedError):
    """A request with this id is active."""


class PreconditionFailed(RefusedError):
    """The server is not in the state the request asks for."""


class Denied(RefusedError):
    """Credentials are missing, wrong, or do not allow this."""


class Unauthenticated(Denied):
    """Credentials are missing or wrong."""


class KeyExpired(Unauthenticated):
    """The key was right until it expired."""


class Forbidden(Denied):
    """The credentials are right, but do not allow this."""


class UnavailableError(PenstockClientError):
    """Try again later, or elsewhere."""


class QueueFull(UnavailableError):
    """Too many requests are waiting."""


class Busy(UnavailableError):
    """A bound on what the server does at once is reached: other than the queue's, which is QueueFull."""

    @property
    def limit(self) -> str:
        """Name of the bound; empty when the server did not say."""
        return self.metadata.get("limit", "")


class CostlyGrammar(UnavailableError):
    """The request's grammar took the server too long to follow, and is refused to everybody for a while."""

    @property
    def field(self) -> str:
        """Where the grammar was in the request; empty when the server did not say."""
        return self.metadata.get("field", "")


class RateLimited(UnavailableError):
    """This caller's key has used up its rate of requests or tokens."""


class Draining(UnavailableError):
    """The server is shutting down and takes no new requests."""


class NotReady(UnavailableError):
    """The server is still loading or warming up."""

    @classmethod
    def local(cls, message: str) -> Self:
        """`wait_ready` ran out of patience."""
        return cls(StatusDetails(grpc.StatusCode.UNAVAILABLE, message, "NOT_READY"))


class EngineDead(UnavailableError):
    """The server's engine is dead, and the server with it until it is restarted; another one may answer."""


class Unreachable(UnavailableError):
    """Nobody answers at that address, or the connection broke before it brought an answer."""


class LimitExceeded(PenstockClientError):
    """A limit that waiting does not lift: a message's size, a stream that was not read, a proxy's quota."""


class Conflict(PenstockClientError):
    """Lost against another caller."""


class DeadlineExceeded(PenstockClientError):
    """The call's timeout passed."""


class Cancelled(PenstockClientError):
    """The call was cancelled: on this side, or by the other one after a part of the answer had come."""


class ServerError(PenstockClientError):
    """A bug or a failure on the server's side."""


class ProtocolError(ServerError):
    """The server broke the order of a stream."""

    @classmethod
    def local(cls, message: str) -> Self:
        return cls(StatusDetails(grpc.StatusCode.INTERNAL, message, "PROTOCOL"))


BY_REASON: Mapping[str, type[PenstockClientError]] = {
    "INVALID_FIELD": InvalidRequest,
    "PROMPT_TOO_LONG": PromptTooLong,
    "EXCEEDS_KV_CAPACITY": ExceedsKVCapacity,
    "UNSUPPORTED_FEATURE": Unsupported,
    "SERVED_ELSEWHERE": ServedElsewhere,
    "UNKNOWN_MODEL": UnknownModel,
    "UNKNOWN_ADAPTER": UnknownAdapter,
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
"""For a reason that is absent or unknown; a code that is not here is a ServerError."""


_CANCELLED_HERE = (
    "Locally cancelled by application!",
    "Channel closed!",
    "Channel deallocated!",
    "Call cancelled in fork child",
)
"""What gRPC says of a call that was cancelled on this side."""


def from_rpc_error(error: grpc.RpcError, *, began: bool = False) -> PenstockClientError:
    """The exception to raise `from error`. `began`: a part of the answer has come.

    A call that meets the end of its connection, for instance a server that shuts down, may end as CANCELLED
    with no details, which nobody here asked for. Before the answer began that is Unreachable.
    """
    details = read_status(error)
    kind = BY_REASON.get(details.reason) or BY_CODE.get(details.code, ServerError)
    if kind is Cancelled and not (began or details.reason or details.message in _CANCELLED_HERE):
        kind = Unreachable
    if kind is Unreachable and details.reason:  # somebody did answer
        kind = UnavailableError
    return kind(details)
