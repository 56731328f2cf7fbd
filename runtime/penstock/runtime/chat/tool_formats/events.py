"""What parsers find in an output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from penstock.runtime.chat.json_object import parse_object, with_whole_pairs
from penstock.runtime.chat.tool_formats.reader import SPACES, SpaceHolder


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call; `arguments` is a JSON object, as text."""

    name: str
    arguments: str


Event: TypeAlias = Text | Call
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The known tools: name to the JSON Schema of the arguments, which decides what untyped values mean."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text added. Its words are in order, and so are its calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class OutputParser(Protocol):
    """Parses one output's text, which comes in pieces. How it is split into pieces does not matter."""

    @property
    def thinks(self) -> bool | None:
        """Whether the text that was pushed last belongs to the reasoning, with its tags; None if further text
        decides that. It counts until `is_past_reasoning`, and for the piece with which that becomes true.
        """
        ...

    @property
    def is_past_reasoning(self) -> bool:
        """Whether no more reasoning can come."""
        ...

    def push(self, text: str) -> Parsed:
        """What this further text made certain."""
        ...

    def flush(self) -> Parsed:
        """The rest, when there is no more text."""
        ...


def is_text(text: str) -> bool:
    """Whether the string can be encoded. JSON's escapes can spell half of a surrogate pair, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def call_or_none(name: str, arguments: str) -> Call | None:
    """The call, if it can come back with the history of the conversation: its name is a text, and the reader
    of the history accepts the arguments. Halves of surrogate pairs become U+FFFD.
    """
    try:
        parse_object(arguments)
    except ValueError:
        return None
    return Call(name, with_whole_pairs(arguments)) if name and is_text(name) else None


class Events:
    r"""Collects text and calls. White space before a call, and between a call and the end, is dropped.

    Such white space belongs to the form ("\\n<tool_call>"), not to the text, and the template writes it
    again.
    """

    def __init__(self) -> None:
        self._found: list[Event] = []
        self._spaces = SpaceHolder()
        self._after_call = False
        """Whether only white space came since the last call."""
        self._fresh = True

    def fresh(self) -> bool:
        """Whether only white space stands on the text's last line, or after the last call."""
        return self._fresh

    def text(self, text: str) -> None:
        """Add text."""
        _, newline, line = text.rpartition("\n")
        self._fresh = (self._fresh or bool(newline)) and not line.strip(SPACES)
        self._add(self._spaces.push(text))

    def call(self, call: Call) -> None:
        """Add a call."""
        self._spaces.drop()
        self._found.append(call)
        self._after_call = self._fresh = True

    def end(self) -> None:
        """Note that nothing more will come."""
        if not self._after_call:
            self._add(self._spaces.held)
        self._spaces.drop()

    def take(self) -> list[Event]:
        """What was found since the last `take`; adjacent texts are joined."""
        found, self._found = self._found, []
        return found

    def _add(self, text: str) -> None:
        if not text:
            return
        self._after_call = False
        last = self._found[-1] if self._found else None
        if isinstance(last, Text):
            self._found[-1] = Text(last.text + text)
        else:
            self._found.append(Text(text))
