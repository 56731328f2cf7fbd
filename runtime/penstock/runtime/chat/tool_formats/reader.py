"""Parses a text that arrives in pieces. Parsers are generators, which yield when they must wait for more
text.

Such a parser sees characters, never pieces: as long as it decides by characters alone, how the text was split
cannot change what it finds. It hands out what it has decided at once; what it cannot decide yet it leaves
unconsumed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]
"""A generator that runs until it needs more text, yields, goes on when there is more or none will come, and
returns a T."""
SPACES = " \t\r\n"


class Reader:
    """The text that is not consumed yet. Between `mark` and `keep` or `back`, positions stay valid."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        """Whether no more text will come."""
        self.has_met_end = False
        """Whether what was read since the mark would have gone on, if the text had not ended."""
        self._mark: int | None = None
        self._furthest = 0
        """As far as was read since the mark, where `return_to` went back."""
        self._passed = 0
        """How many characters stood before `text`."""
        self._follower: Callable[[str], None] | None = None
        self._followed = 0

    def add(self, text: str) -> None:
        """Add text that has arrived."""
        self.hand_on()
        if self._mark is None:
            self._passed += self.pos
            self.text, self.pos, self._followed = self.text[self.pos :] + text, 0, 0
        else:
            # Python appends in place to a variable that alone holds a string, and copies it elsewhere.
            whole, self.text = self.text, ""
            whole += text
            self.text = whole

    def mark(self) -> None:
        """Keep everything from here on, so that `back` can return here."""
        self._mark = self._furthest = self.pos
        self.has_met_end = False

    def back(self) -> int:
        """Return to the mark and remove it. Gives how many characters after it were read."""
        assert self._mark is not None
        furthest = len(self.text) if self.has_met_end else max(self._furthest, self.pos)
        read = furthest - self._mark
        self.pos, self._mark = self._mark, None
        return read

    def return_to(self, pos: int) -> None:
        """Read again from a position after the mark."""
        self._furthest = max(self._furthest, self.pos)
        self.pos = pos

    @property
    def consumed(self) -> int:
        """How many characters of the whole output stand before the position."""
        return self._passed + self.pos

    def keep(self) -> None:
        """Remove the mark: what was read since is consumed."""
        self._mark = None

    def follow(self, out: Callable[[str], None]) -> None:
        """Hand what is consumed from here on to `out`. It is not kept, so there is no way back."""
        self.keep()
        self._follower, self._followed = out, self.pos

    def unfollow(self) -> None:
        """End what `follow` began. What comes after it is kept."""
        self.hand_on()
        self._follower = None
        self.mark()

    def hand_on(self) -> None:
        """Hand on what was consumed until now."""
        if self._follower is not None and self.pos > self._followed:
            self._follower(self.text[self._followed : self.pos])
            self._followed = self.pos

    def take(self, count: int) -> str:
        """Consume `count` characters, or as many as there are."""
        start = self.pos
        self.pos = min(start + count, len(self.text))
        return self.text[start : self.pos]

    def take_all(self) -> str:
        """Consume all text there is."""
        return self.take(len(self.text))


class Stream:
    """Runs a parser over pieces of text."""

    def __init__(self, parser: Callable[[Reader], Wait[None]]) -> None:
        self._reader = Reader()
        self._run = parser(self._reader)
        next(self._run, None)

    def push(self, text: str) -> None:
        """Parse text that has arrived; none may arrive after `flush`."""
        assert not self._reader.ended
        if text:
            self._reader.add(text)
            next(self._run, None)
            self._reader.hand_on()

    def flush(self) -> None:
        """Tell the parser that no more text will come."""
        self._reader.ended = True
        next(self._run, None)


class SpaceHolder:
    """Holds back the white space at the end of a text, until it is known what follows."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> str:
        """Return the text that may be handed out: everything but white space at the end."""
        text = self.held + text
        out = text.rstrip(SPACES)
        self.held = text[len(out) :]
        return out

    def drop(self) -> None:
        """Drop the white space that is held."""
        self.held = ""


def more(r: Reader) -> Wait[bool]:
    """Wait for a character. Returns whether there is one."""
    while r.pos >= len(r.text):
        if r.ended:
            r.has_met_end = True
            return False
        yield
    return True


def peek(r: Reader) -> Wait[str]:
    """Return the next character, not consumed; "" at the end."""
    return r.text[r.pos] if (yield from more(r)) else ""


def literal(r: Reader, text: str, *, or_end: bool = False) -> Wait[bool]:
    """Consume `text` if it comes next, else nothing. Returns whether it did. `or_end`: the end of the text,
    also in the middle of `text`, counts too.
    """
    while True:
        have = r.text[r.pos : r.pos + len(text)]
        if not text.startswith(have):
            return False
        if have == text or (r.ended and or_end):
            r.pos += len(have)
            return True
        if r.ended:
            r.has_met_end = True
            return False
        yield


def spaces(r: Reader) -> Wait[None]:
    """Consume white space."""
    while (yield from more(r)) and r.text[r.pos] in SPACES:
        r.pos += 1


def run_of(r: Reader, pattern: re.Pattern[str]) -> Wait[str]:
    """Consume the characters that `pattern`, a repeated character class, matches."""
    start = r.pos
    while (yield from more(r)):
        found = pattern.match(r.text, r.pos)
        assert found is not None
        r.pos = found.end()
        if r.pos < len(r.text):
            break
    return r.text[start : r.pos]


def rest(r: Reader, out: Callable[[str], None]) -> Wait[None]:
    """Hand on all remaining text."""
    while (yield from more(r)):
        out(r.take_all())


def text_until(
    r: Reader,
    out: Callable[[str], None],
    markers: Sequence[str],
    opening: str = "",
    fresh: Callable[[], bool] = lambda: True,
) -> Wait[str | None]:
    """Hand on text up to the first of `markers`, and return that marker, not consumed; None at the end.

    The character `opening` is a marker too if it is the first on its line that is not white space; `fresh`
    says whether the text handed on so far allows that. No marker may begin within another.
    """
    pattern = _any_of(tuple(markers))
    firsts, longest = {marker[0] for marker in markers}, max(map(len, markers), default=0)
    while (yield from more(r)):
        found = pattern.search(r.text, r.pos)
        at, marker = (len(r.text), None) if found is None else (found.start(), found[0])
        first = _first_of_line(r.text, r.pos, at, opening, fresh()) if opening else None
        if first is not None:
            at, marker = first, opening
        if marker is not None:
            if at > r.pos:
                out(r.take(at - r.pos))
            return marker
        hold, tail = 0, max(r.pos, len(r.text) - longest)
        if not r.ended and any(r.text.find(first, tail) >= 0 for first in firsts):
            hold = max(_begun(r.text, r.pos, marker) for marker in markers)
        if len(r.text) - r.pos > hold:
            out(r.take(len(r.text) - r.pos - hold))
        if hold:
            yield
    return None


@functools.lru_cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Make the pattern that finds the first of the markers in one pass, however far away the others are."""
    return re.compile("|".join(map(re.escape, markers)) or r"(?!)")


def drop(text: str) -> None:
    """Leave the text to the reader, which holds it if it has a mark."""


def _begun(text: str, start: int, marker: str) -> int:
    """Return the length of the longest tail of `text[start:]` that begins the marker without being all of
    it.
    """
    longest = min(len(marker) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _first_of_line(text: str, start: int, end: int, char: str, fresh: bool) -> int | None:
    """Return the index of the first `char` in `text[start:end]` that has only white space before it on its
    line; None if there is none.
    """
    line = start
    while (at := text.find(char, line, end)) >= 0:
        newline = text.rfind("\n", line, at)
        if newline >= 0:
            line, fresh = newline + 1, True
        if fresh and not text[line:at].strip(SPACES):
            return at
        newline = text.find("\n", at, end)
        if newline < 0:
            return None
        line, fresh = newline + 1, True
    return None
