"""Converts the messages and the tools of a conversation to turns and tools of the client, and finds out what
a request tells the model's chat template about how much the model shall think.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.client import ChatMessage, Image, Tool, ToolCall
from penstock.openai.backend import ModelFacts
from penstock.openai.failures import invalid_value, missing, unsupported_value
from penstock.openai.routes.custom_tools import custom_call, custom_tool, pattern_of
from penstock.openai.schemas import chat as schemas

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates let the model think or not."""


def template_options(
    effort: str | None,
    variables: Collection[str],
    given: Mapping[str, Any] | None = None,
    param: str = "reasoning_effort",
) -> dict[str, Any] | None:
    """Make the variables for the template: `given` ones, and those that stand for the effort; None without
    any.

    `variables` are the names that the model's template reads, and `param` is the field that holds the effort.
    Raises ApiError if `given` ones say the same.
    """
    options = dict(given or {})
    made = variables_of_effort(effort, variables)
    if both := made.keys() & options.keys():
        raise invalid_value(param, f"chat_template_kwargs sets {both.pop()!r} as well.")
    options |= made
    return options or None


def variables_of_effort(effort: str | None, variables: Collection[str]) -> dict[str, Any]:
    """Make the variables that stand for the effort; empty where it has no effect on this template.

    A template that reads `reasoning_effort` is given it as it is. One that has only a switch takes "none",
    which switches thinking off.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    switches = [name for name in SWITCHES if name in variables]
    return {switches[0]: False} if effort == "none" and switches else {}


CHOICES = ("none", "auto", "required")

_OF_ROLE = {
    "tool_calls": ("assistant",),
    "reasoning": ("assistant",),
    "reasoning_content": ("assistant",),
    "tool_call_id": ("tool",),
}
"""Fields that only turns of some roles may have."""

_MEDIA = {"input_audio": "audio", "file": "files", "refusal": "refusals"}


def turns_of(messages: Sequence[schemas.Message]) -> list[ChatMessage]:
    """Make the turns of a conversation. Raises ApiError, with the field, for a turn that makes no sense."""
    if sum(len(message.tool_calls or ()) for message in messages) > schemas.MAX_CALLS:
        raise invalid_value("messages", f"all together have more than {schemas.MAX_CALLS} calls of tools.")
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def ignored_of(messages: Sequence[schemas.Message], facts: ModelFacts, chat_template: str | None) -> set[str]:
    """Return the fields of messages that have no effect: names, where the model's own template shows none.
    Whether a template of the request's own shows them is its author's affair.
    """
    if chat_template is not None or "names" in facts.features:
        return set()
    has_names = any(message.name is not None and message.role != "tool" for message in messages)
    return {"messages[].name"} if has_names else set()


def tools_of(tools: Sequence[schemas.AnyTool]) -> list[Tool]:
    """Make the tools that the model may call. Raises ApiError, with the field, for a grammar that cannot be
    enforced.
    """
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: schemas.AnyTool, where: str) -> Tool:
    if isinstance(tool, schemas.Tool):
        return Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
    form, where = tool.custom.format, f"{where}.custom.format"
    if form is None or form.type == "text":
        if form is not None and form.grammar is not None:
            raise invalid_value(f"{where}.grammar", 'it goes with the type "grammar".')
        return custom_tool(tool.custom.name, tool.custom.description, None)
    if form.grammar is None:
        raise missing(f"{where}.grammar")
    pattern = pattern_of(form.grammar.syntax, form.grammar.definition, f"{where}.grammar.syntax")
    return custom_tool(tool.custom.name, tool.custom.description, pattern)


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools that a request offers to the model, and which of them it must call."""

    tools: tuple[Tool, ...]
    indices: tuple[int, ...]
    """Where each of them stands in the request."""
    choice: str | None
    """The client's `tool_choice`."""


def offered_of(tools: Sequence[schemas.AnyTool], choice: schemas.ToolChoice | None) -> Offered:
    """Return the tools that a choice leaves. Raises ApiError for a name that no tool has."""
    made = tools_of(tools)
    names = [tool.name for tool in made]
    everything = tuple(range(len(made)))
    if choice is None or isinstance(choice, str):
        return Offered(tuple(made), everything, choice)
    if not isinstance(choice, schemas.AllowedTools):
        return Offered(
            tuple(made), everything, named_choice(choice.name, names, _named(choice, "tool_choice"))
        )
    for i, allowed in enumerate(choice.allowed_tools.tools):
        check_name(allowed.name, names, _named(allowed, f"tool_choice.allowed_tools.tools[{i}]"))
    left = {allowed.name for allowed in choice.allowed_tools.tools}
    indices = tuple(i for i in everything if names[i] in left)
    return Offered(tuple(made[i] for i in indices), indices, choice.allowed_tools.mode)


def _named(tool: schemas.NamedToolChoice | schemas.NamedCustomTool, where: str) -> str:
    return f"{where}.{tool.type}.name"


def check_name(name: str, names: Collection[str], param: str) -> None:
    """Raise ApiError for the name of a tool, which the field `param` has, if no tool has it."""
    if name not in names:
        raise invalid_value(param, f"none of the tools is named {name[:80]!r}.")


def named_choice(name: str, names: Sequence[str], param: str) -> str:
    """Return the client's `tool_choice` for this function, which the field `param` names. Raises ApiError for
    a function that is none of the tools, or that is named as a general choice is.
    """
    check_name(name, names, param)
    if name in CHOICES:
        raise unsupported_value(param, f"a tool named {name!r} cannot be chosen by name.")
    return name


def _turn(message: schemas.Message, where: str) -> ChatMessage:
    role = message.role
    for field, roles in _OF_ROLE.items():
        if getattr(message, field) is not None and role not in roles:
            raise invalid_value(f"{where}.{field}", f'only messages of the role "{roles[0]}" have it.')
    if message.reasoning and message.reasoning_content not in (None, message.reasoning):
        raise invalid_value(
            f"{where}.reasoning_content", "it is an older name of reasoning; give one of them."
        )
    if message.tool_call_id is None and role == "tool":
        raise missing(f"{where}.tool_call_id")
    if message.content is None and role != "assistant":
        raise missing(f"{where}.content")
    return ChatMessage(
        role="system" if role == "developer" else role,
        content=_content(message.content, f"{where}.content"),
        tool_calls=tuple(_call(call) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id or "",
        reasoning=_thought(message),
        name=message.name or "",
    )


def _call(call: schemas.AnyToolCall) -> ToolCall:
    if isinstance(call, schemas.CustomToolCall):
        return custom_call(call.id, call.custom.name, call.custom.input)
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _thought(message: schemas.Message) -> str:
    return message.reasoning or message.reasoning_content or ""


def has_images(messages: Sequence[schemas.Message]) -> bool:
    """Say whether images must be made of a part of a turn, which takes long."""
    return any(
        part.image_url is not None
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


def image_params(at: str, messages: Sequence[schemas.Message]) -> dict[str, str]:
    """Map the contract's paths of parts to the fields that they were made of. `at`: the field that has the
    messages.
    """
    params: dict[str, str] = {}
    for i, message in enumerate(messages):
        params[f"chat.messages[{i}].parts"] = f"{at}[{i}].content"
        for j in range(len(message.content) if isinstance(message.content, list) else 0):
            made_of = f"{at}[{i}].content[{j}]"
            params |= part_params(f"chat.messages[{i}].parts[{j}]", made_of, f"{made_of}.image_url.url")
    return params


def part_params(part: str, made_of: str, url: str) -> dict[str, str]:
    """Return the same of one part, whose path is `part`; `made_of` is the field that it was made of, and
    `url` the field that has the bytes of an image.
    """
    image = f"{part}.image"
    return {part: made_of, image: url, f"{image}.data": url, f"{image}.media_type": url}


def image_of(url: str, detail: str | None, where: str, detail_param: str) -> Image:
    """Return the image that a data: URL has in it, and that the field `where` holds. Raises ApiError for
    any other URL, because nothing is fetched, and for a level of detail.
    """
    if detail not in (None, "auto"):
        raise unsupported_value(detail_param, "the model decides how closely it looks.")
    try:
        return Image.from_data_url(url)
    except ValueError as error:
        raise invalid_value(where, f"{error}.") from None


def joined(parts: Sequence[str | Image]) -> str | Sequence[str | Image]:
    """Return the content of a turn: its parts, of which some are images; or, where all are texts, one text,
    with a line break between two of them, as vLLM and llama.cpp do it.
    """
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _content(content: str | list[schemas.ContentPart] | None, where: str) -> str | Sequence[str | Image]:
    if content is None or isinstance(content, str):
        return content or ""
    return joined([_part(part, f"{where}[{i}]") for i, part in enumerate(content)])


def _part(part: schemas.ContentPart, where: str) -> str | Image:
    if part.type not in ("text", "image_url"):
        kind = _MEDIA.get(part.type, f"parts of the type {part.type[:40]!r}")
        raise unsupported_value(f"{where}.type", f"the model does not take {kind}.")
    given = {"text": part.text, "image_url": part.image_url}
    if given.pop(part.type) is None:
        raise missing(f"{where}.{part.type}")
    for other, value in given.items():
        if value is not None:
            raise invalid_value(f"{where}.{other}", f"a part of the type {part.type!r} has none.")
    if part.image_url is None:
        return part.text or ""
    url = f"{where}.image_url"
    return image_of(part.image_url.url, part.image_url.detail, f"{url}.url", f"{url}.detail")
