"""The keyword arguments of `generate`, `stream` and `tokenize`, the field of the contract that each one sets,
and the constraints on an output: one class for each kind of grammar in the contract.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from penstock.client.generation.checks import checked
from penstock.client.values.chat_values import Image, ToolLike, Turn, json_text
from penstock.client.values.results import WeightsVersion
from penstock.client.values.sampling_values import SamplingOptions
from penstock.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The output is JSON that the schema allows. With pydantic: `JsonSchema(Model.model_json_schema())`."""

    schema: Mapping[str, Any] | str
    """The schema as a mapping, or as JSON text."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The output is any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole output matches the pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Ebnf:
    """The output is a sentence of the grammar, in the server's dialect (that of Lark)."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The output is exactly one of these strings."""

    choices: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.choices, str):
            raise TypeError("choices: give a sequence of strings, not one string")
        object.__setattr__(self, "choices", tuple(self.choices))


Constraint = JsonSchema | JsonObject | Regex | Ebnf | Choice


def set_constraint(message: types_pb2.Constraint, constraint: Constraint) -> None:
    """Write the constraint into an empty message. Raises InvalidRequest, with the field, for values that JSON
    or the wire cannot carry.

    An empty list of choices is sent, too: the server refuses it, while an unset field would mean no
    constraint.
    """
    match constraint:
        case JsonSchema(schema):
            with checked("constraint.json_schema"):
                message.json_schema = json_text(schema)
        case JsonObject():
            message.json_object.SetInParent()
        case Regex(pattern):
            with checked("constraint.regex"):
                message.regex = pattern
        case Ebnf(grammar):
            with checked("constraint.ebnf"):
                message.ebnf = grammar
        case Choice(choices):
            with checked("constraint.choice.choices"):
                message.choice.SetInParent()
                message.choice.choices.extend(choices)
        case _:
            raise TypeError(
                "give JsonSchema(...), JsonObject(), Regex(...), Ebnf(...) or Choice(...), "
                f"not {type(constraint).__name__}"
            )


class Truncation(enum.Enum):
    """What happens to a prompt that leaves too little room in the context."""

    REJECT = "reject"
    """The request fails with PromptTooLong. This is the default of a server, unless its operator chose
    another.
    """
    LEFT = "left"
    """The oldest tokens are dropped."""
    RIGHT = "right"
    """The newest tokens are dropped."""
    MIDDLE = "middle"
    """The tokens between both ends are dropped."""


class ChatOptions(TypedDict, total=False):
    """A conversation, which the model's chat template renders to a prompt."""

    messages: Sequence[Turn] | None
    """The turns, as ChatMessage or as mappings with the same keys."""
    tools: Sequence[ToolLike] | None
    """The tools that the model may call, as Tool or as mappings of name, description and parameters, bare or
    in the form of the OpenAI API.
    """
    tool_choice: str | None
    """"auto" (the default), "none", "required", or the name of a tool that must be called."""
    chat_template: str | None
    """A Jinja template to use instead of the model's own, or the name of one of the model's. Servers accept
    templates only if they were started with --allow-request-templates.
    """
    template_options: Mapping[str, Any] | None
    """Further variables for the template, such as {"enable_thinking": False}."""
    parallel_tool_calls: bool | None
    """Whether an output may call several tools (default true); if not, it ends with its first call."""


class RequestOptions(ChatOptions, SamplingOptions, total=False):
    """Keyword arguments of `generate` and `stream`. What is left out, or None, takes the server's default,
    which is the model's for sampling values.

    Give exactly one input: `prompt`, `token_ids` or `messages`; otherwise TypeError.
    """

    token_ids: Sequence[int] | None
    media: Sequence[Image] | None
    """The images of `prompt` or `token_ids`, one for each token in it that stands for an image
    (`ModelInfo.image_limits.image_token_id`). Images of `messages` stand in their content.
    """

    request_id: str | None
    """An id for `abort` and logs; by default the server makes one."""
    model: str | None
    adapter: str | None
    priority: int | None
    """Requests with a higher priority run first. Only for servers whose features have "priority"."""
    min_weights: int | WeightsVersion | None
    """The smallest generation of weights that the request may start on, such as the `current` of a weight
    update. On older weights it fails with WeightsTooOld.
    """

    max_tokens: int | None
    """The most tokens of an output; by default it may fill the context."""
    min_tokens: int | None
    """No end token and no stop ends an output before this many tokens."""
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    """Whether the text keeps the stop that ended it (default false)."""
    time_limit: float | None
    """Seconds after which an output ends with TIME_LIMIT and what it has so far; `timeout` is the
    hard limit.
    """

    return_text: bool | None
    return_token_ids: bool | None
    logprobs: int | None
    """Return the log-probability of each generated token and of this many of the likeliest ones; 0 returns
    only the token's own.
    """
    prompt_logprobs: int | None
    """Return the prompt's log-probabilities, as `logprobs` does for outputs: in `Generation.prompt`, and for
    a stream in `Started.prompt`.
    """
    skip_special_tokens: bool | None
    echo_prompt_token_ids: bool | None
    hidden_states: bool | None
    """Return the hidden state from which each token was drawn, in `Output.hidden_states`."""

    max_proposed_tokens: int | None
    """The most tokens that are proposed for an output in a step, where `ServerInfo.proposer` names somebody.
    0 turns that off for this request, which changes its speed and not its outputs.
    """

    constraint: Constraint | None
    """What the output must match: JsonSchema, JsonObject, Regex, Ebnf or Choice."""

    cache_salt: str | None
    """Cached prefixes are shared only between requests with equal salts, so one salt for each tenant isolates
    them.
    """
    bypass_prefix_cache: bool | None
    """Neither use cached prefixes nor add to them."""

    truncation: Truncation | str | None
    """How to shorten a prompt that is too long: a Truncation, or its value, such as "left"."""
    reserve_tokens: int | None
    """Tokens of the context that truncation leaves for the output; by default `max_tokens`, or 1 if that is
    unset.
    """
    cap_max_tokens: bool | None
    """Lower `max_tokens` to the room that the prompt leaves, before the prompt is shortened
    (default false).
    """


def _paths(parent: str, *names: str) -> dict[str, str]:
    return {name: f"{parent}.{name}" for name in names}


FIELDS: Mapping[str, str] = {
    **{name: name for name in ("media", "request_id", "model", "adapter", "priority", "constraint")},
    "max_proposed_tokens": "max_proposed_tokens",
    "min_weights": "min_weights.generation",
    **_paths("sampling", *types_pb2.SamplingParams.DESCRIPTOR.fields_by_name),
    **_paths("stopping", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    **_paths("stopping", "ignore_eos", "include_stop", "time_limit"),
    "return_text": "output.text",
    "return_token_ids": "output.token_ids",
    **_paths("output", "logprobs", "prompt_logprobs", "skip_special_tokens", "echo_prompt_token_ids"),
    "hidden_states": "output.hidden_states",
    **_paths("cache", "cache_salt", "bypass_prefix_cache"),
    **_paths("context", "truncation", "reserve_tokens", "cap_max_tokens"),
}
"""From an option to the contract's dotted path, for all options but the text or the tokens of the prompt."""

CHAT_FIELDS: Mapping[str, str] = {
    **_paths("chat", "messages", "tools", "tool_choice", "chat_template", "parallel_tool_calls"),
    "template_options": "chat.template_options_json",
}
"""From an option of a conversation to the contract's dotted path."""
