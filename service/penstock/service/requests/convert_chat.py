"""Converts the contract's chats to validated frozen values."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.chat.messages import Chat, ChatTurn, RawTool, ToolCall
from penstock.runtime.errors import UnsupportedFeature
from penstock.runtime.generation.prompts import ChatPrompt
from penstock.runtime.media.image import ImageLimits
from penstock.runtime.text.interface import Text
from penstock.service.requests.convert_media import contents
from penstock.service.requests.convert_params import Violations
from penstock.service.threads.lanes import INLINE_BYTES, MESSAGE_BYTES
from penstock.v1 import types_pb2

MAX_TURNS = 10_000
MAX_TOOLS = 1_000
MAX_CALLS = 10_000
"""The most tool calls that all turns of a chat may have together."""
_PART_COST = 64
"""The cost of converting one turn, one part of it or one tool, in bytes, beside the bytes that it has."""


def message_cost(chat: types_pb2.ChatPrompt) -> int:
    """The cost of converting the message of this RPC with this chat in it, in bytes, as `Lanes.convert`
    expects it.
    """
    cost = MESSAGE_BYTES.get() + _PART_COST * (len(chat.messages) + len(chat.tools))
    if cost <= INLINE_BYTES:  # else parts are not worth counting, and there may be many turns
        cost += _PART_COST * sum(len(turn.parts) for turn in chat.messages)
    return cost


def chat_prompt(
    message: types_pb2.ChatPrompt, codec: Text | None, images: ImageLimits | None, bad: Violations
) -> ChatPrompt | None:
    """Convert a chat, its tools and its template. Adds what is wrong with them to `bad`, and returns None if
    anything is. Raises UnsupportedFeature if the model has no tokenizer, and for pictures if `images` is
    None: the model reads none.
    """
    if codec is None:
        raise UnsupportedFeature(["chat"])
    if not codec.has_chat_template and not message.chat_template:
        bad.add("chat", "the model has no chat template, and the request brings none")
    if not _is_within_bounds(message, bad):
        return None
    said = contents(message.messages, images, bad)
    if said is None:
        return None
    chat = bad.build(
        lambda: Chat.parse(
            [
                ChatTurn(
                    turn.role,
                    content,
                    tuple(ToolCall(c.id, c.name, c.arguments_json) for c in turn.tool_calls),
                    turn.tool_call_id,
                    turn.reasoning,
                )
                for turn, content in zip(message.messages, said, strict=True)
            ],
            [RawTool(t.name, t.description, t.parameters_json, t.strict) for t in message.tools],
            message.tool_choice,
            message.chat_template,
            message.template_options_json,
            parallel_tool_calls=message.parallel_tool_calls or not message.HasField("parallel_tool_calls"),
        )
    )
    return None if chat is None else ChatPrompt(chat)


def _is_within_bounds(message: types_pb2.ChatPrompt, bad: Violations) -> bool:
    """Whether the chat has few enough turns, tools and calls to look at all of them; adds a
    violation if not.
    """
    few_turns = bad.allows("chat.messages", len(message.messages), MAX_TURNS, "messages")
    few_tools = bad.allows("chat.tools", len(message.tools), MAX_TOOLS, "tools")
    if not (few_turns and few_tools):
        return False
    return _has_few_calls(message.messages, bad)


def _has_few_calls(turns: Sequence[types_pb2.ChatMessage], bad: Violations) -> bool:
    count = 0
    for i, turn in enumerate(turns):
        count += len(turn.tool_calls)
        if count > MAX_CALLS:
            bad.add(f"chat.messages[{i}].tool_calls", f"at most {MAX_CALLS} calls in all messages together")
            return False
    return True
