"""Logs each refusal in one line, but never more than a few lines a second: who was refused what, and why.

A line has ids, names and reasons, and never values: no prompt, no header, not even the error's own message,
which may quote one. A field is named without the content of its brackets, because the key of a map is a
caller's text.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature
from penstock.service.telemetry.logs.lines import BoundedLog
from penstock.shared.logs import Line

log = logging.getLogger(__name__)

LINES_PER_SECOND = 10
MAX_FIELDS = 5
MAX_CHARS = 128
_INDEX = re.compile(r"\[[^\]]*(\]|$)")


@dataclass(frozen=True, slots=True)
class Refusal(Line):
    """What the log says about one refusal."""

    method: str
    code: str
    reason: str
    request_id: str
    caller_id: str
    """The id of the caller's key; empty on a server without keys."""
    violated: Sequence[str]
    """The names of the fields that the error is about."""

    def __str__(self) -> str:
        about = f", fields {list(self.violated)!a}" if self.violated else ""
        return (
            f"refused {self.method[:MAX_CHARS]!r}: {self.code} {self.reason}, "
            f"request {self.request_id[:MAX_CHARS]!r}, key {self.caller_id[:MAX_CHARS]!r}{about}"
        )

    def fields(self) -> Mapping[str, object]:
        return {
            "method": self.method[:MAX_CHARS],
            "request_id": self.request_id[:MAX_CHARS],
            "key": self.caller_id[:MAX_CHARS],
            "code": self.code,
            "reason": self.reason,
            "fields": list(self.violated),
        }


class RefusalLog:
    """Writes the lines of one server. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        left_out = "refused %d more calls within about a second, without a line for each"
        self._log = BoundedLog(log, LINES_PER_SECOND, left_out, clock)

    def tell(self, refusal: Refusal) -> None:
        """Write a line for the refusal, or only count it if there were too many."""
        self._log.write(refusal)


def fields_of(error: BaseException) -> list[str]:
    """List the names of the first few fields that the error is about, without indices."""
    if isinstance(error, InvalidRequest):
        names = [violation.field for violation in error.violations[: 10 * MAX_FIELDS]]
    elif isinstance(error, UnsupportedFeature):
        names = list(error.fields[: 10 * MAX_FIELDS])
    else:
        return []
    different = dict.fromkeys(_INDEX.sub("[]", name[:MAX_CHARS]) for name in names if name)
    return list(different)[:MAX_FIELDS]
