"""Errors that say why a caller is not let in, or not now. Rows of `errors.TABLE` say how each looks on the
wire.
"""

from __future__ import annotations

from datetime import datetime

from penstock.runtime.errors import RequestError, UnavailableError


class Unauthenticated(RequestError):
    """The caller is not known: it sent no key, or one that is malformed, unknown or revoked.

    Expected. The message does not say which keys exist, so that somebody who guesses keys learns nothing.
    """


class KeyExpired(RequestError):
    """The key was valid until it expired. Only a caller that has the whole secret is told this."""

    def __init__(self, key_id: str, expired: datetime) -> None:
        self.key_id, self.expired = key_id, expired
        super().__init__(f"key {key_id!r} expired at {expired.isoformat()}; ask for a new one")


class Forbidden(RequestError):
    """The caller is known, and its key does not allow this call."""


class RateLimited(UnavailableError):
    """The caller has used what its key allows per minute; after `retry_after_s` seconds it may call again."""

    def __init__(self, limit: str, per_minute: int, retry_after_s: float) -> None:
        self.limit, self.per_minute, self.retry_after_s = limit, per_minute, retry_after_s
        super().__init__(f"over this key's {limit}, {per_minute}; retry in {retry_after_s:.3g} s")
