"""Finds the caller of an RPC from the key or the certificate that it brings."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from penstock.service.access.callers import Caller
from penstock.service.access.key_file import KeyEntry
from penstock.service.access.keyring import Keyring, utc_now
from penstock.service.access.rates import Account, Clock, Rates
from penstock.service.access_errors import Unauthenticated

HEADER = "authorization"
MAX_HEADER_CHARS = 4096
_HOW = "send a key as metadata `authorization: Bearer KEY`"


def bearer_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the secret in the metadata, or None if there is no such header. Raises Unauthenticated if the
    header has another form, or if there are two: proxies do not agree on which of two counts.
    """
    given = [value for name, value in metadata if name == HEADER]
    if not given:
        return None
    if len(given) > 1:
        raise Unauthenticated(f"more than one {HEADER} header was sent")
    value = given[0] if isinstance(given[0], str) else ""
    scheme, _, secret = value.partition(" ")
    secret = secret.strip(" ")
    if len(value) > MAX_HEADER_CHARS or scheme.lower() != "bearer" or not secret:
        raise Unauthenticated(f"the {HEADER} header is not of the form `Bearer KEY`")
    return secret


class Authenticator:
    """Knows the keys that are valid now, and what each caller has used of its rates. Used on the event loop
    only.

    Failed attempts are not counted against anybody: a key cannot be guessed, however often somebody tries,
    and a count per address would let one client behind a proxy lock out the others. Failed attempts are
    refused before their message is read, and logged at a limited rate like every refusal.
    """

    def __init__(
        self,
        entries: Iterable[KeyEntry],
        *,
        now: Callable[[], datetime] = utc_now,
        clock: Clock = time.monotonic,
    ) -> None:
        """`now` gives the time that keys expire by. `clock` gives seconds, never goes back, and is what rates
        are measured by.
        """
        self._now = now
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        # A new secret at each start is enough, because the cache that it separates is new, too. Nobody can
        # name another caller's salt.
        self._cache_secret = secrets.token_bytes(32)
        self._keyring = Keyring.of(())
        self.use(entries)

    def use(self, entries: Iterable[KeyEntry]) -> None:
        """Use these keys from now on. Calls that are under way go on, even if their key is gone, because a
        caller is checked only when its call begins; calls that have no end of their own ask again. What
        callers have used of their rates is kept.
        """
        entries = tuple(entries)
        self._keyring = Keyring.of(entries)
        before, self._accounts = self._accounts, {}
        for entry in entries:
            rates = Rates(entry.requests_per_minute, entry.tokens_per_minute, entry.max_parallel_requests)
            account = before.get(entry.id)
            if account is None:
                account = Account(rates, self._clock)
            else:
                account.change(rates)
            self._accounts[entry.id] = account

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller | None:
        """Return the caller whose key is in the metadata, found before anything of the message is read. None
        if no key was sent and a certificate may identify the caller instead: then `by_certificate` decides.

        Raises Unauthenticated or KeyExpired. A key that was sent always decides, even if it is wrong.
        """
        secret = bearer_of(metadata)
        if secret is not None:
            return self._caller(self._keyring.of_secret(secret, self._now()))
        if not self._keyring.by_certificate:
            raise Unauthenticated(f"this server asks for a key; {_HOW}")
        return None

    def by_certificate(self, names: Sequence[str]) -> Caller:
        """Return the caller that a client's certificate stands for. `names` are the names in the certificate,
        once TLS has verified it; empty if there is none. Raises Unauthenticated or KeyExpired.
        """
        if not names:
            raise Unauthenticated(f"this server asks for a key or a client certificate; {_HOW}")
        return self._caller(self._keyring.of_certificate(names, self._now()))

    def account(self, caller: Caller) -> Account:
        """Return what the caller has used of its rates. A caller whose entry was just removed gets an account
        without limits.
        """
        return self._accounts.get(caller.id) or Account(Rates(), self._clock)

    def _caller(self, entry: KeyEntry) -> Caller:
        secret = ""
        if entry.private_cache:
            secret = hmac.new(self._cache_secret, entry.id.encode(), hashlib.sha256).hexdigest()
        return Caller(entry.id, entry.roles, frozenset(entry.models), frozenset(entry.adapters), secret)
