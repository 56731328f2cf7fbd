"""Every error Penstock raises on purpose.

PenstockError
├── ConfigError                  expected: the operator asked for something that cannot be served
│   ├── UnknownArchitecture      config.json names an architecture that is not in the registry
│   └── CheckpointError          missing, extra and wrongly shaped tensors, all at once, by name
├── RequestError                 expected: the caller can mend the request
│   ├── InvalidRequest           one or more fields out of range; every violation is listed
│   ├── UnsupportedFeature       a field of the contract that this build does not honour
│   ├── PromptTooLong            prompt leaves no room in the context
│   ├── ExceedsKVCapacity        the request could never fit the KV cache
│   ├── DuplicateRequestId       that id is running or waiting
│   ├── UnknownModel             the request names another model
│   ├── UnknownAdapterError      the request names an adapter that is not there
│   └── WeightsTooOld            the request wants newer weights than those that serve
├── UnavailableError             expected: try again later, or elsewhere
│   ├── QueueFull
│   ├── CostlyGrammar            the request's grammar took too long to follow a short while ago
│   ├── Draining
│   ├── NotReady
│   └── WeightsIncomplete        an update in place failed, so that the weights are partly old and partly new
├── ChangeRefused                expected: an update or a pause was not made, because of the running requests
│   ├── DrainTimeout             they ran for longer than the caller would wait
│   ├── PausedWithRequests       a pause keeps them, so they cannot finish
│   └── PauseTakenBack           a resume came while the pause waited for them
├── WeightsError                 expected: an update was refused; the old weights still serve
│   ├── TensorsRefused           its tensors are not what the model needs; every bad one is listed
│   │   └── ChecksumMismatch     some are not what the sender has sent
│   ├── GenerationChanged        other weights serve than the update was made for
│   ├── UpdateUnderWay           another update has begun or is staged
│   └── UnknownUpdate            no update of that id is staged
├── AdapterError                 expected: an adapter was not loaded; those that serve are as before
│   ├── AdapterFormatError       its config or its tensors are not what the model can have
│   ├── AdapterExistsError       the name has other content
│   └── TooManyAdaptersError     all places are taken by adapters that are pinned or run
├── ProfileError                 expected: a profile was not made
│   ├── ProfileUnderWay          another one is recorded or written
│   └── ProfileFailed            its folder cannot be written, or JAX cannot record
├── GenerationError              unexpected: one request cannot go on; the engine serves the others
│   └── NonFiniteLogits          the model computed NaN or infinity
└── EngineFailure                unexpected: a bug or the device failed; the engine is dead
    ├── EngineDead               the engine had died before it was asked; another engine may take the request
    └── GroupEnded               another process that has a part of the model was lost

The service maps each class to one gRPC status in one table; a test proves that none is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.runtime.sent_tensors import TensorProblem

_MOST_NAMED = 10
"""Bad tensors that a message names."""


def _rebuilt(kind: type[PenstockError], args: tuple[Any, ...], state: dict[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class PenstockError(Exception):
    """The root of all errors that are raised on purpose. They can be pickled and copied, for example by a
    pool of processes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call __init__(*args), but args are the message, not what __init__ takes.
        return _rebuilt, (type(self), self.args, self.__dict__)


class ConfigError(PenstockError):
    """Options, a config.json or a checkpoint that cannot be served."""


class UnknownArchitecture(ConfigError):
    """A checkpoint names an architecture that is not served.

    nearest: the architecture that is served and comes nearest to it, if there is one. lacks: the fields of
    config.json of which that one has other values or none. where: which kind of checkpoint has architectures
    of its own.
    """

    def __init__(
        self, name: str, nearest: str | None = None, lacks: Sequence[str] = (), where: str = ""
    ) -> None:
        self.name, self.nearest, self.lacks = name, nearest, tuple(lacks)
        what = next((what for part, what in _OTHER_KINDS.items() if part in name), "")
        message = f"unknown architecture {name!r}{where}{what}"
        if nearest is not None and not what:
            message += f"; the nearest that is served is {nearest}"
            shown, others = ", ".join(lacks[:_MOST_NAMES]), len(lacks) - _MOST_NAMES
            more = f" and {others} more" if others > 0 else ""
            message += f", which does not take these fields as they are: {shown}{more}" if lacks else ""
        super().__init__(message)


_MOST_NAMES = 6
"""How many fields are named of an architecture that is not served."""


_ENCODER = " (an encoder of a kind that is not served)"
_OTHER_KINDS = {
    "Bert": _ENCODER,
    "BERT": _ENCODER,
    "Roberta": _ENCODER,
    "ForMaskedLM": _ENCODER,
    "Electra": _ENCODER,
    "MPNet": _ENCODER,
    "T5": " (an encoder with a decoder, which is not served)",
    "Bart": " (an encoder with a decoder, which is not served)",
    "Whisper": " (a model that reads speech, which is not served)",
    "ForSequenceClassification": " (a classifier of a kind that is not served)",
    "ForTokenClassification": " (a classifier of a kind that is not served)",
    "CLIP": " (a model that compares images with texts, which is not served)",
    "Siglip": " (a model that compares images with texts, which is not served)",
}
"""What models are of which the architecture has this part in its name."""


class CheckpointError(ConfigError):
    """The checkpoint's tensors do not match the model; lists all of them, not only the first."""

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        where: str = "checkpoint",
    ) -> None:
        self.missing, self.extra, self.mismatched = tuple(missing), tuple(extra), tuple(mismatched)
        groups = (("missing", missing), ("unexpected", extra), ("wrong shape or dtype", mismatched))
        parts = [f"{title} ({len(names)}): {', '.join(names)}" for title, names in groups if names]
        super().__init__(f"{where} does not match the model: " + "; ".join(parts))


class RequestError(PenstockError):
    """The caller can mend the request."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing wrong with one field; `field` is the contract's dotted path, e.g. "sampling.top_p"."""

    field: str
    description: str


class InvalidRequest(RequestError):
    """Fields out of range; `violations` lists every one."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        if not violations:
            raise ValueError("InvalidRequest needs at least one violation")
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))


class UnsupportedFeature(RequestError):
    """Fields (or whole RPCs) of the contract that this build refuses instead of ignoring them. `why` says
    more, in words, if there is more to say.
    """

    def __init__(self, fields: Sequence[str], why: str = "") -> None:
        self.fields, self.why = tuple(fields), why
        reason = f" ({why})" if why else ""
        super().__init__(f"not supported by this server: {', '.join(fields)}{reason}")


class PromptTooLong(RequestError):
    """The prompt leaves no room for one generated token."""

    def __init__(self, num_prompt_tokens: int, max_prompt_tokens: int) -> None:
        self.num_prompt_tokens, self.max_prompt_tokens = num_prompt_tokens, max_prompt_tokens
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens; at most {max_prompt_tokens} fit the context"
        )


class ExceedsKVCapacity(RequestError):
    """The request would not fit the KV cache even if it were alone on the server."""

    def __init__(self, needed_tokens: int, capacity_tokens: int) -> None:
        self.needed_tokens, self.capacity_tokens = needed_tokens, capacity_tokens
        super().__init__(
            f"the request needs {needed_tokens} tokens of KV cache; the server has {capacity_tokens}"
        )


class DuplicateRequestId(RequestError):
    """A request with this id is running or waiting."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request id {request_id!r} is active; ids must be unique while they run")


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: str) -> None:
        self.name, self.served = name, served
        super().__init__(f"model {name!r} is not served here; this server serves {served!r}")


class UnknownAdapterError(RequestError):
    """No adapter of this name is loaded here."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"adapter {name!r} is not loaded here")


class WeightsTooOld(RequestError):
    """The request wants weights of a generation that does not serve yet."""

    def __init__(self, wanted: int, serving: int) -> None:
        self.wanted, self.serving = wanted, serving
        super().__init__(
            f"the request wants weights of generation {wanted} or newer; generation {serving} serves"
        )


class UnavailableError(PenstockError):
    """Try again later, or elsewhere."""


class QueueFull(UnavailableError):
    """The waiting queue is at its limit. `retry_after_s` says in how many seconds there should be room, if
    that is known.
    """

    def __init__(self, limit: int, retry_after_s: float | None = None) -> None:
        self.limit, self.retry_after_s = limit, retry_after_s
        when = "" if retry_after_s is None else f"; retry in {retry_after_s:.2g} s"
        super().__init__(f"the queue is full ({limit} requests are waiting){when}")


class CostlyGrammar(UnavailableError):
    """The grammar, which was in `field`, took too long to follow lately. It is refused for another
    `retry_after_s` seconds.
    """

    def __init__(self, field: str, retry_after_s: float) -> None:
        self.field, self.retry_after_s = field, retry_after_s
        super().__init__(
            f"{field}: the grammar took too long to follow; it is refused for another {retry_after_s:.2g} s"
        )


class Draining(UnavailableError):
    """The server is shutting down and takes no new requests."""

    def __init__(self) -> None:
        super().__init__("the server is draining and takes no new requests")


class NotReady(UnavailableError):
    """The model is not loaded yet, or warm-up has not ended."""

    def __init__(self) -> None:
        super().__init__("the server is still loading or warming up")


class WeightsIncomplete(UnavailableError):
    """An update in place failed after it had replaced some of the weights, so none can serve until an update
    of all weights succeeds. `reason` says what failed.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"an update replaced only some of the weights ({reason}); the server needs an update of all"
        )


class ChangeRefused(PenstockError):
    """An update or a pause was not made, because of the requests that run; nothing has changed."""


class DrainTimeout(ChangeRefused):
    """The time is over that the caller gave the running requests, and an update before this one, to end."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(
            f"running requests, or an update before, had not ended after {timeout_s:g} s; nothing has changed"
        )


class PausedWithRequests(ChangeRefused):
    """The caller wants to wait for the running requests, and a pause keeps them, so they cannot end.
    `num_requests` says how many.
    """

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        super().__init__(
            f"the server is paused and keeps {num_requests} requests, which cannot finish before it resumes; "
            "resume it, or choose another policy for them"
        )


class PauseTakenBack(ChangeRefused):
    """The server was told to resume while the pause waited for its turn."""

    def __init__(self) -> None:
        super().__init__("the server was told to resume before the pause began, so it is not paused")


class WeightsError(PenstockError):
    """A weight update was refused; the old weights still serve."""


class TensorsRefused(WeightsError):
    """Tensors of an update are not what the model needs. `problems` lists every bad tensor; the message names
    the first few.
    """

    def __init__(self, problems: Sequence[TensorProblem]) -> None:
        if not problems:
            raise ValueError("TensorsRefused needs at least one problem")
        self.problems = tuple(problems)
        more = len(problems) - _MOST_NAMED
        super().__init__(
            "the update's tensors do not fit the model: "
            + "; ".join(map(str, problems[:_MOST_NAMED]))
            + (f"; and {more} more" if more > 0 else "")
        )


class ChecksumMismatch(TensorsRefused):
    """The bytes of a tensor are not those of which the sender made its checksum, so data was lost on the
    way.
    """


class GenerationChanged(WeightsError):
    """The update was to replace weights of another generation than the one that serves."""

    def __init__(self, expected: int, current: int) -> None:
        self.expected, self.current = expected, current
        super().__init__(f"the update is for weights of generation {expected}; generation {current} serves")


class UpdateUnderWay(WeightsError):
    """There is one update at a time, and one has begun, or is `staged` and waits to be committed or
    discarded.
    """

    def __init__(self, update_id: str, *, staged: bool) -> None:
        self.update_id, self.staged = update_id, staged
        state = "is staged: commit or discard it first" if staged else "is under way: wait until it has ended"
        super().__init__(f"the update {update_id!r} {state}")


class UnknownUpdate(WeightsError):
    """No update of this id is staged."""

    def __init__(self, update_id: str) -> None:
        self.update_id = update_id
        super().__init__(f"no update {update_id!r} is staged")


class AdapterError(PenstockError):
    """An adapter was not loaded. Those that serve are as before."""


class AdapterFormatError(AdapterError):
    """The adapter's config or its tensors are not what the model can have. `tensor` and `field` name what is
    wrong, if it is one tensor or one field of adapter_config.json.
    """

    def __init__(self, message: str, *, tensor: str | None = None, field: str | None = None) -> None:
        self.tensor, self.field = tensor, field
        where = tensor if field is None else f"adapter_config.json: {field}"
        super().__init__(message if where is None else f"{where}: {message}")


class AdapterExistsError(AdapterError):
    """An adapter of this name is loaded with other content, and it was not to be replaced."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"adapter {name!r} is loaded with other content; unload it first, or replace it")


class TooManyAdaptersError(AdapterError):
    """All places for adapters are taken by those that are pinned or run. `limit` is how many there are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"all {limit} places for adapters are taken by adapters that are pinned or run")


class ProfileError(PenstockError):
    """A profile was not made. The engine serves as before."""


class ProfileUnderWay(ProfileError):
    """There is one profile at a time in a process, and another one is recorded or written."""

    def __init__(self) -> None:
        super().__init__("another profile is under way: wait until it has ended")


class ProfileFailed(ProfileError):
    """The profile could not be recorded or written; the message says why."""


class GenerationError(PenstockError):
    """One request cannot go on; the engine serves the others."""


class NonFiniteLogits(GenerationError):
    """The model computed NaN, or infinity, instead of logits."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite; its weights or its precision are at fault")


class EngineFailure(PenstockError):
    """The engine died; `__cause__` says why. What the caller had asked for may be the reason."""


class EngineDead(EngineFailure):
    """The engine had died before the caller asked for anything; `__cause__` holds the failure."""


class GroupEnded(EngineFailure):
    """A process of the group that has the model was lost, or hangs, so all of them end and start again."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the group of processes that has the model has ended: {reason}")
