"""Turns and tools from mappings, in which most conversations and tool definitions are written down: with the
names of the fields here, or in the form of the OpenAI API, {"type": "function", "function": {...}}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.runtime.chat.messages import ChatTurn, Tool, ToolCall
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.images.image import Image

T = TypeVar("T", ChatTurn, Tool)


def turns_of(messages: Sequence[ChatTurn | Mapping[str, Any]]) -> list[ChatTurn]:
    """Read the turns of a conversation. InvalidRequest, naming each, for mappings that are none."""
    return _all(messages, ChatTurn, _turn, "chat.messages")


def tools_of(tools: Sequence[Tool | Mapping[str, Any]]) -> list[Tool]:
    """Read the tools of a conversation. InvalidRequest, naming each, for mappings that are none."""
    return _all(tools, Tool, _tool, "chat.tools")


def _all(
    values: Sequence[T | Mapping[str, Any]], kind: type[T], make: Callable[[Mapping[str, Any]], T], where: str
) -> list[T]:
    if isinstance(values, (str, Mapping)):
        raise InvalidRequest([Violation(where, f"must be a sequence, not {type(values).__name__}")])
    made: list[T] = []
    bad: list[Violation] = []
    for i, value in enumerate(values):
        if isinstance(value, kind):
            made.append(value)
            continue
        try:
            made.append(make(_mapping(value)))
        except ValueError as error:
            bad.append(Violation(f"{where}[{i}]", str(error)))
    if bad:
        raise InvalidRequest(bad)
    return made


def _turn(value: Mapping[str, Any]) -> ChatTurn:
    _check_keys(value, ("role", "content", "tool_calls", "tool_call_id", "reasoning", "name"), needed="role")
    calls = value.get("tool_calls") or ()
    return ChatTurn(
        role=value["role"],
        content=_content(value),
        tool_calls=tuple(c if isinstance(c, ToolCall) else _call(_mapping(c)) for c in calls),
        tool_call_id=_text(value, "tool_call_id"),
        reasoning=_text(value, "reasoning"),
        name=_text(value, "name"),
    )


def _content(value: Mapping[str, Any]) -> str | tuple[str | Image, ...]:
    """Read a text or parts; a turn that only calls has neither."""
    content = value.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f'"content" must be a text or a sequence of parts, not {type(content).__name__}')
    return tuple(_part(j, part) for j, part in enumerate(content))


def _part(index: int, part: Any) -> str | Image:
    """Read a text or an image, as it is or in a mapping: {"type": "text", "text": ...} or {"type": "image",
    "image": ...}, where the image is an Image, bytes or a path.
    """
    if isinstance(part, (str, Image)):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type")
        given = part.get(kind) if kind in ("text", "image") and set(part) == {"type", kind} else None
        if kind == "text" and isinstance(given, str):
            return given
        if kind == "image" and isinstance(given, Image):
            return given
        if kind == "image" and isinstance(given, (bytes, str, os.PathLike)):
            return Image(given)
    raise ValueError(
        f'"content": part {index} is neither a text nor an image: give a str, an Image, {{"type": "text", '
        '"text": ...}} or {"type": "image", "image": ...}'
    )


def _call(value: Mapping[str, Any]) -> ToolCall:
    value = _unfolded(value)
    _check_keys(value, ("id", "name", "arguments", "arguments_json"), needed="name")
    arguments = value.get("arguments_json", value.get("arguments", ""))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(_text(value, "id"), value["name"], arguments)


def _tool(value: Mapping[str, Any]) -> Tool:
    value = _unfolded(value)
    _check_keys(value, ("name", "description", "parameters", "strict"), needed="name")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f'"strict" must be true or false, not {type(strict).__name__}')
    if value.get("parameters") is None:
        return Tool(value["name"], _text(value, "description"), strict=bool(strict))
    return Tool(value["name"], _text(value, "description"), _mapping(value["parameters"]), bool(strict))


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping, not {type(value).__name__}")
    return value


def _unfolded(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the OpenAI form without its inner object."""
    if "function" not in value:
        return value
    if value.get("type", "function") != "function":
        raise ValueError(f'"type" is {value["type"]!r}; only "function" is known')
    outer = {key: item for key, item in value.items() if key not in ("type", "function")}
    return {**outer, **_mapping(value["function"])}


def _text(value: Mapping[str, Any], key: str) -> str:
    """Return the text under the key; empty where there is none."""
    found = value.get(key)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise ValueError(f'"{key}" must be a text, not {type(found).__name__}')
    return found


def _check_keys(value: Mapping[str, Any], known: Sequence[str], *, needed: str) -> None:
    listed = ", ".join(known)
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {key!r}; known ones: {listed}")
    if not isinstance(value.get(needed), str):
        raise ValueError(f'needs "{needed}", a text')
