"""Who a caller is where something is stored for it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sqlite3


def secret_of(database: sqlite3.Connection) -> bytes:
    """Return the secret of a file in which callers' things are stored. It is made at the first call, within
    the transaction that is open, if one is.
    """
    database.execute(
        "CREATE TABLE IF NOT EXISTS secret "
        "(only_row INTEGER PRIMARY KEY CHECK (only_row = 1), value BLOB NOT NULL)"
    )
    database.execute("INSERT OR IGNORE INTO secret VALUES (1, ?)", (secrets.token_bytes(32),))
    ((secret,),) = database.execute("SELECT value FROM secret")
    return bytes(secret)


def caller_of(authorization: str, secret: bytes) -> str:
    """Return the name under which a caller's things are stored: a hash of its key, of which nobody without
    the secret learns the key. Callers without a key, whose `authorization` is empty, are one.
    """
    scheme, _, key = authorization.partition(" ")
    named = f"{scheme.lower()} {key.strip()}".encode("utf-8", "replace")
    return hmac.new(secret, named, hashlib.sha256).hexdigest()
