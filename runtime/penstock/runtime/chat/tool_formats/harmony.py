"""Reads an output in Harmony, as gpt-oss writes it: messages, each of which has a header.

    <|channel|>analysis<|message|>I should look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

The line break is not part of it. The header says where a message belongs. The channel "analysis" is
reasoning; every other channel is text: "final", and "commentary", in which the model tells the user what it
is about to do. A message to a function is a call, whatever its channel is. Its recipient may stand after the
role or after the channel. The prompt ends with `<|start|>assistant`, so the first header begins after that.

Headers, and the markers after messages, are in no text. Text without a header is the answer, so that the
output of a model that does not write Harmony is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.runtime.chat.tool_formats.events import Call, Parsed, call_or_none
from penstock.runtime.chat.tool_formats.json_scan import json_value
from penstock.runtime.chat.tool_formats.reader import (
    Reader,
    Stream,
    Wait,
    literal,
    more,
    peek,
    run_of,
    spaces,
    text_until,
)

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
ENDS = (END, CALL, RETURN)
"""What may stand after a message."""
STOPS = (*ENDS, START, CHANNEL)
"""What no message contains. The last two begin a header, of a message before which the end was forgotten."""
MARKERS = (*STOPS, CONSTRAIN, MESSAGE)
"""Strings that must stay visible while special tokens are skipped."""
ANALYSIS = "analysis"
FUNCTIONS = "functions."
"""What precedes the name of a function in the recipient of a call."""
NAME = re.compile(r"[^\s<]*")
"""A name of a recipient, and so of a function."""
_WORD = re.compile(r"[\w.\-/]*")
"""A role, a channel or a type."""
_BETWEEN_MESSAGES = "\n\n"
"""What is written between two messages of the same kind, where an output has several."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a message says."""

    channel: str = ""
    recipient: str = ""
    is_cut: bool = False
    """Whether the output has ended within the header."""


_NONE = Header()
_CUT = Header(is_cut=True)


def begun_by(prompt: str) -> str:
    """What the prompt has written of the model's message after `<|start|>` and the role: nothing, unless the
    template begins the message itself.
    """
    _, start, tail = prompt.rpartition(START)
    role = _WORD.match(tail)
    return tail[role.end() :] if start and role is not None else ""


class HarmonyParser:
    """Parses one output, whose text comes in pieces (`forms.events.OutputParser`)."""

    def __init__(self, prompt: str, tools: Collection[str] | None) -> None:
        """`prompt` is the rendered chat. `tools` are the names of the tools that were offered; None: none
        were, and no message is a call.
        """
        self._out = _Found()
        known = None if tools is None else frozenset(tools)
        self._stream = Stream(lambda r: _parse(r, self._out, known))
        self._stream.push(begun_by(prompt))
        self._out.forget()

    @property
    def thinks(self) -> bool | None:
        """See `OutputParser.thinks`."""
        return self._out.thinks

    @property
    def is_past_reasoning(self) -> bool:
        """False: a model may think again after any message."""
        return False

    def push(self, text: str) -> Parsed:
        """What this further text made certain. It does not matter how the text is split into pieces."""
        self._stream.push(text)
        return self._out.take()

    def flush(self) -> Parsed:
        """The rest, when there is no more text."""
        self._stream.flush()
        return self._out.take()


@dataclass(slots=True)
class _Words:
    """The text of messages of one kind."""

    new: list[str] = field(default_factory=list)
    has_some: bool = False
    breaks: bool = False
    """Whether text of another message came before."""

    def begin(self) -> None:
        """Begins a message."""
        self.breaks = self.has_some

    def add(self, text: str) -> None:
        if self.breaks:
            self.new.append(_BETWEEN_MESSAGES)
        self.new.append(text)
        self.has_some, self.breaks = True, False

    def take(self) -> str:
        text = "".join(self.new)
        self.new.clear()
        return text


@dataclass(slots=True)
class _Found:
    text: _Words = field(default_factory=_Words)
    reasoning: _Words = field(default_factory=_Words)
    calls: list[Call] = field(default_factory=list)
    thinks: bool | None = None

    def take(self) -> Parsed:
        calls = tuple(self.calls)
        self.calls.clear()
        return Parsed(self.text.take(), self.reasoning.take(), calls)

    def forget(self) -> None:
        """Drop what was found in the prompt."""
        for words in (self.text, self.reasoning):  # in place, because the parser holds them
            words.take()
            words.has_some = words.breaks = False


def _parse(r: Reader, out: _Found, tools: Collection[str] | None) -> Wait[None]:
    current = _NONE  # the header of the message that is being read
    while (yield from more(r)):
        out.thinks = None
        r.mark()
        header = yield from _header(r)
        if header is _CUT:
            return r.keep()
        if header is None:
            r.back()
            words = _words_of(out, current)
            if begun := next((m for m in (START, CHANNEL) if r.text.startswith(m, r.pos)), ""):
                words.add(r.take(len(begun)))
        else:
            current, size = header, r.pos
            name = _function(header, tools)
            if name:
                out.thinks = False
                arguments = yield from _arguments(r)
                call = None if arguments is None else call_or_none(name, arguments)
                if call is not None:
                    r.keep()
                    out.calls.append(call)
                    current = _NONE
                    continue
                r.back()
                current = _NONE
                out.text.begin()
                out.text.add(r.take(size - r.pos))
            else:
                r.keep()
                _words_of(out, header).begin()
        out.thinks = current.channel == ANALYSIS
        marker = yield from text_until(r, _words_of(out, current).add, STOPS)
        if marker in ENDS:
            yield from literal(r, marker)
            current = _NONE


def _words_of(out: _Found, header: Header) -> _Words:
    return out.reasoning if header.channel == ANALYSIS else out.text


def _header(r: Reader) -> Wait[Header | None]:
    """Consumes a header. Returns None as soon as what comes cannot be one."""
    yield from spaces(r)
    recipient = channel = ""
    has_begun = yield from literal(r, START)
    if has_begun:
        yield from run_of(r, _WORD)
        yield from spaces(r)
    recipient = yield from _recipient(r)
    while (yield from literal(r, CHANNEL)):  # some models write a channel twice
        has_begun = True
        yield from spaces(r)
        channel = yield from run_of(r, _WORD)
        yield from spaces(r)
        recipient = (yield from _recipient(r)) or recipient
    if (yield from literal(r, CONSTRAIN)) or channel or recipient:
        yield from spaces(r)
        yield from run_of(r, _WORD)
        yield from spaces(r)
        recipient = (yield from _recipient(r)) or recipient
    if (yield from literal(r, MESSAGE)):
        return Header(channel, recipient)
    return _CUT if has_begun and not (yield from more(r)) else None


def _recipient(r: Reader) -> Wait[str]:
    """Consumes a recipient, and white space after it; "" if none comes."""
    if not (yield from literal(r, "to=")):
        return ""
    name = yield from run_of(r, NAME)
    yield from spaces(r)
    return name


def _function(header: Header, tools: Collection[str] | None) -> str:
    """The name of the function that the message calls; "" if it calls none. A name that is not known is a
    call too, because the recipient says so. Built-in tools, such as `python`, are no functions.
    """
    if tools is None:
        return ""
    name = header.recipient.removeprefix(FUNCTIONS)
    return name if name != header.recipient or name in tools else ""


def _arguments(r: Reader) -> Wait[str | None]:
    """Consumes a JSON object and the end of its message, for which the end of the output may stand. Returns
    None as soon as there is none.
    """
    yield from spaces(r)
    begin = r.pos
    if (yield from peek(r)) != "{" or not (yield from json_value(r)):
        return None
    arguments = r.text[begin : r.pos]
    yield from spaces(r)
    at = r.pos
    for marker in STOPS:
        if (yield from literal(r, marker, or_end=True)):
            if marker not in ENDS:
                r.pos = at  # it belongs to the next message
            return arguments
    return None
