"""Converts the messages of /v1/messages to turns of a conversation.

A message holds blocks of several kinds, and results of tools stand in a message of the user. They become
turns of their own. Blocks of one role that follow one another are one turn, as in Anthropic's API, because
many chat templates want the roles to take turns.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.client import ChatMessage, Image, ToolCall
from penstock.openai.failures import invalid_value, unsupported_value
from penstock.openai.routes.turns import joined, part_params
from penstock.openai.schemas.messages import (
    MAX_BLOCKS,
    Base64Source,
    ContentBlock,
    CountTokensBody,
    ImageBlock,
    Message,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from penstock.openai.schemas.responses import Other, text_of

_MEDIA = {"document": "documents", "search_result": "results of searches"}
_ONLY_IN: Mapping[type[ContentBlock], str] = {
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
    ImageBlock: "user",
}
"""The role of the messages that may have a block of this kind."""


@dataclass(slots=True)
class Turn:
    """A turn, as far as its blocks have been read."""

    role: str
    path: str
    """The field that it begins with, such as "messages[2]"."""
    parts: list[str | Image] = field(default_factory=list)
    part_paths: list[str] = field(default_factory=list)
    """For each of the parts, the field that it was made of."""
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_paths: list[str] = field(default_factory=list)
    tool_use_id: str = ""

    def message(self) -> ChatMessage:
        # What the model wrote is put together as it was taken apart, when a call came between.
        texts = "".join(part for part in self.parts if isinstance(part, str))
        return ChatMessage(
            self.role,
            texts if self.role == "assistant" else joined(self.parts),
            tuple(self.calls),
            self.tool_use_id,
            "".join(self.thoughts),
        )

    def params(self, at: str) -> Mapping[str, str]:
        """Map the contract's paths of what the turn has to the fields that it was made of. `at` is the path
        of the turn.
        """
        content = "system" if self.path == "system" else f"{self.path}.content"
        params = {
            at: self.path,
            f"{at}.content": content,
            f"{at}.parts": content,
            f"{at}.tool_call_id": f"{self.path}.tool_use_id",
        }
        for j, path in enumerate(self.part_paths):
            params |= part_params(f"{at}.parts[{j}]", path, f"{path}.source.data")
        for j, path in enumerate(self.call_paths):
            call = f"{at}.tool_calls[{j}]"
            params |= {call: path, f"{call}.arguments_json": f"{path}.input"}
        return params


def turns_of(body: CountTokensBody) -> list[Turn]:
    """Make the turns of the conversation, the system prompt first. Raises ApiError, with the field, for a
    block that cannot be taken, and for a conversation that ends with a turn of the assistant.
    """
    if sum(1 for _ in _all_blocks(body.messages)) > MAX_BLOCKS:
        raise invalid_value("messages", f"all together have more than {MAX_BLOCKS} blocks.")
    if body.messages[-1].role == "assistant":
        raise unsupported_value(
            f"messages[{len(body.messages) - 1}].role",
            "the last message must be the user's: the model always answers with a turn of its own.",
        )
    turns: list[Turn] = []
    if body.system is not None:
        if isinstance(body.system, str):
            turns.append(Turn("system", "system", [body.system], ["system"]))
        else:
            paths = [f"system[{j}]" for j in range(len(body.system))]
            turns.append(Turn("system", "system", [block.text for block in body.system], paths))
    for i, message in enumerate(body.messages):
        for turn in _turns_of_message(message, f"messages[{i}]"):
            if turns and turns[-1].role == turn.role and turn.role in ("user", "assistant"):
                _extend(turns[-1], turn)
            else:
                turns.append(turn)
    return turns


def has_images(messages: Sequence[Message]) -> bool:
    """Say whether images must be made of a block, which takes long."""
    return any(isinstance(block, ImageBlock) for block in _all_blocks(messages))


def ignored_blocks(messages: Sequence[Message]) -> set[str]:
    """Return the blocks that have no effect: what a model of another server thought, which only that can
    read.
    """
    return {
        f"messages[].content[].{block.type}"
        for block in _all_blocks(messages)
        if isinstance(block, ThinkingBlock | RedactedThinkingBlock) and _thought(block) is None
    }


def _all_blocks(messages: Sequence[Message]) -> Iterator[ContentBlock | ResultBlock]:
    """Return all blocks, those of a tool's result after the result itself."""
    for message in messages:
        for block in () if isinstance(message.content, str) else message.content:
            yield block
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                yield from block.content


def _extend(turn: Turn, more: Turn) -> None:
    """Put a turn of the same role into the one before it."""
    for name in ("parts", "part_paths", "thoughts", "calls", "call_paths"):
        getattr(turn, name).extend(getattr(more, name))


def _turns_of_message(message: Message, path: str) -> list[Turn]:
    """Make the turns that a message becomes: results of tools are turns of their own, wherever they stand."""
    if isinstance(message.content, str):
        return [Turn(message.role, path, [message.content], [f"{path}.content"])]
    turns: list[Turn] = []
    for j, block in enumerate(message.content):
        at = f"{path}.content[{j}]"
        role = _ONLY_IN.get(type(block), message.role)
        if role != message.role:
            raise invalid_value(f"{at}.type", f'only messages of the role "{role}" have such blocks.')
        if isinstance(block, ToolResultBlock):
            turns.append(_result(block, at))
            continue
        if not turns or turns[-1].role == "tool":
            turns.append(Turn(message.role, path))
        _add(turns[-1], block, at)
    return turns or [Turn(message.role, path)]


def _add(turn: Turn, block: ContentBlock, path: str) -> None:
    match block:
        case ThinkingBlock() | RedactedThinkingBlock():
            turn.thoughts.append(_thought(block) or "")
        case ToolUseBlock():
            arguments = json.dumps(block.input, ensure_ascii=False)
            turn.calls.append(ToolCall(block.id, block.name, arguments))
            turn.call_paths.append(path)
        case _:
            turn.parts.append(_part(block, path))
            turn.part_paths.append(path)


def _result(block: ToolResultBlock, path: str) -> Turn:
    """Tell what a tool answered. The contract has no field for a call that failed, so words tell the
    model.
    """
    turn = Turn("tool", path, tool_use_id=block.tool_use_id)
    if block.is_error:
        turn.parts.append("Error:")
        turn.part_paths.append(f"{path}.is_error")
    if isinstance(block.content, str):
        turn.parts.append(block.content)
        turn.part_paths.append(f"{path}.content")
    for j, inner in enumerate(block.content if isinstance(block.content, list) else ()):
        turn.parts.append(_part(inner, f"{path}.content[{j}]"))
        turn.part_paths.append(f"{path}.content[{j}]")
    return turn


def _part(block: ContentBlock | ResultBlock, path: str) -> str | Image:
    match block:
        case TextBlock():
            return block.text
        case ImageBlock(source=Base64Source() as source):
            try:
                return Image(base64.b64decode(source.data, validate=True), source.media_type)
            except ValueError as error:
                raise invalid_value(f"{path}.source.data", f"it is not base64: {error}.") from None
        case ImageBlock():
            raise unsupported_value(
                f"{path}.source.type", "nothing is fetched and no files are kept; send the bytes as base64."
            )
        case _:
            assert isinstance(block, Other), "blocks of the other kinds are no parts"
            kind = _MEDIA.get(block.type, f"blocks of the type {block.type[:40]!r}")
            raise unsupported_value(f"{path}.type", f"the model does not take {kind}.")


def _thought(block: ThinkingBlock | RedactedThinkingBlock) -> str | None:
    """Return what the block holds of the model's thinking; None if another server has written it in a way
    that only that server can read.
    """
    if isinstance(block, RedactedThinkingBlock):
        return None
    if block.thinking or not block.signature:
        return block.thinking
    try:
        return text_of(block.signature)
    except ValueError:
        return None
