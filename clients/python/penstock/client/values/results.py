"""Values of an answer: frozen and without protobuf, so that they can be compared, kept and pickled.

Durations are in seconds. Log-probabilities are natural logarithms of the model's own distribution, before
temperature and filters.
"""

from __future__ import annotations

import enum
import struct
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
    """A reason of a newer contract, which this client does not know."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended. `stop` or `token_id` is what it ended with, if `reason` is STOP or EOS; `message`
    is the reason of an abort.
    """

    reason: FinishReason
    stop: str | None = None
    token_id: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities, one entry for each token: `sampled` has the token's own, `top` the likeliest tokens'
    as (token id, log-probability).
    """

    sampled: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of some tokens. With NumPy: `numpy.frombuffer(states.values, "<f4").reshape(-1,
    states.size)`.
    """

    size: int
    """How many numbers the state of one token has."""
    values: bytes = field(repr=False)
    """The states one after the other: floats of 32 bits, the lowest byte first."""

    def rows(self) -> list[tuple[float, ...]]:
        """Return the state of each token."""
        return list(struct.iter_unpack(f"<{self.size}f", self.values)) if self.size else []


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A version of the weights. Versions are ordered by `generation`; `label` is free text."""

    label: str
    generation: int


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """Tokens from index `first_output_token` up to the next span were generated with `version`."""

    first_output_token: int
    version: WeightsVersion


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_prompt_tokens: int
    """How many of the prompt's tokens were found in the prefix cache."""
    completion_tokens: int
    reasoning_tokens: int = 0
    """How many of the generated tokens belong to the reasoning, its tags included."""
    image_tokens: int = 0
    """How many of the prompt's tokens stand for images."""
    proposed_tokens: int = 0
    """How many tokens were proposed for the outputs and checked by the model, see `ServerInfo.proposer`."""
    accepted_tokens: int = 0
    """How many of those became tokens of the outputs."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times that the server measured from when it accepted the request, in seconds."""

    queue: float
    time_to_first_token: float | None
    """None if no token was generated."""
    total: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """The prompt as the model saw it."""

    token_count: int
    truncated_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """Set only with `echo_prompt_token_ids`."""
    logprobs: Logprobs | None = None
    """Set only with `prompt_logprobs`. The first token has none: its entry is NaN."""


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
    """The part that the model marked as reasoning, which is not in `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls parsed from the output, which are not in `text`."""
    hidden_states: HiddenStates | None = None
    """The state from which each token was drawn; set only with `hidden_states`."""

    @property
    def message(self) -> ChatMessage:
        """The assistant's turn, to continue the conversation with. Whether the model is shown its
        reasoning again is the choice of its chat template.
        """
        return ChatMessage("assistant", self.text, self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request with its `n` outputs, ordered by index. Attributes such as `text` are those of
    output 0.
    """

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
    def hidden_states(self) -> HiddenStates | None:
        return self.outputs[0].hidden_states

    @property
    def message(self) -> ChatMessage:
        return self.outputs[0].message


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a stream."""

    request_id: str
    model: str
    prompt: PromptInfo
    weights: WeightsVersion
    paused: bool = False
    """Whether the server is paused, so that no token comes before it is resumed."""
    delta: str = field(default="", init=False)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What was added to a call while the model wrote it."""

    index: int
    """Which of the output's calls it is, from 0 on."""
    id: str
    """The call's id, in its first piece; "" in others."""
    name: str
    """The function's name, in the first piece of the call; "" in others."""
    arguments_json: str
    """What comes next of the arguments."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What was added to one output. `delta` is the new text; `text()` of the stream returns all of it.

    `delta` may be empty while text is held back because it may still become a stop string or a tool call.
    `token_ids` are the new ids, and are never held back. `reasoning` and `tool_calls` are the new ones, too;
    each call comes whole, or in pieces if the stream was asked for `tool_call_deltas`. Deltas of several
    outputs come mixed; `index` tells which output one belongs to.
    """

    index: int
    delta: str
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    weights: WeightsVersion | None = None
    """Set only if the weights changed since the last delta."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    hidden_states: HiddenStates | None = None
    tool_call_deltas: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """One output has ended; `text` is all of its text. Comes once for each output."""

    index: int
    finish: Finish
    text: str
    delta: str = field(default="", init=False)


@dataclass(frozen=True, slots=True)
class Summary:
    """The last event of a stream."""

    usage: Usage
    timing: Timing
    delta: str = field(default="", init=False)


StreamEvent = Started | Delta | Finished | Summary
"""Every event has `delta`, the new text, which is empty except in Delta. So a loop need not ask for the
event's class.
"""
