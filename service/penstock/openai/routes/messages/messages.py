"""POST /v1/messages and /v1/messages/count_tokens: the keyword arguments for the client, and the replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from penstock.client import ChatOptions, RequestOptions, Tool
from penstock.openai.backend import ModelFacts
from penstock.openai.calls import call_of
from penstock.openai.endpoints import ignored_in, name_params
from penstock.openai.failures import invalid_value, missing, unsupported_value
from penstock.openai.front import front_of
from penstock.openai.generation.options import form_beside_tools, schema_constraint
from penstock.openai.reading import read_body
from penstock.openai.replying import answered, json_response, sse
from penstock.openai.routes.messages.turns import has_images, ignored_blocks, turns_of
from penstock.openai.routes.messages.writing import message_events, whole_message
from penstock.openai.routes.tokens import check_model
from penstock.openai.routes.turns import SWITCHES, named_choice
from penstock.openai.schemas.messages import (
    BuiltInTool,
    CountTokensBody,
    CustomTool,
    JsonFormat,
    MessagesBody,
)
from penstock.openai.schemas.responses import Other

ValueT = TypeVar("ValueT")

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OLD_FORMAT = "output_format"
_FORMAT = "output_config.format"


def chat_options(body: CountTokensBody, facts: ModelFacts) -> ChatOptions:
    """Make the keyword arguments for the conversation. Raises ApiError, with the field, for what the front
    can tell to be wrong; the rest is the server's to tell.
    """
    tools, choice = _tools(body), body.tool_choice
    return ChatOptions(
        messages=[turn.message() for turn in turns_of(body)],
        tools=tools or None,
        tool_choice=_choice(body, [tool.name for tool in tools]),
        parallel_tool_calls=False if tools and choice and choice.disable_parallel_tool_use else None,
        template_options=_variables(body, facts.template_variables) or None,
    )


def message_options(body: MessagesBody, facts: ModelFacts) -> RequestOptions:
    """Make the keyword arguments of `generate` or `stream`. Raises ApiError as `chat_options` does."""
    options = cast(RequestOptions, chat_options(body, facts))
    form, param = _format(body)
    if form is not None:
        constraint = schema_constraint(form.schema_, strict=False)
        options["constraint"] = form_beside_tools(constraint, param, _tools(body), options["tool_choice"])
    asked = facts.asked_for(body.model)
    options["model"], options["adapter"] = asked["model"], asked["adapter"]
    options["max_tokens"] = body.max_tokens
    options["temperature"] = body.temperature
    options["top_p"] = body.top_p
    options["top_k"] = body.top_k
    options["stop"] = body.stop_sequences
    return options


def message_params(body: CountTokensBody) -> dict[str, str]:
    """Map the contract's path of a field to the name of the field of this request that it was made of.

    Raises ApiError where the request cannot be converted.
    """
    _, form = _format(body)
    params = {
        **{f"sampling.{name}": name for name in ("temperature", "top_p", "top_k")},
        "model": "model",
        "adapter": "model",
        "input": "messages",
        "chat": "messages",
        "chat.messages": "messages",
        "chat.tools": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "chat.template_options_json": "thinking",
        "stopping.max_tokens": "max_tokens",
        "stopping.stop": "stop_sequences",
        "constraint": form,
        "constraint.json_schema": f"{form}.schema",
    }
    for i, (_, path) in enumerate(_custom_tools(body)):
        params |= {
            f"chat.tools[{i}]": path,
            f"chat.tools[{i}].parameters_json": f"{path}.input_schema",
        }
    for i, turn in enumerate(turns_of(body)):
        params |= turn.params(f"chat.messages[{i}]")
    return params


def message_ignored(body: CountTokensBody, facts: ModelFacts) -> set[str]:
    """Return the fields that have no effect, besides those that the body itself ignores."""
    ignored = {f"tools[].{tool.kind}" for tool in body.tools or () if isinstance(tool, BuiltInTool)}
    ignored |= ignored_blocks(body.messages)
    known = facts.template_variables
    if body.thinking is not None and not {*SWITCHES, "reasoning_effort"} & set(known):
        ignored.add("thinking")
    if body.thinking is not None and body.thinking.display == "summarized":
        ignored.add("thinking.display")
    effort = _effort(body)
    if effort is not None and _variables(body, known).get("reasoning_effort") != effort:
        ignored.add("output_config.effort")
    form, param = _format(body)
    if form is not None and body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
        ignored.add(param)  # the answer is a call and no text
    return ignored


def _custom_tools(body: CountTokensBody) -> list[tuple[CustomTool, str]]:
    """List the caller's own tools with their paths. Raises ApiError, with the field, for a tool that is
    neither one of them nor passed over.
    """
    tools: list[tuple[CustomTool, str]] = []
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, CustomTool):
            tools.append((tool, f"tools[{i}]"))
        elif isinstance(tool, Other):
            why = f'the model knows tools of the type "custom" only, and this is {tool.type[:40]!r}.'
            raise unsupported_value(f"tools[{i}].type", why)
    return tools


def _tools(body: CountTokensBody) -> list[Tool]:
    return [
        Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
        for tool, _ in _custom_tools(body)
    ]


def _choice(body: CountTokensBody, names: Sequence[str]) -> str | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise missing("tool_choice.name")
        return named_choice(choice.name, names, "tool_choice.name")
    if choice.name is not None:
        raise invalid_value("tool_choice.name", 'it goes with the type "tool".')
    return _CHOICES[choice.type]


def _format(body: CountTokensBody) -> tuple[JsonFormat | None, str]:
    """Return the form of the answer's text, and the field that has it. Raises ApiError where two fields have
    it.
    """
    form = None if body.output_config is None else body.output_config.format
    if body.output_format is None:
        return form, _FORMAT
    if form is not None:
        raise invalid_value(_OLD_FORMAT, f"it is an older name of {_FORMAT}; give one of them.")
    return body.output_format, _OLD_FORMAT


def _effort(body: CountTokensBody) -> str | None:
    return None if body.output_config is None else body.output_config.effort


def _variables(body: CountTokensBody, known: Collection[str]) -> dict[str, Any]:
    """Return the variables of the chat template that say whether and how much the model thinks, of those that
    the template knows. Where it is left to the model, none does.
    """
    made: dict[str, Any] = {}
    is_off = body.thinking is not None and body.thinking.type == "disabled"
    switch = next((name for name in SWITCHES if name in known), None)
    if switch is not None and body.thinking is not None:
        made[switch] = not is_off
    effort = "none" if is_off and switch is None else None if is_off else _effort(body)
    if "reasoning_effort" in known and effort is not None:
        made["reasoning_effort"] = effort
    return made


async def create_message(request: Request) -> Response:
    """Serve POST /v1/messages."""
    call, backend = call_of(request), front_of(request).backend
    body = await read_body(request, MessagesBody)
    facts = await backend.facts(call)
    ignored_in(request.scope).update(message_ignored(body, facts))
    options = await _converted(body, lambda: message_options(body, facts))
    name_params(request.scope, lambda: message_params(body))
    options["request_id"] = f"msg_{call.number}"
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    if body.stream:
        stream = backend.client.stream(
            tool_call_deltas=True, timeout=call.timeout, metadata=call.metadata, **options
        )
        return await sse(request, message_events(stream, shows_thinking=shows_thinking))
    answer = await answered(
        request, backend.client.generate(timeout=call.timeout, metadata=call.metadata, **options)
    )
    return json_response(whole_message(answer, shows_thinking=shows_thinking))


async def count_tokens(request: Request) -> Response:
    """Serve POST /v1/messages/count_tokens: how many tokens the model would be given."""
    call, front = call_of(request), front_of(request)
    body = await read_body(request, CountTokensBody)
    facts = await front.backend.facts(call)
    ignored_in(request.scope).update(message_ignored(body, facts))
    await check_model(body.model, front, call)
    chat = await _converted(body, lambda: chat_options(body, facts))
    name_params(request.scope, lambda: message_params(body))
    asked = front.backend.client.tokenize(timeout=call.timeout, metadata=call.metadata, **chat)
    return json_response({"input_tokens": len((await answered(request, asked)).token_ids)})


async def _converted(body: CountTokensBody, convert: Callable[[], ValueT]) -> ValueT:
    """Return what `convert` makes of the body. Base64 of megabytes is read in a thread, so that other
    requests do not wait for it.
    """
    return await asyncio.to_thread(convert) if has_images(body.messages) else convert()
