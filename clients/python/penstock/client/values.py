"""What the client hands back: frozen values, free of protobuf, that can be compared, kept and pickled.

Durations are seconds. Log-probabilities are natural logarithms of the model's own distribution, before
temperature and filters.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why an output ended."""

    EOS = "eos"
    STOP = "stop"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """A reason of a newer contract than this client's."""


class AbortOutcome(enum.Enum):
    """What an abort did to one request."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended; `stop` or `token_id` is what STOP matched, `message` an abort's reason."""

    reason: FinishReason
    stop: str | None = None
    token_id: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One entry per token: `sampled` is the token's own, `top` the likeliest ones as (token id, logprob)."""

    sampled: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Which weights: order versions by `generation`; `label` is free text."""

    label: str
    generation: int


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """Tokens from `first_output_token` up to the next span were made by `version`."""

    first_output_token: int
    version: WeightsVersion


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `arguments_json` is as the model wrote it."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_prompt_tokens: int
    """Of those, read from the prefix cache."""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured by the server from the moment it accepted the request, in seconds."""

    queue: float
    time_to_first_token: float | None
    """None: no token was made."""
    total: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """The prompt as the model saw it."""

    token_count: int
    truncated_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """Only with `echo_prompt_token_ids`."""
    logprobs: Logprobs | None = None
    """Only with `prompt_logprobs`."""


@dataclass(frozen=True, slots=True)
class Output:
    """One of the `n` outputs of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: Logprobs | None = None
    weights: tuple[WeightsSpan, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request. `text`, `token_ids`, `finish`, `logprobs` are those of the first output."""

    request_id: str
    model: str
    prompt: PromptInfo
    outputs: tuple[Output, ...]
    usage: Usage
    timing: Timing

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.outputs[0].finish

    @property
    def logprobs(self) -> Logprobs | None:
        return self.outputs[0].logprobs

    @property
    def weights(self) -> tuple[WeightsSpan, ...]:
        return self.outputs[0].weights


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a stream, once."""

    request_id: str
    model: str
    prompt: PromptInfo
    weights: WeightsVersion
    delta: str = field(default="", init=False)


@dataclass(frozen=True, slots=True)
class Delta:
    """What was added to one output: `delta` is the new text, `text` all of it so far.

    `delta` may be empty while text is held back because it may still become a stop string; `token_ids`, the
    new ones, are never held back.
    """

    index: int
    delta: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    weights: WeightsVersion | None = None
    """Only when it changed since the last delta."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Once per output; `text` is all of it."""

    index: int
    finish: Finish
    text: str
    delta: str = field(default="", init=False)


@dataclass(frozen=True, slots=True)
class Summary:
    """Last event of a stream, once."""

    usage: Usage
    timing: Timing
    delta: str = field(default="", init=False)


StreamEvent = Started | Delta | Finished | Summary
"""Every event has `delta`, the new text, empty except in Delta, so that a loop need not ask for its class."""


@dataclass(frozen=True, slots=True)
class AbortResult:
    request_id: str
    outcome: AbortOutcome


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What an unset sampling field means on this server; None: the server did not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that a weight update accepts."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingDefaults
    weights: WeightsVersion
    features: tuple[str, ...]
    """Optional parts of the contract that the server has, e.g. "chat"; using another raises Unsupported."""
    tensors: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Limits of the server, fixed at its start."""

    server_version: str
    instance_id: str
    contract_revision: int
    max_running_requests: int
    max_queued_requests: int
    kv_page_tokens: int
    kv_pages_total: int
    max_chunk_bytes: int
    max_logprobs: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is now."""

    running_requests: int
    queued_requests: int
    queued_prompt_tokens: int
    kv_pages_used: int
    kv_pages_total: int
    paused: bool
    weights: WeightsVersion


@dataclass(frozen=True, slots=True)
class FlushedCache:
    """What a flush of the prefix cache did, in KV pages."""

    pages_freed: int
    pages_in_use: int
    """By running requests, not touched."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized text and the room it has to fit into."""

    token_ids: tuple[int, ...]
    max_context_tokens: int
