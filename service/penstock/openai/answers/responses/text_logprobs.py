"""Tells which of an output's tokens belong to its text.

An answer of /v1/responses has log-probabilities for the text of a message only. The server sends those of
all tokens, also of what the model thought, of tags and of calls, and it may send tokens before the text that
they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

Entry = dict[str, Any]
"""What is told of one token: `bytes` are those of its text, as integers."""


class TextLogprobs:
    """Finds the entries of each piece of text among those of all tokens."""

    def __init__(self) -> None:
        self._waiting: list[Entry] = []
        """Tokens whose text has not come yet."""
        self._begun = b""
        """The end of the last token that was taken, if only its beginning was in the text."""

    def of_delta(self, entries: Sequence[Entry], reasoning: str, text: str, has_calls: bool) -> list[Entry]:
        """The entries of `text`, given what else came in the same delta. A token whose text comes in two
        deltas is told with the first. All that have come are told where their bytes do not hold the text.
        """
        self._waiting.extend(entries)
        if not text:
            if reasoning or has_calls:
                self._waiting, self._begun = [], b""
            return []
        pieces = [self._begun, *(bytes(entry["bytes"]) for entry in self._waiting)]
        joined, thought, said = b"".join(pieces), reasoning.encode(), text.encode()
        after = joined.find(thought) + len(thought) if thought and thought in joined else 0
        start = _found(said, joined, list(accumulate(map(len, pieces), initial=0)), after)
        if start < 0:
            taken, self._waiting, self._begun = self._waiting, [], b""
            return taken
        return self._between(joined, start, start + len(said))

    def _between(self, joined: bytes, start: int, end: int) -> list[Entry]:
        """Take the tokens that have a byte from `start` to `end`. Those before are dropped, those after
        wait.
        """
        taken, later = [], []
        first = reached = len(self._begun)
        for entry in self._waiting:
            last = first + len(entry["bytes"])
            if first >= end:
                later.append(entry)
            else:
                reached = last
                if last > start:
                    taken.append(entry)
            first = last
        self._waiting, self._begun = later, joined[end:reached]
        return taken


def _found(said: bytes, joined: bytes, starts: list[int], after: int) -> int:
    """Where in `joined` the text is: -1 for nowhere. A place at the start of a token, but for white space, is
    preferred: the text may also be a part of a tag that comes before it.
    """
    first = place = joined.find(said, after)
    while place >= 0:
        start = starts[bisect_right(starts, place) - 1]
        if not joined[start:place].strip():
            return place
        place = joined.find(said, place + 1)
    return first
