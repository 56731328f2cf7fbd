"""How large replies may get: one group of the server's options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from penstock.runtime.errors import ConfigError

MIB = 1024 * 1024
_MOST = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLimits:
    """Limits on replies, in bytes; each has a flag of the same name."""

    max_response_bytes: int = 64 * MIB
    """Bytes of one request that may wait: all that Generate collects, or what a stream's reader has not taken
    yet.
    """
    max_buffered_response_bytes: int = 1024 * MIB
    """Bytes of all requests together that may wait."""

    def __post_init__(self) -> None:
        bad = [
            f"{field.name}: must be from 1 to {_MOST}, not {value}"
            for field in dataclasses.fields(self)
            if not 1 <= (value := getattr(self, field.name)) <= _MOST
        ]
        if bad:
            raise ConfigError("; ".join(bad))
