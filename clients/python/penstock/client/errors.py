"""The errors that the client raises. One table maps the status of a call to its error.

    PenstockClientError                `reason`, `code`, `metadata`, `request_id`, `retry_after`
    ├── RefusedError                   the request is at fault; sending it again unchanged fails again
    │   ├── InvalidRequest             `violations` lists every bad field
    │   ├── PromptTooLong              the prompt leaves no room in the context
    │   ├── ExceedsKVCapacity          the request could never fit the server's KV cache
    │   ├── ResponseTooLarge           the reply would be larger than the server sends
    │   ├── Unsupported                `fields` lists what this server does not have
    │   ├── ServedElsewhere            another address of the server does this
    │   ├── UnknownModel, UnknownAdapter
    │   ├── DuplicateRequestId         a request with that id is active
    │   ├── PreconditionFailed         for example, min_weights is newer than the weights in use
    │   └── Denied                     credentials are at fault
    │       ├── Unauthenticated        they are missing or wrong
    │       │   └── KeyExpired
    │       └── Forbidden              they are valid, and do not allow this
    ├── UnavailableError               the same request may succeed later, or at another server
    │   ├── QueueFull                  too many requests are waiting
    │   ├── CostlyGrammar              its grammar took the server too long a short while ago
    │   ├── Busy                       another bound on what goes on at once; `limit` is its name
    │   ├── RateLimited                this caller's key has used up its rate
    │   ├── Draining                   the server is shutting down
    │   ├── NotReady                   the server is still loading or compiling
    │   ├── EngineDead                 the server's engine is dead; the server must be restarted
    │   └── Unreachable                nobody answers at that address
    ├── LimitExceeded                  another limit: a message's size, a stalled reader
    ├── Conflict                       another caller was first (compare-and-set of weights)
    ├── DeadlineExceeded               the call's `timeout` passed; the server freed the request
    ├── Cancelled                      the call was cancelled
    └── ServerError                    a bug or a failure of the server
        └── ProtocolError              the server broke the order of a stream

    try:
        client.generate(prompt)
    except PromptTooLong as error:
        print(error.metadata["max_prompt_tokens"])
    except UnavailableError as error:
        time.sleep(error.retry_after or 1.0)

The `__cause__` of an error is gRPC's error. Errors can be pickled and copied; that loses the cause.
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
    """The base class of all errors of the client."""

    def __init__(self, details: StatusDetails) -> None:
        super().__init__(details.message or details.code.name)
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call __init__(*args), but args hold the message, which is not what __init__ takes.
        return _rebuilt, (type(self), self.args, self.__dict__)

    @property
    def code(self) -> grpc.StatusCode:
        return self.details.code

    @property
    def reason(self) -> str:
        return self.details.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """The facts of google.rpc.ErrorInfo, such as both numbers of PROMPT_TOO_LONG."""
        return dict(self.details.metadata)

    @property
    def request_id(self) -> str:
        """The request's id, as in the server's log; empty if the server did not say."""
        return self.details.request_id

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait; None if it did not say."""
        return self.details.retry_after


class RefusedError(PenstockClientError):
    """The request is at fault, or its credentials are. Sending it again unchanged fails again."""


class InvalidRequest(RefusedError):
    """Fields are missing or out of range; `violations` lists all of them."""

    @property
    def violations(self) -> tuple[Violation, ...]:
        return self.details.violations

    @classmethod
    def local(cls, violations: Sequence[Violation]) -> Self:
        """An error that the client found before it sent anything."""
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        details = StatusDetails(
            grpc.StatusCode.INVALID_ARGUMENT, text, "INVALID_FIELD", (), tuple(violations)
        )
        return cls(details)


class PromptTooLong(RefusedError):
    """The prompt leaves no room in the context. The message and `metadata` have both numbers."""


class ExceedsKVCapacity(RefusedError):
    """The request would not fit the server's KV cache, even if it ran alone."""


class ResponseTooLarge(RefusedError):
    """The reply would be larger than the server sends. `metadata` has the limit."""


class Unsupported(RefusedError):
    """The request uses a part of the contract that this server does not have."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The contract's dotted paths of what is not supported; empty if the whole method is not."""
        return tuple(f.strip() for f in self.metadata.get("field", "").split(",") if f.strip())


class ServedElsewhere(RefusedError):
    """The server has an address of its own for control, and this call went to the wrong one of the two."""


class UnknownModel(RefusedError):
    """The request names a model that is not served here."""


class UnknownAdapter(RefusedError):
    """The request names an adapter that is not loaded here."""


class DuplicateRequestId(RefusedError):
    """A request with this id is active."""


class PreconditionFailed(RefusedError):
    """The server is not in the state that the request demands."""


class Denied(RefusedError):
    """Credentials are missing or wrong, or do not allow this."""


class Unauthenticated(Denied):
    """Credentials are missing or wrong."""


class KeyExpired(Unauthenticated):
    """The key was valid until it expired."""


class Forbidden(Denied):
    """The credentials are valid, and do not allow this."""


class UnavailableError(PenstockClientError):
    """The same request may succeed later, or at another server."""


class QueueFull(UnavailableError):
    """Too many requests are waiting."""


class Busy(UnavailableError):
    """A bound on what the server does at once is reached. The queue's bound raises QueueFull instead."""

    @property
    def limit(self) -> str:
        """The name of the bound; empty if the server did not say."""
        return self.metadata.get("limit", "")


class CostlyGrammar(UnavailableError):
    """The server needed too much time to follow the request's grammar, and refuses it to everybody for a
    while.
    """

    @property
    def field(self) -> str:
        """The field that holds the grammar; empty if the server did not say."""
        return self.metadata.get("field", "")


class RateLimited(UnavailableError):
    """This caller's key has used up its rate of requests or tokens."""


class Draining(UnavailableError):
    """The server is shutting down and takes no new requests."""


class NotReady(UnavailableError):
    """The server is still loading or compiling."""

    @classmethod
    def local(cls, message: str) -> Self:
        """The error of `wait_ready` when its time is over."""
        return cls(StatusDetails(grpc.StatusCode.UNAVAILABLE, message, "NOT_READY"))


class EngineDead(UnavailableError):
    """The server's engine is dead, and the server does not answer until it is restarted. Another
    server may.
    """


class Unreachable(UnavailableError):
    """Nobody answers at that address, or the connection broke before an answer came."""


class LimitExceeded(PenstockClientError):
    """A limit that does not go away by waiting: a message's size, a stream that was not read, a proxy's
    quota.
    """


class Conflict(PenstockClientError):
    """Another caller was first."""


class DeadlineExceeded(PenstockClientError):
    """The call's timeout passed."""


class Cancelled(PenstockClientError):
    """The call was cancelled: on this side, or by the server after a part of the answer had come."""


class ServerError(PenstockClientError):
    """A bug or a failure of the server."""


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
"""The errors for reasons that are absent or unknown. A code that is not here is a ServerError."""


_CANCELLED_HERE = (
    "Locally cancelled by application!",
    "Channel closed!",
    "Channel deallocated!",
    "Call cancelled in fork child",
)
"""The messages of gRPC for a call that was cancelled on this side."""


def from_rpc_error(error: grpc.RpcError, *, began: bool = False) -> PenstockClientError:
    """The exception to raise `from error`. `began` says whether a part of the answer has come.

    A call whose connection ends, for example because the server shuts down, may end with CANCELLED and no
    details, although nobody here cancelled it. Before the answer began that is Unreachable.
    """
    details = read_status(error)
    kind = BY_REASON.get(details.reason) or BY_CODE.get(details.code, ServerError)
    if kind is Cancelled and not (began or details.reason or details.message in _CANCELLED_HERE):
        kind = Unreachable
    if kind is Unreachable and details.reason:  # the server did answer
        kind = UnavailableError
    return kind(details)
