"""Finds the entry of a key or a certificate: the entries of one file, indexed. A reload makes a
new keyring.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.service.access.key_file import KeyEntry
from penstock.service.access_errors import KeyExpired, Unauthenticated

_NOBODY = bytes(32)


@dataclass(frozen=True, slots=True)
class Keyring:
    """Entries by the digest of their secret, and by the names of their certificates."""

    by_digest: Mapping[bytes, KeyEntry]
    by_certificate: Mapping[str, KeyEntry]

    @classmethod
    def of(cls, entries: Iterable[KeyEntry]) -> Keyring:
        """Index entries from `key_file.parse_keys`, where no two share a digest or a name."""
        entries = tuple(entries)
        return cls(
            {bytes.fromhex(entry.sha256): entry for entry in entries if entry.sha256},
            {name: entry for entry in entries for name in entry.certificates},
        )

    def of_secret(self, secret: str, now: datetime) -> KeyEntry:
        """Find the entry of a key that may be used now. Raises Unauthenticated or KeyExpired.

        The time of the look-up depends on the digest of what was sent, and on the stored digests. That helps
        nobody to guess a key: somebody who learns, from the timing, the first bytes of a stored digest can
        find a secret with such a digest only by trying out SHA-256, and would still need all 256 bits of it.
        The comparison that decides is of whole digests, in constant time.
        """
        digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
        entry = self.by_digest.get(digest)
        stored = bytes.fromhex(entry.sha256) if entry is not None else _NOBODY
        if not hmac.compare_digest(stored, digest) or entry is None:
            raise Unauthenticated("the key is not known here, or was revoked")
        return _valid(entry, now)

    def of_certificate(self, names: Iterable[str], now: datetime) -> KeyEntry:
        """Find the entry that the first known one of these names stands for, if it may be used now. The names
        are those of a certificate that TLS has verified. Raises Unauthenticated or KeyExpired.
        """
        for name in names:
            entry = self.by_certificate.get(name)
            if entry is not None:
                return _valid(entry, now)
        raise Unauthenticated("no key was sent, and the client's certificate stands for none")


def _valid(entry: KeyEntry, now: datetime) -> KeyEntry:
    if entry.revoked:  # worded as for an unknown key, so that it tells nothing about the key
        raise Unauthenticated("the key is not known here, or was revoked")
    if entry.expires is not None and now >= entry.expires:
        raise KeyExpired(entry.id, entry.expires)
    return entry


def utc_now() -> datetime:
    """Return the current time, which decides whether a key has expired."""
    return datetime.now(UTC)
