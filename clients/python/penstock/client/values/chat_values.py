"""A conversation's values: turns, tools, and the calls that a model made.

Each can be made from a mapping too: with the field names used here, or in the form of the OpenAI API, in
which most tool definitions are written down ({"type": "function", "function": {...}}).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from penstock.client.values.jsontext import json_object, json_text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `arguments_json` is as the model wrote it, not promised to be valid."""

    id: str
    name: str
    arguments_json: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments, parsed; none written is {}. ValueError when they are not a JSON object."""
        try:
            return json_object(self.arguments_json) if self.arguments_json.strip() else {}
        except ValueError as error:
            raise ValueError(f"the arguments of {self.name!r} are no JSON object: {error}") from error

    def result(self, content: Any) -> ChatMessage:
        """The turn that answers this call: text as it is, anything else as JSON."""
        return ChatMessage("tool", json_text(content), tool_call_id=self.id)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """From id, name and arguments_json, or id, type and function {name, arguments}."""
        value = _unfolded(value)
        if "arguments" in value:
            value = _renamed(value, "arguments", "arguments_json")
            value["arguments_json"] = json_text(value["arguments_json"])
        return cls(**_checked(cls, {"id": "", "arguments_json": "", **value}, "a tool call"))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: role is "system", "user", "assistant" or "tool"."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant turn called."""
    tool_call_id: str = ""
    """Which call a "tool" turn answers."""

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """From the fields of this class; the content of a turn that only calls may be None."""
        checked = _checked(cls, value, "a turn")
        calls = checked.get("tool_calls") or ()
        return cls(
            role=checked["role"],
            content=checked.get("content") or "",
            tool_calls=tuple(c if isinstance(c, ToolCall) else ToolCall.from_dict(c) for c in calls),
            tool_call_id=checked.get("tool_call_id") or "",
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    """Shown to the model."""
    parameters: Mapping[str, Any] | str | None = None
    """JSON Schema of the arguments, as a mapping or as JSON text; None: no arguments."""

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """From name, description and parameters, bare or in {"type": "function", "function": {...}}."""
        return cls(**_checked(cls, _unfolded(value), "a tool"))


Turn = ChatMessage | Mapping[str, Any]
ToolLike = Tool | Mapping[str, Any]


def turns_of(messages: Sequence[Turn]) -> list[ChatMessage]:
    """TypeError, naming the turn, for a mapping that is none."""
    return [
        message if isinstance(message, ChatMessage) else _named(ChatMessage, message, f"messages[{i}]")
        for i, message in enumerate(messages)
    ]


def tools_of(tools: Sequence[ToolLike]) -> list[Tool]:
    """TypeError, naming the tool, for a mapping that is none."""
    return [t if isinstance(t, Tool) else _named(Tool, t, f"tools[{i}]") for i, t in enumerate(tools)]


def _named(kind: Any, value: Any, where: str) -> Any:
    try:
        return kind.from_dict(value)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error


def _unfolded(value: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAI form without its inner object."""
    if not isinstance(value, Mapping):
        raise TypeError(f"must be a mapping, not {type(value).__name__}")
    if not isinstance(value.get("function"), Mapping):
        return dict(value)
    if (kind := value.get("type", "function")) != "function":
        raise TypeError(f"its type is {kind!r}; only 'function' is known")
    outer = {key: item for key, item in value.items() if key not in ("type", "function")}
    return {**outer, **value["function"]}


def _renamed(value: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: item for key, item in value.items()}


def _checked(kind: Any, value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """TypeError for a key that the class lacks and for one that it needs."""
    if not isinstance(value, Mapping):
        raise TypeError(f"must be a mapping, not {type(value).__name__}")
    names = [field.name for field in fields(kind)]
    listed = f"{what} has {', '.join(names[:-1])} and {names[-1]}"
    if unknown := [key for key in value if key not in names]:
        raise TypeError(f"unknown key {unknown[0]!r}; {listed}")
    first = "role" if kind is ChatMessage else "name"
    if not isinstance(value.get(first), str):
        raise TypeError(f"has no {first}; {listed}")
    return dict(value)
