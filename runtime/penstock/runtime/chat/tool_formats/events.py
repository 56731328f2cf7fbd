"""What parsers find in an output."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from penstock.runtime.chat.json_object import settled_chars, with_whole_pairs
from penstock.runtime.chat.tool_formats.reader import SPACES, Reader, SpaceHolder, Wait, text_until


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What was added to a call. The pieces of one call follow one another."""

    name: str
    """The function's name, in the first piece of a call; "" in others."""
    arguments: str
    """Further characters of the arguments. Those of all pieces are a JSON object, unless the output has ended
    within them or the model has made a mistake.
    """
    is_last: bool = True
    """Whether the call is complete, or nothing more of it will come."""


Event: TypeAlias = Text | CallPiece
E = TypeVar("E", bound=Text | CallPiece)
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The known tools: name to the JSON Schema of the arguments, which decides what untyped values mean."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text added. Its words are in order, and so are its calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


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
        """Return what this further text made certain."""
        ...

    def flush(self) -> Parsed:
        """Return the rest, when there is no more text."""
        ...


def is_text(text: str) -> bool:
    """Say whether the string can be encoded. JSON's escapes can spell half of a surrogate pair, which
    cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


VAIN_CHARS = 1 << 16
VAIN_SHARE = 8
"""Attempts to read calls may read so many characters in vain, and so many for each character before them.
What begins like a call after more than that is text. Otherwise an output of broken calls, each of which is
read to the end of the last one, would take time with the square of its length.
"""


class Draft:
    """Calls in the making. What is written of them is kept until it is certain that they are calls, and told
    at once from then on.
    """

    def __init__(self, tell: Callable[[CallPiece], None], *, is_certain: bool) -> None:
        self._tell = tell
        self.is_certain = is_certain
        self._kept: list[CallPiece] = []
        self._held = ""
        """Half of an escape, at the end of what was written."""
        self._is_open = False
        self.has_begun = False
        """Whether a name was written."""

    @property
    def is_told(self) -> bool:
        """Whether a call has begun, and it is certain that it is one."""
        return self.has_begun and self.is_certain

    @property
    def kept(self) -> str:
        """The arguments that are kept."""
        return "".join(piece.arguments for piece in self._kept)

    def begin(self, name: str) -> None:
        """Write the name of a call."""
        self.has_begun = self._is_open = True
        self._put(CallPiece(name, "", is_last=False))

    def add(self, text: str) -> None:
        """Write a part of the arguments, in JSON. Halves of surrogate pairs become U+FFFD."""
        text = self._held + text
        size = settled_chars(text)
        self._held = text[size:]
        if size:
            self._put(CallPiece("", with_whole_pairs(text[:size]), is_last=False))

    def end(self) -> None:
        """Note that nothing more of the call will come, if one has begun and not ended."""
        if self._is_open:
            self._put(CallPiece("", with_whole_pairs(self._held)))
            self._held, self._is_open = "", False

    def settle(self) -> None:
        """Note that what was written, and will be, are calls."""
        self.is_certain = True
        for piece in self._kept:
            self._tell(piece)
        self._kept.clear()

    def close(self) -> None:
        """Settle, and end the last call."""
        self.settle()
        self.end()

    def _put(self, piece: CallPiece) -> None:
        if self.is_certain:
            self._tell(piece)
        else:
            self._kept.append(piece)


class Events:
    r"""Collects text and calls. White space before a call, and between a call and the end, is dropped.

    Such white space belongs to the form ("\\n<tool_call>"), not to the text, and the template writes it
    again.
    """

    def __init__(self, markup: Collection[str] = (), *, is_forced: bool = False) -> None:
        """`markup` are markers that are never text, because they are tokens of their own. `is_forced`: a
        grammar makes sure that what begins as a call is one.
        """
        self.markup = tuple(markup)
        self._is_forced = is_forced
        self._found: list[Event] = []
        self._spaces = SpaceHolder()
        self._after_call = False
        """Whether only white space came since the last call."""
        self._fresh = True
        self.vain_chars = 0
        """How many characters were read by attempts that made no call."""

    def draft(self) -> Draft:
        """Return a place to write calls to."""
        return Draft(self._call, is_certain=self._is_forced)

    def fresh(self) -> bool:
        """Say whether only white space stands on the text's last line, or after the last call."""
        return self._fresh

    def text(self, text: str) -> None:
        """Add text."""
        _, newline, line = text.rpartition("\n")
        self._fresh = (self._fresh or bool(newline)) and not line.strip(SPACES)
        self._add(self._spaces.push(text))

    def passed_call(self) -> None:
        """Note that there was a call, even if there is nothing to tell of it."""
        self._spaces.drop()
        self._after_call = self._fresh = True

    def _call(self, piece: CallPiece) -> None:
        self.passed_call()
        self._found.append(piece)

    def end(self) -> None:
        """Note that nothing more will come."""
        if not self._after_call:
            self._add(self._spaces.held)
        self._spaces.drop()

    def take(self) -> list[Event]:
        """Return what was found since the last `take`; adjacent texts, and pieces of one call, are joined."""
        found, self._found = self._found, []
        return found if len(found) < 2 else joined(found)

    def _add(self, text: str) -> None:
        if text:
            self._after_call = False
            self._found.append(Text(text))


def joined(events: Sequence[E]) -> list[E]:
    """Return the events, with those joined that follow one another and belong together."""
    groups: list[list[E]] = []
    for event in events:
        if groups and _goes_on(groups[-1][-1], event):
            groups[-1].append(event)
        else:
            groups.append([event])
    return [_one(group) for group in groups]


def _goes_on(last: Event, event: Event) -> bool:
    if isinstance(event, Text):
        return isinstance(last, Text)
    return isinstance(last, CallPiece) and not last.is_last


def _one(events: Sequence[E]) -> E:
    first, last = events[0], events[-1]
    if len(events) == 1:
        return first
    if isinstance(first, CallPiece) and isinstance(last, CallPiece):
        arguments = "".join(event.arguments for event in events if isinstance(event, CallPiece))
        return dataclasses.replace(first, arguments=arguments, is_last=last.is_last)
    assert isinstance(first, Text)
    text = "".join(event.text for event in events if isinstance(event, Text))
    return dataclasses.replace(first, text=text)


def text_before(r: Reader, out: Events, markers: Sequence[str], opening: str = "") -> Wait[str | None]:
    """Hand on text up to the first of `markers`, as `text_until` does. Other markup is dropped."""
    strays = [marker for marker in out.markup if marker not in markers]
    while marker := (yield from text_until(r, out.text, (*markers, *strays), opening, out.fresh)):
        if marker not in strays:
            return marker
        r.take(len(marker))
    return None


_SENTENCE = re.compile(r"\w +\w+ +\w")
"""What no beginning of a call has before its arguments: three words with nothing but spaces between them."""


def attempt(
    r: Reader,
    out: Events,
    marker: str,
    block: Callable[[Draft], Wait[bool]],
    *,
    is_explicit: bool = True,
    ends: Sequence[str] = (),
) -> Wait[bool]:
    """Consume what `block` reads as calls, and tell these; return whether there were any. If there are none,
    consume the `marker` at which they begin as text, or as markup. It is "" for calls that go on.

    The end of the output may cut a call off, which then is one with what there is of its arguments. It has
    not done so where one of the tags `ends` came, which stand after a call: then something else of it is
    missing. What is cut off before it has a name is dropped where the form `is_explicit` and its markers are
    tokens, unless it is a sentence.
    """
    r.mark()
    start = r.pos
    draft = out.draft()
    may_read = out.vain_chars <= VAIN_CHARS + VAIN_SHARE * r.consumed
    is_whole = may_read and (yield from block(draft))
    is_cut = draft.has_begun and r.has_met_end and not is_whole
    if is_cut and not draft.is_certain and is_explicit:
        others = (*ends, *((marker,) if marker else ()))  # another marker: it would have swallowed a call
        is_cut = all(r.text.find(other, start + len(marker)) < 0 for other in others)
    if is_cut:
        r.take_all()
    if is_whole or is_cut or draft.is_told:
        r.keep()
        draft.close()
        return True
    out.vain_chars += r.back()
    is_markup = marker in out.markup or (out.markup and not marker)
    if (
        r.has_met_end
        and is_explicit
        and is_markup
        and not draft.has_begun
        and not _SENTENCE.search(r.text, r.pos + len(marker))
    ):
        r.take_all()
        out.passed_call()
    elif marker:
        taken = r.take(len(marker))
        if marker not in out.markup:
            out.text(taken)
    return False
