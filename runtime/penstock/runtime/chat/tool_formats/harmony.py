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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from penstock.runtime.chat.tool_formats.events import CallPiece, Draft, Parsed, joined
from penstock.runtime.chat.tool_formats.json_scan import arguments_object
from penstock.runtime.chat.tool_formats.reader import (
    Reader,
    SpaceHolder,
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
    """Return what the prompt has written of the model's message after `<|start|>` and the role: nothing,
    unless the template begins the message itself.
    """
    _, start, tail = prompt.rpartition(START)
    role = _WORD.match(tail)
    return tail[role.end() :] if start and role is not None else ""


class HarmonyParser:
    """Parses one output, whose text comes in pieces (`forms.events.OutputParser`)."""

    def __init__(self, prompt: str, tools: Collection[str] | None, markup: Collection[str] = ()) -> None:
        """`prompt` is the rendered chat. `tools` are the names of the tools that were offered; None: none
        were, and no message is a call. `markup` are markers that are never text.
        """
        self._out = _Found()
        known = None if tools is None else frozenset(tools)
        self._stream = Stream(lambda r: _parse(r, self._out, known, markup))
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
        """Return what this further text made certain. It does not matter how the text is split into
        pieces.
        """
        self._stream.push(text)
        return self._out.take()

    def flush(self) -> Parsed:
        """Return the rest, when there is no more text."""
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
        """Begin a message."""
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
    calls: list[CallPiece] = field(default_factory=list)
    thinks: bool | None = None

    def take(self) -> Parsed:
        calls = tuple(joined(self.calls))
        self.calls.clear()
        return Parsed(self.text.take(), self.reasoning.take(), calls)

    def forget(self) -> None:
        """Drop what was found in the prompt."""
        for words in (self.text, self.reasoning):  # in place, because the parser holds them
            words.take()
            words.has_some = words.breaks = False


def _parse(r: Reader, out: _Found, tools: Collection[str] | None, markup: Collection[str]) -> Wait[None]:
    strays = [marker for marker in markup if marker not in STOPS]
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
                r.take(len(begun))
                if begun not in markup:
                    words.add(begun)
        else:
            r.keep()
            current = header
            if name := _function(header, tools):
                out.thinks = False
                yield from _call(r, name, out.calls.append)
                current = _NONE
                continue
            _words_of(out, header).begin()
        out.thinks = current.channel == ANALYSIS
        marker = yield from text_until(r, _words_of(out, current).add, (*STOPS, *strays))
        if marker in strays:
            r.take(len(marker))
        elif marker in ENDS:
            yield from literal(r, marker)
            current = _NONE


def _words_of(out: _Found, header: Header) -> _Words:
    return out.reasoning if header.channel == ANALYSIS else out.text


def _header(r: Reader) -> Wait[Header | None]:
    """Consume a header. Returns None as soon as what comes cannot be one."""
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
    """Consume a recipient, and white space after it; return "" if none comes."""
    if not (yield from literal(r, "to=")):
        return ""
    name = yield from run_of(r, NAME)
    yield from spaces(r)
    return name


def _function(header: Header, tools: Collection[str] | None) -> str:
    """Return the name of the function that the message calls; "" if it calls none. A name that is not known
    is a call too, because the recipient says so. Built-in tools, such as `python`, are no functions.
    """
    if tools is None:
        return ""
    name = header.recipient.removeprefix(FUNCTIONS)
    return name if name != header.recipient or name in tools else ""


def _call(r: Reader, name: str, tell: Callable[[CallPiece], None]) -> Wait[None]:
    """Consume the rest of a message that is a call: its arguments, whatever they are, and the marker after
    it. White space around the arguments is dropped. Where the message is empty, there are none.
    """
    call = Draft(tell, is_certain=True)
    call.begin(name)
    yield from spaces(r)
    has_arguments = (yield from peek(r)) == "{"
    if has_arguments:
        yield from arguments_object(r, call, STOPS)
    held = SpaceHolder()

    def add(text: str) -> None:
        nonlocal has_arguments
        has_arguments = True
        call.add(held.push(text))

    marker = yield from text_until(r, add, STOPS)
    r.keep()
    if marker in ENDS:
        yield from literal(r, marker)
    if marker and not has_arguments:
        call.add("{}")
    call.end()
