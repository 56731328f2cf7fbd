"""The errors that the client raises.

    PenstockClientError                `reason`, `code`, `metadata`, `request_id`, `retry_after`, `update_id`
    ├── RefusedError                   the request is at fault; sending it again unchanged fails again
    │   ├── InvalidRequest             `violations` lists every bad field
    │   ├── PromptTooLong              the prompt leaves no room in the context
    │   ├── ExceedsKVCapacity          the request could never fit the server's KV cache
    │   ├── ResponseTooLarge           the reply would be larger than the server sends
    │   ├── Unsupported                `fields` lists what this server does not have
    │   ├── ServedElsewhere            another address of the server does this
    │   ├── UnknownModel, UnknownAdapter
    │   ├── AdapterRefused             the config or a tensor of an adapter is not what the model can have
    │   ├── UnknownUpdate              no weight update with that id is staged or committed
    │   ├── TensorsRefused             `tensors` lists every bad tensor of a weight update
    │   ├── DuplicateRequestId         a request with that id is active
    │   ├── PreconditionFailed         the server is not in the state that the request demands
    │   │   ├── AdapterExists          another adapter has this name, and it was not to be replaced
    │   │   └── WeightsTooOld          min_weights is newer than the weights in use
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
    │   ├── GroupEnded                 the server's processes have lost one of them, and start again
    │   └── Unreachable                nobody answers at that address
    ├── LimitExceeded                  another limit: a message's size, a stalled reader
    │   └── TooManyAdapters            there is no room for one more adapter
    ├── Conflict                       another caller was first
    │   ├── GenerationChanged          the weights in use are not those that `expected_generation` names
    │   └── UpdateUnderWay             another weight update is under way or staged
    ├── DeadlineExceeded               the call's `timeout` passed; the server freed the request
    │   └── DrainTimeout               running requests took longer than `drain_timeout_s`; nothing changed
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

from penstock.client.status import StatusDetails, Violation
from penstock.client.values.weights_values import TensorProblem


def _rebuilt(
    kind: type[PenstockClientError], args: tuple[Any, ...], state: dict[str, Any]
) -> PenstockClientError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class PenstockClientError(Exception):
    """The base class of all errors of the client."""

    update_id = ""
    """The id of the weight update that failed, to ask for its outcome with; empty for other calls."""

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
        """Make an error that the client found before it sent anything."""
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


class AdapterRefused(RefusedError):
    """The config or a tensor of an adapter is not what the model can have."""

    @property
    def field(self) -> str:
        """The field of adapter_config.json that is wrong; empty if it is none."""
        return self.metadata.get("field", "")

    @property
    def tensor(self) -> str:
        """The tensor that is wrong; empty if it is none."""
        return self.metadata.get("tensor", "")


class UnknownUpdate(RefusedError):
    """No weight update with this id is staged or committed."""


class TensorsRefused(RefusedError):
    """The server refused tensors of a weight update. The old weights are in use."""

    @property
    def tensors(self) -> tuple[TensorProblem, ...]:
        """Every bad tensor, with what the model expects and what was sent."""
        return self.details.tensors

    @property
    def has_more(self) -> bool:
        """Whether there are more bad tensors than `tensors` lists, because a status has a bounded size."""
        return self.details.has_more_tensors


class DuplicateRequestId(RefusedError):
    """A request with this id is active."""


class PreconditionFailed(RefusedError):
    """The server is not in the state that the request demands."""


class AdapterExists(PreconditionFailed):
    """Another adapter has this name, and it was not to be replaced."""


class WeightsTooOld(PreconditionFailed):
    """The weights in use are older than the request's `min_weights`."""


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
        """Make the error of `wait_ready` when its time is over."""
        return cls(StatusDetails(grpc.StatusCode.UNAVAILABLE, message, "NOT_READY"))


class EngineDead(UnavailableError):
    """The server's engine is dead, and the server does not answer until it is restarted. Another
    server may.
    """


class GroupEnded(UnavailableError):
    """The model of the server is cut over several processes, one of which was lost while it had the request.
    All of them end and start again. Another server may answer.
    """


class Unreachable(UnavailableError):
    """Nobody answers at that address, or the connection broke before an answer came."""


class LimitExceeded(PenstockClientError):
    """A limit that does not go away by waiting: a message's size, a stream that was not read, a proxy's
    quota.
    """


class TooManyAdapters(LimitExceeded):
    """There is no room for one more adapter, or for one more that is pinned."""


class Conflict(PenstockClientError):
    """Another caller was first."""


class GenerationChanged(Conflict):
    """The generation of the weights in use is not the `expected_generation`; nothing has changed."""


class UpdateUnderWay(Conflict):
    """Another weight update is under way, or one is staged; nothing has changed."""


class ProfileUnderWay(Conflict):
    """Another profile is being recorded or written at the server."""


class DeadlineExceeded(PenstockClientError):
    """The call's timeout passed."""


class DrainTimeout(DeadlineExceeded):
    """The running requests did not finish within `drain_timeout_s`; nothing has changed."""


class Cancelled(PenstockClientError):
    """The call was cancelled: on this side, or by the server after a part of the answer had come."""


class ServerError(PenstockClientError):
    """A bug or a failure of the server."""


class ProtocolError(ServerError):
    """The server broke the order of a stream."""

    @classmethod
    def local(cls, message: str) -> Self:
        return cls(StatusDetails(grpc.StatusCode.INTERNAL, message, "PROTOCOL"))
