"""Converts the messages and the tools of a conversation to turns and tools of the client."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.client import ChatMessage, Tool, ToolCall
from penstock.openai.requests.refusing import invalid_value, missing, unsupported_parameter, unsupported_value
from penstock.openai.schemas import chat as schemas

CHOICES = ("none", "auto", "required")

_OF_ROLE = {
    "tool_calls": ("assistant",),
    "reasoning": ("assistant",),
    "reasoning_content": ("assistant",),
    "tool_call_id": ("tool",),
}
"""Fields that only turns of some roles may have."""

_MEDIA = {"image_url": "images", "input_audio": "audio", "file": "files", "refusal": "refusals"}


def turns_of(messages: Sequence[schemas.Message]) -> list[ChatMessage]:
    """The turns of a conversation. Raises ApiError, with the field, for a turn that makes no sense."""
    if sum(len(message.tool_calls or ()) for message in messages) > schemas.MAX_CALLS:
        raise invalid_value("messages", f"all together have more than {schemas.MAX_CALLS} calls of tools.")
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def tools_of(tools: Sequence[schemas.Tool]) -> list[Tool]:
    """The functions that the model may call."""
    return [
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
        for tool in tools
    ]


def choice_of(choice: str | schemas.NamedToolChoice | None, names: Sequence[str]) -> str | None:
    """The client's `tool_choice`. `names` are those of the tools. Raises ApiError for a name that no tool
    has.
    """
    if choice is None or isinstance(choice, str):
        return choice
    return named_choice(choice.function.name, names, "tool_choice.function.name")


def named_choice(name: str, names: Sequence[str], param: str) -> str:
    """The client's `tool_choice` for this function, which the field `param` names. Raises ApiError for a
    function that is none of the tools, or that is named as a general choice is.
    """
    if name not in names:
        raise invalid_value(param, f"none of the tools is named {name[:80]!r}.")
    if name in CHOICES:
        raise unsupported_value(param, f"a tool named {name!r} cannot be chosen by name.")
    return name


def _turn(message: schemas.Message, where: str) -> ChatMessage:
    role = message.role
    for field, roles in _OF_ROLE.items():
        if getattr(message, field) is not None and role not in roles:
            raise invalid_value(f"{where}.{field}", f'only messages of the role "{roles[0]}" have it.')
    if message.name is not None and role != "tool":
        raise unsupported_parameter(
            f"{where}.name", "models are not shown names; write them into the content."
        )
    if message.reasoning and message.reasoning_content not in (None, message.reasoning):
        raise invalid_value(
            f"{where}.reasoning_content", "it is an older name of reasoning; give one of them."
        )
    if message.tool_call_id is None and role == "tool":
        raise missing(f"{where}.tool_call_id")
    if message.content is None and role != "assistant":
        raise missing(f"{where}.content")
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    )
    return ChatMessage(
        role="system" if role == "developer" else role,
        content=_text(message.content, f"{where}.content"),
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
        reasoning=_thought(message),
    )


def _thought(message: schemas.Message) -> str:
    return message.reasoning or message.reasoning_content or ""


def _text(content: str | list[schemas.ContentPart] | None, where: str) -> str:
    """The text of all parts, with a line break between two of them, as vLLM and llama.cpp do it."""
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type != "text":
            kind = _MEDIA.get(part.type, f"parts of the type {part.type[:40]!r}")
            raise unsupported_value(f"{where}[{i}].type", f"the model does not take {kind}.")
        if part.text is None:
            raise missing(f"{where}[{i}].text")
    return "\n".join(part.text or "" for part in content)
