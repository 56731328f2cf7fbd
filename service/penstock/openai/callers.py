"""Who a caller is where something is stored for it."""

from __future__ import annotations

import hashlib
import hmac


def caller_of(authorization: str, secret: bytes) -> str:
    """The name under which a caller's things are stored: a hash of its key, of which nobody without the
    secret learns the key. Callers without a key, whose `authorization` is empty, are one.
    """
    scheme, _, key = authorization.partition(" ")
    named = f"{scheme.lower()} {key.strip()}".encode("utf-8", "replace")
    return hmac.new(secret, named, hashlib.sha256).hexdigest()
