"""What a request hands back: frozen values, free of protobuf, that can be compared, kept and pickled.

Durations are seconds. Log-probabilities are natural logarithms of the model's own distribution, before
temperature and filters.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from penstock.client.values.chat_values import ChatMessage, ToolCall


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
    """What the model marked as thinking; not in `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Parsed from the output; not in `text`."""

    @property
    def message(self) -> ChatMessage:
        """The assistant's turn, to go on with the conversation; without the reasoning."""
        return ChatMessage("assistant", self.text, self.tool_calls)


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request; `outputs` are `n`, ordered by index. What an output has, this has of the first."""

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

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> ChatMessage:
        return self.outputs[0].message


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
    """What was added to one output: `delta` is the new text; all of it so far is `text()` of the stream.

    `delta` may be empty while text is held back because it may still become a stop string or a tool call;
    `token_ids`, the new ones, are never held back. `reasoning` and `tool_calls` are the new ones too, each
    call whole. The deltas of several outputs (`n`) come mixed: `index` tells them apart.
    """

    index: int
    delta: str
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
