"""Converts keyword arguments to request messages. Both clients share these pure functions.

An option that is absent or None stays unset on the wire, so the server's default applies. A given value is
always sent, even zero: temperature 0 is greedy, while an unset one is the model's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import Message as ProtoMessage

from penstock.client.generation.checks import Violations, checked, named
from penstock.client.generation.options import (
    CHAT_FIELDS,
    FIELDS,
    ChatOptions,
    RequestOptions,
    Truncation,
    set_constraint,
)
from penstock.client.values.chat_values import ChatMessage, Image, Tool, json_text, tools_of, turns_of
from penstock.client.values.results import WeightsVersion
from penstock.v1 import inference_pb2, types_pb2


def chat_prompt(chat: ChatOptions) -> types_pb2.ChatPrompt:
    """Convert a conversation. Raises TypeError for a turn or a tool of a wrong type, and InvalidRequest, with
    every bad field, for values that JSON or the wire cannot carry.
    """
    prompt = types_pb2.ChatPrompt()
    violations = Violations()
    for i, turn in enumerate(turns_of(chat.get("messages") or ())):
        with violations.of(f"chat.messages[{i}]"):
            prompt.messages.append(_turn(turn))
    for i, tool in enumerate(tools_of(chat.get("tools") or ())):
        with violations.of(f"chat.tools[{i}]"):
            prompt.tools.append(_tool(tool))
    if (choice := chat.get("tool_choice")) is not None:
        with violations.of("chat.tool_choice"):
            prompt.tool_choice = choice
    if (template := chat.get("chat_template")) is not None:
        with violations.of("chat.chat_template"):
            prompt.chat_template = template
    if (options := chat.get("template_options")) is not None:
        with violations.of("chat.template_options_json"):
            prompt.template_options_json = json_text(dict(options))
    if (parallel := chat.get("parallel_tool_calls")) is not None:
        with violations.of("chat.parallel_tool_calls"):
            prompt.parallel_tool_calls = parallel
    violations.tell()
    return prompt


def _turn(turn: ChatMessage) -> types_pb2.ChatMessage:
    calls = [
        types_pb2.ToolCall(id=c.id, name=c.name, arguments_json=c.arguments_json) for c in turn.tool_calls
    ]
    return types_pb2.ChatMessage(
        role=turn.role,
        content=turn.content if isinstance(turn.content, str) else "",
        parts=() if isinstance(turn.content, str) else map(_part, turn.content),
        tool_calls=calls,
        tool_call_id=turn.tool_call_id,
        reasoning=turn.reasoning,
        name=turn.name,
    )


def _part(part: str | Image) -> types_pb2.ContentPart:
    return (
        types_pb2.ContentPart(image=image_message(part))
        if isinstance(part, Image)
        else types_pb2.ContentPart(text=part)
    )


def image_message(image: Image) -> types_pb2.Image:
    """Make the contract's message of an image."""
    return types_pb2.Image(data=image.data, media_type=image.media_type)


def _tool(tool: Tool) -> types_pb2.ToolDefinition:
    return types_pb2.ToolDefinition(
        name=tool.name,
        description=tool.description,
        parameters_json="" if tool.parameters is None else json_text(tool.parameters),
        strict=tool.strict,
    )


RequestT = TypeVar("RequestT", inference_pb2.GenerateRequest, inference_pb2.StreamRequest)

_OPTIONS = ("token_ids", *CHAT_FIELDS, *FIELDS)
_CONSTRAINTS = {
    "json_schema": "JsonSchema(...)",
    "json_object": "JsonObject()",
    "regex": "Regex(...)",
    "ebnf": "Ebnf(...)",
    "grammar": "Ebnf(...)",
    "choice": "Choice(...)",
}
"""From names of options that other APIs have to the constraint that is meant."""


def fill_request(request: RequestT, prompt: str | None, options: RequestOptions) -> RequestT:
    """Write prompt and options into an empty request and return it.

    Raises TypeError for an unknown option, a value of a wrong type, or not exactly one input; and
    InvalidRequest, with every bad field, for values that the wire cannot carry, such as a negative count.
    """
    given = given_of(options, _OPTIONS)
    violations = Violations()
    with violations.of("input"):
        _set_input(request, prompt, given)
    for name, value in given.items():
        if name in FIELDS:
            with violations.of(FIELDS[name]), named(name):
                assign(request, FIELDS[name], value)
    violations.tell()
    return request


def stream_request(
    prompt: str | None,
    min_tokens_per_message: int | None,
    options: RequestOptions,
    *,
    tool_call_deltas: bool = False,
) -> inference_pb2.StreamRequest:
    """Build a StreamRequest, which has two options of its own. Raises as `fill_request`."""
    with checked("min_tokens_per_message"):
        request = inference_pb2.StreamRequest(min_tokens_per_message=min_tokens_per_message)
    with checked("tool_call_deltas"):
        request.tool_call_deltas = tool_call_deltas
    return fill_request(request, prompt, options)


def given_of(options: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return the options that were given and are not None. Raises TypeError for an unknown option, and
    suggests a known one.
    """
    known = tuple(known)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            if "constraint" in known and name in _CONSTRAINTS:
                hint = f"; use constraint={_CONSTRAINTS[name]}"
            else:
                hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unknown option {name!r}{hint}")
    return {name: value for name, value in options.items() if value is not None}


def _set_input(request: RequestT, prompt: str | None, given: Mapping[str, Any]) -> None:
    inputs = {"prompt": prompt, "token_ids": given.get("token_ids"), "messages": given.get("messages")}
    names = [name for name, value in inputs.items() if value is not None]
    if len(names) != 1:
        raise TypeError(
            "give one of prompt, token_ids and messages" + (f", not {' and '.join(names)}" if names else "")
        )
    chat = {name: given[name] for name in CHAT_FIELDS if name in given}
    if "messages" in given and "media" in given:
        raise TypeError("media goes with prompt and token_ids; images of messages stand in their content")
    if chat and "messages" not in chat:
        raise TypeError(f"{next(iter(chat))} goes with messages, not with {names[0]}")
    if prompt is not None:
        with checked("prompt"):
            request.prompt = prompt
    elif "token_ids" in given:
        with checked("prompt_token_ids.ids"):
            request.prompt_token_ids.SetInParent()
            request.prompt_token_ids.ids.extend(given["token_ids"])
    else:
        request.chat.CopyFrom(chat_prompt(cast(ChatOptions, chat)))


def assign(request: ProtoMessage, path: str, value: Any) -> None:
    """Assign one option. Raises ValueError if the field's type cannot hold the value."""
    *parents, name = path.split(".")
    holder: Any = request
    for parent in parents:
        holder = getattr(holder, parent)
    match name:
        case "constraint":
            set_constraint(holder.constraint, value)
        case "generation":
            holder.generation = value.generation if isinstance(value, WeightsVersion) else value
        case "time_limit":
            holder.time_limit.FromNanoseconds(round(value * 1e9))
        case "truncation":
            holder.truncation = _truncation(value)
        case "logit_bias":
            holder.logit_bias.update(value)
        case "stop":
            holder.stop.extend([value] if isinstance(value, str) else value)
        case "media":
            holder.media.extend(map(image_message, _images(value)))
        case "bad_words" if isinstance(value, str):
            raise TypeError("give a sequence of strings, not one string")
        case "stop_token_ids" | "allowed_token_ids" | "bad_words":
            getattr(holder, name).extend(value)
        case _:
            setattr(holder, name, value)


def _images(value: Sequence[Image]) -> Sequence[Image]:
    for image in value:
        if not isinstance(image, Image):
            raise TypeError(f"give a sequence of Image, such as [Image(path)], not of {type(image).__name__}")
    return value


def _truncation(value: Truncation | str) -> types_pb2.Truncation.ValueType:
    names = [member.value for member in Truncation]
    name = value.value if isinstance(value, Truncation) else value
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names)}, not {name!r}")
    return types_pb2.Truncation.Value(f"TRUNCATION_{name.upper()}")
