"""Logs each refusal in one line, but never more than a few lines a second: who was refused what, and why.

A line has ids, names and reasons, and never values: no prompt, no header, not even the error's own message,
which may quote one. A field is named without the content of its brackets, because the key of a map is a
caller's text.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature

log = logging.getLogger(__name__)

LINES_PER_SECOND = 10
MAX_FIELDS = 5
MAX_CHARS = 128
_INDEX = re.compile(r"\[[^\]]*(\]|$)")


class LineBudget:
    """A token bucket that allows `per_second` lines a second on average, and as many at once."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._most = self._tokens = per_second
        self._clock = clock
        self._at = clock()

    def take(self) -> bool:
        """Whether a line may be written now; counts it if so."""
        now = self._clock()
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._most)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the log says about one refusal."""

    method: str
    code: str
    reason: str
    request_id: str
    caller_id: str
    """The id of the caller's key; empty on a server without keys."""
    fields: Sequence[str]


class RefusalLog:
    """Writes the lines of one server. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = LineBudget(LINES_PER_SECOND, clock)
        self._left_out = 0

    def tell(self, refusal: Refusal) -> None:
        """Write a line for the refusal, or only count it if there were too many."""
        if not self._budget.take():
            if not self._left_out:
                asyncio.get_running_loop().call_later(1.0, self._tell_left_out)
            self._left_out += 1
            return
        log.info(
            "refused %r: %s %s, request %r, key %r%s",
            refusal.method[:MAX_CHARS],
            refusal.code,
            refusal.reason,
            refusal.request_id[:MAX_CHARS],
            refusal.caller_id[:MAX_CHARS],
            f", fields {list(refusal.fields)!a}" if refusal.fields else "",
        )

    def _tell_left_out(self) -> None:
        log.info("refused %d more calls within about a second, without a line for each", self._left_out)
        self._left_out = 0


def fields_of(error: BaseException) -> list[str]:
    """The names of the first few fields that the error is about, without indices."""
    if isinstance(error, InvalidRequest):
        names = [violation.field for violation in error.violations[: 10 * MAX_FIELDS]]
    elif isinstance(error, UnsupportedFeature):
        names = list(error.fields[: 10 * MAX_FIELDS])
    else:
        return []
    different = dict.fromkeys(_INDEX.sub("[]", name[:MAX_CHARS]) for name in names if name)
    return list(different)[:MAX_FIELDS]
