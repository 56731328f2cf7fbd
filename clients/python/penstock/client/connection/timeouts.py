"""How long a call may take where the caller does not say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

INFO_TIMEOUT: Final = 10.0
"""Seconds for what a server answers at once: information, an abort."""
TEXT_TIMEOUT: Final = 60.0
"""Seconds for tokenizing, which takes longer the more text there is."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The timeouts of one client, in seconds; None: those above, and no limit on generation."""

    default: float | None = None

    def __post_init__(self) -> None:
        _checked(self.default)

    def of(self, given: float | None, otherwise: float | None = None) -> float | None:
        """Of one call: what it says (math.inf: no limit), else what the client says, else `otherwise`."""
        chosen = next(
            (value for value in (_checked(given), self.default, otherwise) if value is not None), None
        )
        return None if chosen is None or math.isinf(chosen) else chosen


def _checked(value: float | None) -> float | None:
    if value is not None and not value >= 0:  # NaN too
        raise ValueError(f"a timeout is a number of seconds, not {value}")
    return value
