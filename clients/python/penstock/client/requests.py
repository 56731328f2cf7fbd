"""Keyword arguments to request messages: pure functions, shared by the sync and the async client.

An option that is absent or None is left unset on the wire, so that the server's default counts; a value that
was given is always sent, also when it is zero (temperature 0 is greedy, unset is the model's own).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message as ProtoMessage

from penstock.client.errors import InvalidRequest, Violation, checked
from penstock.client.values import ToolCall
from penstock.v1 import inference_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: role is "system", "user", "assistant" or "tool". A mapping with these keys is taken too."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters_json` is the JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters_json: str = ""


Turn = ChatMessage | Mapping[str, Any]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; leave one out (or pass None) for the server's default.

    Exactly one input: `prompt`, `token_ids` or `messages`.
    """

    token_ids: Sequence[int] | None
    messages: Sequence[Turn] | None
    tools: Sequence[Tool] | None
    tool_choice: str | None
    """"auto", "none", "required" or a tool's name."""
    chat_template: str | None
    template_options_json: str | None

    request_id: str | None
    """Unset: the server mints one."""
    model: str | None
    adapter: str | None
    priority: int | None
    """Higher runs first; for servers whose features have "priority"."""
    min_weights: int | None
    """Refuse to start on weights of a smaller generation."""

    temperature: float | None
    """0 is greedy."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    n: int | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None

    max_tokens: int | None
    """Unset: fill the context."""
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    time_limit: float | None
    """Seconds; soft: the partial output comes back with TIME_LIMIT. `timeout` is the hard one."""

    return_text: bool | None
    return_token_ids: bool | None
    logprobs: int | None
    """Set: that of each sampled token, and of this many likeliest ones (may be 0)."""
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    echo_prompt_token_ids: bool | None

    json_schema: str | None
    json_object: bool | None
    regex: str | None
    ebnf: str | None
    choice: Sequence[str] | None

    cache_salt: str | None
    """Cached prefixes are shared only with requests of an equal salt: one per tenant isolates them."""
    bypass_prefix_cache: bool | None
    """Neither read from the prefix cache nor add to it."""
    truncation: str | None
    """"reject", "left", "right" or "middle": what to drop when prompt and max_tokens exceed the context."""
    reserve_tokens: int | None
    cap_max_tokens: bool | None


_FIELDS = {
    **{name: name for name in ("request_id", "model", "adapter", "priority")},
    "min_weights": "min_weights.generation",
    **{
        name: f"sampling.{name}"
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
            "n",
            "logit_bias",
            "bad_words",
            "allowed_token_ids",
        )
    },
    **{
        name: f"stopping.{name}"
        for name in (
            "max_tokens",
            "min_tokens",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "include_stop",
            "time_limit",
        )
    },
    "return_text": "output.text",
    "return_token_ids": "output.token_ids",
    **{
        name: f"output.{name}"
        for name in ("logprobs", "prompt_logprobs", "skip_special_tokens", "echo_prompt_token_ids")
    },
    **{name: f"constraint.{name}" for name in ("json_schema", "json_object", "regex", "ebnf", "choice")},
    **{name: f"cache.{name}" for name in ("cache_salt", "bypass_prefix_cache")},
    **{name: f"context.{name}" for name in ("truncation", "reserve_tokens", "cap_max_tokens")},
}
"""Option to the contract's dotted path; the input options are apart, in `_set_input`."""

_CHAT = ("tools", "tool_choice", "chat_template", "template_options_json")
_INPUT = ("token_ids", "messages", *_CHAT)
_CONSTRAINTS = ("json_schema", "json_object", "regex", "ebnf", "choice")

RequestT = TypeVar("RequestT", inference_pb2.GenerateRequest, inference_pb2.StreamRequest)


def fill_request(request: RequestT, prompt: str | None, options: RequestOptions) -> RequestT:
    """Write prompt and options into an empty request and return it.

    Raises TypeError for an option that does not exist or is of the wrong type and for not exactly one input,
    and InvalidRequest, listing every one, for values that the wire cannot carry (e.g. a negative count).
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := [name for name in given if name not in _FIELDS and name not in _INPUT]:
        near = difflib.get_close_matches(unknown[0], [*_FIELDS, *_INPUT], n=1)
        raise TypeError(f"unknown option {unknown[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if len(kinds := [name for name in _CONSTRAINTS if name in given]) > 1:
        raise TypeError(f"give one constraint, not {' and '.join(kinds)}")
    violations: list[Violation] = []
    try:
        _set_input(request, prompt, given)
    except ValueError as error:
        field = "prompt" if prompt is not None else "chat" if "messages" in given else "prompt_token_ids.ids"
        violations.append(Violation(field, str(error)))
    for name, value in given.items():
        if name in _FIELDS:
            try:
                _set(request, _FIELDS[name], value)
            except (ValueError, OverflowError) as error:
                violations.append(Violation(_FIELDS[name], str(error)))
    if violations:
        raise InvalidRequest.local(violations)
    return request


def stream_request(
    prompt: str | None, min_tokens_per_message: int | None, options: RequestOptions
) -> inference_pb2.StreamRequest:
    """The same for Stream, with the one option that is its own."""
    with checked("min_tokens_per_message"):
        request = inference_pb2.StreamRequest(min_tokens_per_message=min_tokens_per_message)
    return fill_request(request, prompt, options)


def _set_input(request: RequestT, prompt: str | None, given: dict[str, Any]) -> None:
    inputs = {"prompt": prompt, "token_ids": given.get("token_ids"), "messages": given.get("messages")}
    names = [name for name, value in inputs.items() if value is not None]
    if len(names) != 1:
        raise TypeError(
            "give one of prompt, token_ids and messages" + (f", not {' and '.join(names)}" if names else "")
        )
    if (extra := [name for name in _CHAT if name in given]) and names != ["messages"]:
        raise TypeError(f"{extra[0]} goes with messages, not with {names[0]}")
    if prompt is not None:
        request.prompt = prompt
    elif "token_ids" in given:
        request.prompt_token_ids.SetInParent()
        request.prompt_token_ids.ids.extend(given["token_ids"])
    else:
        request.chat.CopyFrom(
            chat_prompt(given["messages"], {name: given[name] for name in _CHAT if name in given})
        )


def chat_prompt(messages: Sequence[Turn], more: Mapping[str, Any] | None = None) -> types_pb2.ChatPrompt:
    """A conversation as a message; `more` holds tools, tool_choice, chat_template, template_options_json."""
    more = dict(more or {})
    tools = [
        types_pb2.ToolDefinition(name=t.name, description=t.description, parameters_json=t.parameters_json)
        for t in more.pop("tools", ())
    ]
    return types_pb2.ChatPrompt(messages=[_turn(message) for message in messages], tools=tools, **more)


def _turn(turn: Turn) -> types_pb2.ChatMessage:
    if isinstance(turn, Mapping):
        turn = ChatMessage(**turn)
    calls = [
        types_pb2.ToolCall(id=c.id, name=c.name, arguments_json=c.arguments_json) for c in turn.tool_calls
    ]
    return types_pb2.ChatMessage(
        role=turn.role, content=turn.content, tool_calls=calls, tool_call_id=turn.tool_call_id
    )


def _set(request: ProtoMessage, path: str, value: Any) -> None:
    """Assign one option; ValueError when the field's type cannot hold the value."""
    *parents, name = path.split(".")
    holder: Any = request
    for parent in parents:
        holder = getattr(holder, parent)
    match name:
        case "time_limit":
            holder.time_limit.FromNanoseconds(round(value * 1e9))
        case "truncation":
            holder.truncation = types_pb2.Truncation.Value(f"TRUNCATION_{value.upper()}")
        case "json_object":
            if value:
                holder.json_object.SetInParent()
        case "logit_bias":
            holder.logit_bias.update(value)
        case "stop":
            holder.stop.extend([value] if isinstance(value, str) else value)
        case "bad_words" | "choice" if isinstance(value, str):
            raise TypeError(f"{name}: give a sequence of strings, not one string")
        case "choice":
            holder.choice.choices.extend(value)
        case "stop_token_ids" | "allowed_token_ids" | "bad_words":
            getattr(holder, name).extend(value)
        case _:
            setattr(holder, name, value)
