"""The keyword arguments of `generate`, `stream` and `tokenize`, and where each goes in the contract."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from penstock.client.requests.constraints import Constraint
from penstock.client.values.chat_values import ToolLike, Turn
from penstock.client.values.results import WeightsVersion


class Truncation(enum.Enum):
    """What becomes of a prompt that leaves too little room in the context."""

    REJECT = "reject"
    """PromptTooLong when not one token fits; the server's default, unless it says otherwise."""
    LEFT = "left"
    """Drop the oldest tokens."""
    RIGHT = "right"
    """Drop the newest tokens."""
    MIDDLE = "middle"
    """Keep both ends."""


class ChatOptions(TypedDict, total=False):
    """A conversation, rendered to a prompt by the model's chat template."""

    messages: Sequence[Turn] | None
    """Of ChatMessage, or of mappings with the same keys."""
    tools: Sequence[ToolLike] | None
    """Of Tool, or of mappings: name, description, parameters, bare or as in the OpenAI API."""
    tool_choice: str | None
    """"auto" (the default), "none", "required" or a tool's name."""
    chat_template: str | None
    """Jinja; unset: the model's own."""
    template_options: Mapping[str, Any] | None
    """Further variables of the template, e.g. {"enable_thinking": False}."""


class RequestOptions(ChatOptions, total=False):
    """Keyword arguments of `generate` and `stream`; leave one out (or pass None) for the server's default.

    Exactly one input: `prompt`, `token_ids` or `messages`.
    """

    token_ids: Sequence[int] | None

    request_id: str | None
    """Unset: the server mints one."""
    model: str | None
    adapter: str | None
    priority: int | None
    """Higher runs first; for servers whose features have "priority"."""
    min_weights: int | WeightsVersion | None
    """Refuse to start on weights of a smaller generation."""

    temperature: float | None
    """0 is greedy."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    """Drop tokens less likely than this share of the likeliest."""
    presence_penalty: float | None
    """Off the logit of each token generated before; from -2 to 2."""
    frequency_penalty: float | None
    """The same, times how often it was."""
    repetition_penalty: float | None
    """The logit of each token of prompt and output is divided by it, below 0 multiplied; 1 is off."""
    seed: int | None
    n: int | None
    """Outputs of one prompt; output i is seeded with (seed, i)."""
    logit_bias: Mapping[int, float] | None
    """Token id to what is added to its logit."""
    bad_words: Sequence[str] | None
    """Never generated, with or without a space before."""
    allowed_token_ids: Sequence[int] | None
    """Empty: all."""

    max_tokens: int | None
    """Unset: fill the context."""
    min_tokens: int | None
    """The end token and stops are held off until then."""
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    """Keep the matched stop in the text."""
    time_limit: float | None
    """Seconds; soft: the partial output comes back with TIME_LIMIT. `timeout` is the hard one."""

    return_text: bool | None
    return_token_ids: bool | None
    logprobs: int | None
    """Set: that of each sampled token, and of this many likeliest ones (may be 0)."""
    prompt_logprobs: int | None
    """The same for the prompt, in `Generation.prompt` and, of a stream, in `Started.prompt`."""
    skip_special_tokens: bool | None
    echo_prompt_token_ids: bool | None

    constraint: Constraint | None
    """What the output is forced into: JsonSchema, JsonObject, Regex, Ebnf or Choice."""

    cache_salt: str | None
    """Cached prefixes are shared only with requests of an equal salt: one per tenant isolates them."""
    bypass_prefix_cache: bool | None
    """Neither read from the prefix cache nor add to it."""

    truncation: Truncation | str | None
    """What to drop of a prompt that leaves too little room; "left" and so on will do."""
    reserve_tokens: int | None
    """Room kept for the output when the prompt is cut; unset: max_tokens, else 1."""
    cap_max_tokens: bool | None
    """Shorten the output before the prompt."""


def _paths(parent: str, *names: str) -> dict[str, str]:
    return {name: f"{parent}.{name}" for name in names}


FIELDS: Mapping[str, str] = {
    **{name: name for name in ("request_id", "model", "adapter", "priority", "constraint")},
    "min_weights": "min_weights.generation",
    **_paths("sampling", "temperature", "top_p", "top_k", "min_p"),
    **_paths("sampling", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    **_paths("sampling", "seed", "n", "logit_bias", "bad_words", "allowed_token_ids"),
    **_paths("stopping", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    **_paths("stopping", "ignore_eos", "include_stop", "time_limit"),
    "return_text": "output.text",
    "return_token_ids": "output.token_ids",
    **_paths("output", "logprobs", "prompt_logprobs", "skip_special_tokens", "echo_prompt_token_ids"),
    **_paths("cache", "cache_salt", "bypass_prefix_cache"),
    **_paths("context", "truncation", "reserve_tokens", "cap_max_tokens"),
}
"""Option to the contract's dotted path, for all but the input."""

CHAT_FIELDS: Mapping[str, str] = {
    **_paths("chat", "messages", "tools", "tool_choice", "chat_template"),
    "template_options": "chat.template_options_json",
}
"""The same for the options of a conversation."""
