"""How long a call may take if the caller does not say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

INFO_TIMEOUT: Final = 10.0
"""Seconds for calls that a server answers at once: information, an abort."""
TEXT_TIMEOUT: Final = 60.0
"""Seconds for tokenizing, which takes longer for more text."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The default timeout of one client, in seconds. None means the defaults above, and no limit on
    generation.
    """

    default: float | None = None

    def __post_init__(self) -> None:
        _checked(self.default)

    def of(self, given: float | None, otherwise: float | None = None) -> float | None:
        """The timeout of one call: its own (math.inf means no limit), else the client's, else `otherwise`."""
        chosen = next(
            (value for value in (_checked(given), self.default, otherwise) if value is not None), None
        )
        return None if chosen is None or math.isinf(chosen) else chosen


def _checked(value: float | None) -> float | None:
    if value is not None and not value >= 0:  # NaN too
        raise ValueError(f"timeout: must be at least 0 seconds, not {value}")
    return value
