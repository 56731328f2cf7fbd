"""Finding callers from keys and certificates, without a server; tests/service/access/test_keys.py has one."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime, timedelta

import pytest

from penstock.service.access.authentication import Authenticator, bearer_of
from penstock.service.access.callers import Caller, Role
from penstock.service.access.key_file import KeyEntry
from penstock.service.access.key_store import digest_of
from penstock.service.access_errors import KeyExpired, RateLimited, Unauthenticated

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def key(name: str, secret: str = "", **fields) -> KeyEntry:
    return KeyEntry(name, digest_of(secret or f"secret of {name}"), **fields)


def authenticator(*entries: KeyEntry) -> Authenticator:
    return Authenticator(entries, now=lambda: NOW, clock=lambda: 0.0)


def bearer(secret: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {secret}")]


def test_whose_key_it_is():
    keys = authenticator(key("alice"), key("bob", roles=frozenset(Role), models=("m",)))
    assert keys.authenticate(bearer("secret of alice")) == Caller("alice", frozenset({Role.INFER}))
    assert keys.authenticate(bearer("secret of bob")) == Caller("bob", frozenset(Role), frozenset({"m"}))


@pytest.mark.parametrize("value", ["bearer s", "BEARER s", "Bearer  s ", "Bearer s"])
def test_the_scheme_is_read_as_http_reads_it(value):
    assert bearer_of([("authorization", value)]) == "s"


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ([], "asks for a key"),
        ([("x-authorization", "Bearer secret of alice")], "asks for a key"),
        ([("authorization", "")], "not of the form"),
        ([("authorization", "Bearer")], "not of the form"),
        ([("authorization", "Bearer ")], "not of the form"),
        ([("authorization", "secret of alice")], "not of the form"),
        ([("authorization", "Basic c2VjcmV0")], "not of the form"),
        ([("authorization", "Bearer " + "x" * 5000)], "not of the form"),
        ([("authorization", b"Bearer secret of alice")], "not of the form"),
        (bearer("secret of alice")[1:] * 2, "more than one"),
        (bearer("Secret of alice"), "not known here"),
        (bearer("secret of alic"), "not known here"),
        (bearer("\ud800"), "not known here"),
        (bearer(digest_of("secret of alice")), "not known here"),
        (bearer("secret of carol"), "not known here"),
    ],
)
def test_who_is_not_known(metadata, complaint):
    keys = authenticator(key("alice"), key("carol", revoked=True))
    with pytest.raises(Unauthenticated, match=complaint) as caught:
        keys.authenticate(metadata)
    assert "secret of" not in str(caught.value)


def test_a_revoked_key_looks_like_one_that_never_was():
    """Also if it has expired. Otherwise a refusal would reveal that there was such a key."""
    keys = authenticator(key("carol", revoked=True, expires=NOW - timedelta(days=1)))
    told = []
    for secret in ("secret of carol", "secret of nobody"):
        with pytest.raises(Unauthenticated) as caught:
            keys.authenticate(bearer(secret))
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_a_key_is_good_until_the_moment_it_expires():
    keys = authenticator(
        key("a", expires=NOW + timedelta(microseconds=1)), key("b", expires=NOW), key("c", expires=NOW)
    )
    assert keys.authenticate(bearer("secret of a"))
    with pytest.raises(KeyExpired, match="'b' expired at 2026-11-22T00:00:00"):
        keys.authenticate(bearer("secret of b"))


def test_whole_digests_are_compared_in_constant_time(monkeypatch):
    """For a known key and for an unknown one."""
    compared = []

    def compare(a, b):
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = authenticator(key("alice"))
    keys.authenticate(bearer("secret of alice"))
    with pytest.raises(Unauthenticated):
        keys.authenticate(bearer("x"))
    assert compared == [(32, 32), (32, 32)]


def test_certificates():
    keys = authenticator(
        key("alice", certificates=("alice.example", "a")),
        KeyEntry("c", certificates=("c.example",)),
        key("gone", certificates=("gone.example",), revoked=True),
        key("old", certificates=("old.example",), expires=NOW),
    )
    assert keys.authenticate([]) is None, "the certificate decides"
    assert keys.by_certificate(["unknown", "a"]).id == "alice"
    assert keys.by_certificate(["c.example"]).id == "c"
    for names, complaint in ((["gone.example"], "not known here"), (["x"], "stands for none"), ([], "asks")):
        with pytest.raises(Unauthenticated, match=complaint):
            keys.by_certificate(names)
    with pytest.raises(KeyExpired):
        keys.by_certificate(["old.example"])


def test_a_wrong_key_is_not_made_good_by_a_certificate():
    keys = authenticator(key("alice", certificates=("a",)))
    with pytest.raises(Unauthenticated, match="not known"):
        keys.authenticate(bearer("wrong"))


def test_new_keys_count_at_once_and_use_is_not_forgotten():
    keys = authenticator(key("alice", requests_per_minute=1), key("bob"))
    alice = keys.authenticate(bearer("secret of alice"))
    assert alice is not None
    account = keys.account(alice)
    account.admit()
    keys.use([key("alice", "new secret", requests_per_minute=1), key("carol")])
    with pytest.raises(Unauthenticated):
        keys.authenticate(bearer("secret of alice"))
    with pytest.raises(Unauthenticated):
        keys.authenticate(bearer("secret of bob"))
    again = keys.authenticate(bearer("new secret"))
    assert again == alice
    assert keys.account(alice) is account
    with pytest.raises(RateLimited):
        keys.account(alice).admit()


def test_private_caches_are_apart_from_all_others_and_from_other_starts():
    entries = [key("alice", private_cache=True), key("bob", private_cache=True), key("carol")]
    callers = [
        caller
        for keys in (authenticator(*entries), authenticator(*entries))
        for entry in entries[:2]
        if (caller := keys.authenticate(bearer(f"secret of {entry.id}"))) is not None
    ]
    salts = {caller.cache_salt(salt) for caller in callers for salt in ("", "mine")}
    assert len(salts) == 8
    assert all(len(salt) <= 256 for salt in salts)
    carol = authenticator(*entries).authenticate(bearer("secret of carol"))
    assert carol is not None
    assert carol.cache_salt("mine") == "mine"
    assert callers[0].cache_salt("mine") == callers[0].cache_salt("mine")
    assert callers[0].cache_secret not in repr(callers[0])
