"""Turns the generated tokens of one output into text, and finds stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from penstock.runtime.text.interface import Text


class TextDelta(NamedTuple):
    """The text that one push made certain. It is a named tuple because that is cheap to make."""

    text: str
    stop: str | None = None
    """The stop string that ended the text, if one did."""
    num_tokens: int = 0
    """How many of the pushed tokens belong to the output: all, or those up to the one that completed the stop
    string."""


class TextStream:
    """The text of one output, with stop strings.

    Generation ends where a stop string is first complete; if several are complete at the same character, the
    longest counts. The result does not depend on how tokens are grouped into pushes. Text that may still
    become part of a stop string is held back. A match is cut out of the text, with everything after it;
    `include_stop` keeps the match itself. A stop string counts only if the token that completes it is at
    least the `min_tokens`-th.

    Token ids are never held back, so the tokens in which a stop string was found stay in the output; those
    after the one that completed it are dropped (`TextDelta.num_tokens`).
    """

    def __init__(
        self,
        text: Text,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        visible: Set[str] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._decoder = text.decoder(skip_special_tokens=skip_special_tokens, visible=visible)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pending = ""
        """Text that is decoded and not handed out yet; it starts at character `_sent` of the whole text."""
        self._sent = 0
        self._decoded = 0
        self._search_from: int | None = None
        """A match must end after this character; None while `min_tokens` is not reached."""
        self._ended = False

    def push(
        self, token_ids: Sequence[int], *, final: bool = False, mute_last_token: bool = False
    ) -> TextDelta:
        """Adds tokens. `final`: no more follow. `mute_last_token`: the last token, such as EOS, has no
        text.
        """
        if self._ended:
            return TextDelta("")
        self._ended = final
        spoken = token_ids[:-1] if mute_last_token else token_ids
        if not self._stop:
            text = self._decoder.push(spoken) + (self._decoder.flush() if final else "")
            return TextDelta(text, num_tokens=len(token_ids))
        searched = self._decoded
        ends = self._decode(spoken, final)
        match = self._find(searched)
        if match is None:
            keep = 0 if final else self._held_back()
            return TextDelta(self._take(len(self._pending) - keep), num_tokens=len(token_ids))
        self._ended = True
        start, stop = match
        end = start + len(stop)
        num_tokens = next((i for i, e in enumerate(ends, 1) if e >= self._sent + end), len(token_ids))
        return TextDelta(self._take(end if self._include_stop else start), stop, num_tokens)

    def _decode(self, token_ids: Sequence[int], final: bool) -> list[int]:
        """Appends the tokens' text to `_pending`. Returns the length of the whole text after each token."""
        ends: list[int] = []
        parts: list[str] = []
        for token_id in token_ids:
            self._num_tokens += 1
            if self._search_from is None and self._num_tokens >= self._min_tokens:
                self._search_from = self._decoded
            parts.append(self._decoder.push((token_id,)))
            self._decoded += len(parts[-1])
            ends.append(self._decoded)
        if final:
            parts.append(self._decoder.flush())
            self._decoded += len(parts[-1])
            if ends:  # what was held back until now belongs to the last token
                ends[-1] = self._decoded
        self._pending += "".join(parts)
        return ends

    def _find(self, searched: int) -> tuple[int, str] | None:
        """The first complete stop string, as (start in `_pending`, stop string), among those that end after
        character `searched`; None if there is none.
        """
        if self._search_from is None:
            return None
        first_end = max(searched, self._search_from) + 1 - self._sent
        found = []
        for stop in self._stop:
            start = self._pending.find(stop, max(0, first_end - len(stop)))
            if start >= 0:
                found.append((start + len(stop), -len(stop), start, stop))
        if not found:
            return None
        _, _, start, stop = min(found)
        return start, stop

    def _held_back(self) -> int:
        """Length of the longest tail of `_pending` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._sent += length
        return text
