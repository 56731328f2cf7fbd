"""Converts the items of /v1/responses to turns of a conversation.

Items are finer than turns: what the assistant thought, said and called are three items, and one turn. Items
of the assistant that follow one another are therefore put together, as a chat template needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.client import ChatMessage, Image, ToolCall
from penstock.openai.failures import invalid_value, unsupported_value
from penstock.openai.routes.custom_tools import custom_call
from penstock.openai.routes.responses.tools import flat_name
from penstock.openai.routes.turns import image_of, joined, part_params
from penstock.openai.schemas.responses import (
    CustomToolCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    Item,
    ItemReference,
    MessageItem,
    Other,
    OutputText,
    Part,
    ReasoningItem,
    text_of,
)

_MEDIA = {"input_audio": "audio", "input_file": "files"}
_NOT_KEPT = "items are not kept: send the item itself."


PREVIOUS = "previous_response_id"
"""The field that stands for the items of earlier responses."""


@dataclass(slots=True)
class _AssistantTurn:
    """A turn of the assistant, as far as its items have been read."""

    first_item: str
    """The field that has its first item, such as "input[2]"."""
    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_items: list[str] = field(default_factory=list)
    """For each of the calls, the field that has its item."""

    def may_think(self) -> bool:
        """Say whether reasoning can belong to this turn: it comes before all else."""
        return not (self.texts or self.calls)

    def may_speak(self) -> bool:
        """Say whether a message can belong to this turn: a second one is a turn of its own, but for what the
        model said after a call.
        """
        return not self.texts or bool(self.calls)

    def message(self) -> ChatMessage:
        return ChatMessage(
            "assistant",
            "\n".join(self.texts),
            tuple(self.calls),
            reasoning="\n".join(self.thoughts),
        )


@dataclass(frozen=True, slots=True)
class _OtherTurn:
    """A turn that is made of one item, of an input that is a text, or of the instructions."""

    made_of: str
    """The field that has it."""
    turn: ChatMessage

    def message(self) -> ChatMessage:
        return self.turn


def turns_of(
    items: str | Sequence[Item], instructions: str | None, previous: Sequence[Item] = ()
) -> list[ChatMessage]:
    """Make the turns of the conversation, which begins with the `previous` items. Raises ApiError, with the
    field, for an item that cannot be taken.
    """
    return [turn.message() for turn in _grouped(items, instructions, previous)]


def turn_params(
    items: str | Sequence[Item], instructions: str | None, previous: Sequence[Item] = ()
) -> Mapping[str, str]:
    """Map the contract's path of a part of a turn to the field that it was made of."""
    params = {"chat.messages": "input"}
    for i, turn in enumerate(_grouped(items, instructions, previous)):
        at = f"chat.messages[{i}]"
        if isinstance(turn, _AssistantTurn):
            params[at] = turn.first_item
            for j, item in enumerate(turn.call_items):
                call = f"{at}.tool_calls[{j}]"
                params[call] = item
                params[f"{call}.id"] = _inner(item, "call_id")
        else:
            made_of = turn.made_of
            is_item = made_of.endswith("]")
            name = "output" if turn.turn.role == "tool" else "content"
            content = f"{made_of}.{name}" if is_item else made_of
            params |= {at: made_of, f"{at}.content": content, f"{at}.parts": content}
            if is_item:
                params[f"{at}.tool_call_id"] = f"{made_of}.call_id"
                for j in range(0 if isinstance(turn.turn.content, str) else len(turn.turn.content)):
                    field = f"{content}[{j}]"
                    params |= part_params(f"{at}.parts[{j}]", field, f"{field}.image_url")
    return params


def _inner(item: str, name: str) -> str:
    """Name the field of an item. Those of items that are kept have no field in the request."""
    return item if item == PREVIOUS else f"{item}.{name}"


def _grouped(
    items: str | Sequence[Item], instructions: str | None, previous: Sequence[Item]
) -> list[_AssistantTurn | _OtherTurn]:
    turns: list[_AssistantTurn | _OtherTurn] = []
    if instructions is not None:
        turns.append(_OtherTurn("instructions", ChatMessage("system", instructions)))
    for item in previous:
        _add(turns, PREVIOUS, item)
    if isinstance(items, str):
        return [*turns, _OtherTurn("input", ChatMessage("user", items))]
    if not items and not previous:
        raise invalid_value("input", "it must have at least one item.")
    for i, item in enumerate(items):
        _add(turns, f"input[{i}]", item)
    return turns


def _add(turns: list[_AssistantTurn | _OtherTurn], at: str, item: Item) -> None:
    """Put an item into the last turn, or into a new one. `at` is the field that has it."""
    last = turns[-1] if turns and isinstance(turns[-1], _AssistantTurn) else None
    match item:
        case ReasoningItem():
            if last is None or not last.may_think():
                turns.append(last := _AssistantTurn(at))
            last.thoughts.append(_thought(item, at))
        case MessageItem(role="assistant"):
            if last is None or not last.may_speak():
                turns.append(last := _AssistantTurn(at))
            last.texts.append(_text(item.content, f"{at}.content"))
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            turns.append(_OtherTurn(at, ChatMessage(role, _content(item.content, f"{at}.content"))))
        case FunctionCallItem():
            if last is None:
                turns.append(last := _AssistantTurn(at))
            last.calls.append(ToolCall(item.call_id, flat_name(item.namespace, item.name), item.arguments))
            last.call_items.append(at)
        case CustomToolCallItem():
            if last is None:
                turns.append(last := _AssistantTurn(at))
            last.calls.append(custom_call(item.call_id, flat_name(item.namespace, item.name), item.input))
            last.call_items.append(at)
        case FunctionCallOutputItem():  # and what a custom tool answered
            output = _text(item.output, f"{at}.output")
            turns.append(_OtherTurn(at, ChatMessage("tool", output, tool_call_id=item.call_id)))
        case ItemReference():
            raise unsupported_value(f"{at}.type", _NOT_KEPT)
        case Other():
            raise unsupported_value(f"{at}.type", f"items of the type {item.type[:40]!r} are not taken.")


def has_images(items: str | Sequence[Item]) -> bool:
    """Say whether images must be made of a part of an item, which takes long."""
    return not isinstance(items, str) and any(
        isinstance(part, InputImage)
        for item in items
        if isinstance(item, MessageItem) and not isinstance(item.content, str)
        for part in item.content
    )


def _content(content: str | Sequence[Part], where: str) -> str | Sequence[str | Image]:
    if isinstance(content, str):
        return content
    return joined([_part(part, f"{where}[{i}]") for i, part in enumerate(content)])


def _text(content: str | Sequence[Part], where: str) -> str:
    """Join the text of all parts, with a line break between two of them, where no images are taken."""
    if not isinstance(content, str):
        for i, part in enumerate(content):
            if isinstance(part, InputImage):
                raise unsupported_value(f"{where}[{i}].type", "only messages have images, not answers.")
    text = _content(content, where)
    assert isinstance(text, str), "images are refused"
    return text


def _part(part: Part, where: str) -> str | Image:
    match part:
        case InputText() | OutputText():
            return part.text
        case InputImage():
            return image_of(part.image_url, part.detail, f"{where}.image_url", f"{where}.detail")
        case Other():
            kind = _MEDIA.get(part.type, f"parts of the type {part.type[:40]!r}")
            raise unsupported_value(f"{where}.type", f"the model does not take {kind}.")
        case _:
            return part.refusal


def _thought(item: ReasoningItem, where: str) -> str:
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        try:
            return text_of(item.encrypted_content)
        except ValueError as error:
            raise unsupported_value(
                f"{where}.encrypted_content", f"it cannot be read, because {error}."
            ) from error
    return "\n".join(part.text for part in item.summary or ())
