"""The access log: one line for each call of Generate or Stream that the server did not refuse.

A line says who called, how the call ended, how long it took and what it used. It has ids, names and numbers,
and nothing that a caller or the model wrote. A refused call has a line of its own kind (`refusals`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.service.telemetry.logs.lines import BoundedLog
from penstock.service.usage.meter import Course, Outcome, Usage
from penstock.shared.logs import Line

LOGGER = "penstock.access"
LINES_PER_SECOND = 200
MAX_CHARS = 128
METHODS = frozenset(
    {
        "penstock.v1.InferenceService/Generate",
        "penstock.v1.InferenceService/Stream",
        "vllm.grpc.engine.VllmEngine/Generate",
    }
)


@dataclass(frozen=True, slots=True)
class AccessLine(Line):
    """What the log says about one call."""

    usage: Usage
    course: Course

    def __str__(self) -> str:
        usage, course = self.usage, self.course
        first = "" if course.first_token_s is None else f", first token after {course.first_token_s:.3f} s"
        finishes = Counter(course.finish_reasons)
        named = (reason if count == 1 else f"{count} {reason}" for reason, count in finishes.items())
        ends = f", finished by {', '.join(named)}" if finishes else ""
        reason = f" {usage.reason}" if usage.reason else ""
        return (
            f"{usage.outcome.value} {usage.method!r}: {course.code}{reason} after {course.seconds:.3f} s, "
            f"request {usage.request_id[:MAX_CHARS]!r}, key {usage.caller[:MAX_CHARS]!r}{first}, "
            f"tokens: {usage.prompt_tokens} of the prompt, {usage.cached_prompt_tokens} of them cached, "
            f"{usage.completion_tokens} generated{ends}"
        )

    def fields(self) -> Mapping[str, object]:
        usage, course = self.usage, self.course
        first = course.first_token_s
        return {
            "outcome": usage.outcome.value,
            "method": usage.method,
            "request_id": usage.request_id[:MAX_CHARS],
            "key": usage.caller[:MAX_CHARS],
            "code": course.code,
            "reason": usage.reason,
            "seconds": round(course.seconds, 6),
            "first_token_seconds": None if first is None else round(first, 6),
            "prompt_tokens": usage.prompt_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
            "generated_tokens": usage.completion_tokens,
            "finish_reasons": dict(Counter(course.finish_reasons)),
        }


class AccessLog:
    """Writes the lines of one server; a `CallLog`. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        left_out = "%d more calls ended within about a second, without a line for each"
        self._log = BoundedLog(logging.getLogger(LOGGER), LINES_PER_SECOND, left_out, clock)

    def tell(self, usage: Usage, course: Course) -> bool:
        """Write a line for a call, or only count it if there were too many. False for calls that this log
        has no lines for.
        """
        if usage.method not in METHODS or usage.outcome is Outcome.REFUSED or not self._log.is_on:
            return False
        self._log.write(AccessLine(usage, course))
        return True
