"""Converts a conversation to the contract's ChatPrompt."""

from __future__ import annotations

from penstock.client.requests.checks import Violations
from penstock.client.requests.options import ChatOptions
from penstock.client.values.chat_values import ChatMessage, Tool, tools_of, turns_of
from penstock.client.values.image_values import Image
from penstock.client.values.jsontext import json_text
from penstock.v1 import types_pb2


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
    )


def _part(part: str | Image) -> types_pb2.ContentPart:
    return (
        types_pb2.ContentPart(image=image_message(part))
        if isinstance(part, Image)
        else types_pb2.ContentPart(text=part)
    )


def image_message(image: Image) -> types_pb2.Image:
    """The contract's message of a picture."""
    return types_pb2.Image(data=image.data, media_type=image.media_type)


def _tool(tool: Tool) -> types_pb2.ToolDefinition:
    return types_pb2.ToolDefinition(
        name=tool.name,
        description=tool.description,
        parameters_json="" if tool.parameters is None else json_text(tool.parameters),
        strict=tool.strict,
    )
