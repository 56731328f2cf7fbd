"""Converts between Python values and JSON text, which the contract carries."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

_KINDS = {
    list: "array",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def json_text(value: object) -> str:
    """Return text unchanged, and anything else as JSON, with keys in their order. Raises ValueError for what
    JSON cannot express (NaN, a list that contains itself), and TypeError for other types.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = dict(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("is nested too deeply for JSON") from None


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError if the text holds anything else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {_KINDS.get(type(value), 'value')}, not an object")
    return value


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the model is shown: the bytes of a file in a form that the server reads, such as PNG or
    JPEG (`ModelInfo.image_limits` lists them).

    `Image("cat.png")` reads the file at once (OSError), and `Image(data)` takes its bytes. Nothing is fetched
    from an address, neither here nor by the server.
    """

    data: bytes = field(repr=False)
    media_type: str = ""
    """The form that the bytes are to have, such as "image/png"; empty: whatever they tell."""

    def __init__(
        self, source: bytes | bytearray | memoryview | str | os.PathLike[str], media_type: str = ""
    ) -> None:
        if isinstance(source, str | os.PathLike):
            source = Path(source).read_bytes()
        if not isinstance(source, bytes | bytearray | memoryview):
            raise TypeError(f"give the path of a file, or its bytes, not {type(source).__name__}")
        if not isinstance(media_type, str):
            raise TypeError(f"media_type must be a text, not {type(media_type).__name__}")
        object.__setattr__(self, "data", bytes(source))
        object.__setattr__(self, "media_type", media_type)

    @classmethod
    def from_data_url(cls, url: str) -> Self:
        """Make an image of an address such as "data:image/png;base64,...", which has the bytes in it. It is
        read as browsers read it (the "data: URL processor" of the Fetch standard), except that it must be in
        base64. Raises ValueError for any other address, because nothing is fetched.
        """
        # The first line does what a parser of URLs does: line breaks and a fragment are not part of the URL.
        sent = url.encode(errors="replace").strip(bytes(range(0x21))).translate(None, b"\t\n\r")
        head, comma, body = sent.partition(b"#")[0].partition(b",")
        scheme, _, told = head.partition(b":")
        if scheme.lower() != b"data" or not comma:
            raise ValueError(
                "must be a data: URL, such as data:image/png;base64,...; addresses are not fetched"
            )
        told = told.strip(b" ")
        if _BASE64_MARK.search(told) is None:
            raise ValueError("the data of a data: URL must be in base64")
        media_type = told.partition(b";")[0].strip(b" ").decode().lower()
        try:
            return cls(_forgiving_base64(_percent_decoded(body)), _registered(media_type))
        except binascii.Error as error:
            raise ValueError(f"the data of the URL is not base64: {error}") from error


_BASE64_MARK = re.compile(rb"; *base64\Z", re.IGNORECASE)
_STRAY_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def _percent_decoded(data: bytes) -> bytes:
    """Decode percent escapes. Raises binascii.Error for a "%" that begins none, which is no base64 either.

    Quoted-printable differs only in its sign, and is decoded in C: urllib's unquote_to_bytes takes seconds
    for a few megabytes of escapes.
    """
    if b"%" not in data:
        return data
    if _STRAY_PERCENT.search(data):
        raise binascii.Error("a % does not begin an escape")
    return binascii.a2b_qp(data.replace(b"=", b"=3D").replace(b"%", b"="))


def _forgiving_base64(data: bytes) -> bytes:
    """Decode base64 with white space anywhere and with or without its padding, as the Infra standard's
    "forgiving-base64 decode" does. Raises binascii.Error.
    """
    data = data.translate(None, b"\t\n\f\r ")
    if len(data) % 4 == 0:
        data = data.removesuffix(b"=").removesuffix(b"=")
    if b"=" in data:
        raise binascii.Error("there is a = too many")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)


def _registered(media_type: str) -> str:
    """Return the registered name of a media type: many programs write JPEG's without the "e"."""
    return "image/jpeg" if media_type == "image/jpg" else media_type


Content = str | Sequence[str | Image]
"""What is said in a turn: a text, or texts and images in their order."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model made. `arguments_json` is what the model wrote, and may be invalid JSON,
    also because the output ended within it.
    """

    id: str
    name: str
    arguments_json: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The parsed arguments; {} if the model wrote none. Raises ValueError if they are not a
        JSON object.
        """
        try:
            return json_object(self.arguments_json) if self.arguments_json.strip() else {}
        except ValueError as error:
            raise ValueError(f"the arguments of {self.name!r} are not a JSON object: {error}") from error

    def result(self, content: Any) -> ChatMessage:
        """Make the turn that answers this call. Text is sent as it is, anything else as JSON."""
        return ChatMessage("tool", json_text(content), tool_call_id=self.id)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Make a call from id, name and arguments_json, or from id, type and function {name, arguments}."""
        value = _unfolded(value)
        if "arguments" in value:
            value = _renamed(value, "arguments", "arguments_json")
            value["arguments_json"] = json_text(value["arguments_json"])
        return cls(**_checked(cls, {"id": "", "arguments_json": "", **value}, "a tool call"))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: Content = ""
    """A text, or a sequence of texts and `Image`s, which becomes a tuple."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls of an assistant's turn."""
    tool_call_id: str = ""
    """The id of the call that a "tool" turn answers."""
    reasoning: str = ""
    """What the assistant thought in this turn; the model's chat template decides whether it is shown."""
    name: str = ""
    """Who speaks; the model's chat template decides whether it is shown. If it does, "names" is among
    `ModelInfo.features`."""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            object.__setattr__(self, "content", _content(self.content))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Make a turn from the fields of this class. The content of a turn that only calls tools
        may be None. A part of the content may also be a mapping: {"type": "text", "text": ...}, {"type":
        "image", "image": ...} with an Image, its bytes or its path, or OpenAI's {"type": "image_url",
        "image_url": {"url": "data:..."}}.
        """
        checked = _checked(cls, value, "a turn")
        calls = checked.get("tool_calls") or ()
        return cls(
            role=checked["role"],
            content=checked.get("content") or "",
            tool_calls=tuple(c if isinstance(c, ToolCall) else ToolCall.from_dict(c) for c in calls),
            tool_call_id=checked.get("tool_call_id") or "",
            reasoning=checked.get("reasoning") or "",
            name=checked.get("name") or "",
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    """What the function does, for the model to read."""
    parameters: Mapping[str, Any] | str | None = None
    """A JSON Schema of the arguments, as a mapping or as JSON text; None means no arguments."""
    strict: bool = False
    """Whether a call always has arguments that the schema accepts, also where the model need not call."""

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Make a tool from name, description, parameters and strict, bare or in {"type": "function",
        "function": {...}}. None for strict is False, as in the OpenAI API.
        """
        checked = _checked(cls, _unfolded(value), "a tool")
        return cls(**{**checked, "strict": checked.get("strict") or False})


Turn = ChatMessage | Mapping[str, Any]
ToolLike = Tool | Mapping[str, Any]


def turns_of(messages: Sequence[Turn]) -> list[ChatMessage]:
    """Convert all mappings to turns. Raises TypeError, which names the turn, for a mapping that is none."""
    return [
        message if isinstance(message, ChatMessage) else _named(ChatMessage, message, f"messages[{i}]")
        for i, message in enumerate(messages)
    ]


def tools_of(tools: Sequence[ToolLike]) -> list[Tool]:
    """Convert all mappings to tools. Raises TypeError, which names the tool, for a mapping that is none."""
    return [t if isinstance(t, Tool) else _named(Tool, t, f"tools[{i}]") for i, t in enumerate(tools)]


def _content(value: Any) -> tuple[str | Image, ...]:
    """Return the parts of a turn. Raises TypeError, which names the part, for what is neither text nor
    image.
    """
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise TypeError(f"content: must be a text or a sequence of parts, not {type(value).__name__}")
    return tuple(_part(j, part) for j, part in enumerate(value))


def _part(index: int, part: Any) -> str | Image:
    if isinstance(part, str | Image):
        return part
    try:
        match part:
            case {"type": "text", "text": str(text), **rest} if not rest:
                return text
            case {"type": "image", "image": Image() as image, **rest} if not rest:
                return image
            case {"type": "image", "image": source, **rest} if not rest:
                return Image(source)
            case {"type": "image_url", "image_url": {"url": str(url), **more}, **rest} if not rest:
                if more.pop("detail", "auto") != "auto":
                    raise ValueError('detail must be "auto": the model decides how closely it looks')
                if more:
                    raise ValueError(f"image_url has unknown keys: {', '.join(sorted(map(str, more)))}")
                return Image.from_data_url(url)
    except (TypeError, ValueError) as error:
        raise TypeError(f"content[{index}]: {error}") from error
    raise TypeError(
        f"content[{index}]: must be a text, an Image, or a mapping such as "
        '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
    )


def _named(kind: Any, value: Any, where: str) -> Any:
    try:
        return kind.from_dict(value)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error


def _unfolded(value: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the inner object of OpenAI's form."""
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
    """Check the keys of a mapping. Raises TypeError for a key that the class does not have, or if a required
    one is missing.
    """
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
