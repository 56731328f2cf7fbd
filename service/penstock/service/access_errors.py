"""Why a caller is not let in, or not now. Rows in `errors.TABLE` say how each looks on the wire."""

from __future__ import annotations

from datetime import datetime

from penstock.runtime.errors import RequestError, UnavailableError


class Unauthenticated(RequestError):
    """Nobody knows who calls: no key, one that is malformed or unknown, or one that was revoked.

    Expected. It says no more than that: who guesses keys must not learn which ones there were.
    """


class KeyExpired(RequestError):
    """The key was right until it expired. Only who has the whole secret can see this."""

    def __init__(self, key_id: str, expired: datetime) -> None:
        self.key_id, self.expired = key_id, expired
        super().__init__(f"key {key_id!r} expired at {expired.isoformat()}; ask for a new one")


class Forbidden(RequestError):
    """The caller is known, and may not do this."""


class RateLimited(UnavailableError):
    """The caller has used what its key allows in a minute; after `retry_after_s` there is room again."""

    def __init__(self, limit: str, per_minute: int, retry_after_s: float) -> None:
        self.limit, self.per_minute, self.retry_after_s = limit, per_minute, retry_after_s
        super().__init__(f"over this key's {limit}, {per_minute}; retry in {retry_after_s:.3g} s")
