"""The file of keys as text: what is accepted, and what is refused with the name of its entry."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.access.callers import Role
from penstock.service.access.key_file import KeyEntry, format_keys, parse_keys, parse_time

DIGEST = "0123456789abcdef" * 4
OTHER = "f" * 64


def text(*entries: Any, **top: Any) -> str:
    return json.dumps({"version": 1, "keys": list(entries)} | top)


def entry(**fields: Any) -> dict[str, Any]:
    return {"id": "alice", "sha256": DIGEST, "roles": ["infer"]} | fields


def problem(content: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_keys(content)
    return str(caught.value)


def test_the_least_and_the_most_of_an_entry():
    least, most = parse_keys(
        text(
            entry(),
            {
                "id": "Bob-2.x_y",
                "sha256": OTHER,
                "roles": ["control", "infer"],
                "requests_per_minute": 60,
                "tokens_per_minute": 1000,
                "max_parallel_requests": 4,
                "models": ["a/b", "c"],
                "expires": "2027-01-31T12:00:00+02:00",
                "revoked": True,
                "certificates": ["bob.example"],
                "private_cache": True,
                "adapters": ["sql", "law"],
            },
        )
    )
    assert least == KeyEntry("alice", DIGEST, frozenset({Role.INFER}))
    assert (least.requests_per_minute, least.expires, least.models, least.revoked) == (None, None, (), False)
    assert most == KeyEntry(
        "Bob-2.x_y",
        OTHER,
        frozenset({Role.INFER, Role.CONTROL}),
        60,
        1000,
        4,
        ("a/b", "c"),
        datetime(2027, 1, 31, 12, tzinfo=timezone(timedelta(hours=2))),
        True,
        ("bob.example",),
        True,
        ("sql", "law"),
    )
    assert parse_keys(format_keys([least, most])) == (least, most)
    assert parse_keys(text()) == ()


def test_null_is_no_limit():
    nothing = dict.fromkeys(("requests_per_minute", "tokens_per_minute", "max_parallel_requests", "expires"))
    assert parse_keys(text(entry(**nothing))) == (KeyEntry("alice", DIGEST),)


def test_only_certificates_need_no_digest():
    (one,) = parse_keys(text({"id": "c", "roles": ["infer"], "certificates": ["c.example"]}))
    assert (one.sha256, one.certificates) == ("", ("c.example",))
    assert parse_keys(format_keys([one])) == (one,)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"secret": "psk"}, "unknown field 'secret'"),
        ({"id": ""}, "id: must be 1 to 64"),
        ({"id": "a" * 65}, "id: must be 1 to 64"),
        ({"id": "a\u0001b"}, "id: must be 1 to 64"),
        ({"id": "alice\n"}, "id: must be 1 to 64"),
        ({"id": "-a"}, "id: must be 1 to 64"),
        ({"id": 7}, "id: must be 1 to 64"),
        ({"sha256": DIGEST[1:]}, "sha256: must be 64"),
        ({"sha256": DIGEST.upper()}, "sha256: must be 64"),
        ({"sha256": 5}, "sha256: must be 64"),
        ({"sha256": ""}, "sha256: is required"),
        ({"roles": []}, "roles: must be a list of one or more of infer, control"),
        ({"roles": ["admin"]}, "roles: must be"),
        ({"roles": "infer"}, "roles: must be"),
        ({"roles": [["infer"]]}, "roles: must be"),
        ({"requests_per_minute": 0}, "requests_per_minute: must be a whole number from 1"),
        ({"requests_per_minute": True}, "requests_per_minute: must be"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute: must be"),
        ({"tokens_per_minute": 10**10}, "tokens_per_minute: must be"),
        ({"max_parallel_requests": "4"}, "max_parallel_requests: must be"),
        ({"models": "m"}, "models: must be a list"),
        ({"models": []}, "models: must not be empty; leave it out"),
        ({"models": ["m", "m"]}, "models: has the same name twice"),
        ({"models": [""]}, "models: must be a list of strings of 1 to 256"),
        ({"adapters": []}, "adapters: must not be empty; leave it out"),
        ({"certificates": ["c" * 257]}, "certificates: must be a list of strings"),
        ({"certificates": [1]}, "certificates: must be a list of strings"),
        ({"expires": "2027-01-31"}, "expires: must be a time with its zone"),
        ({"expires": "2027-01-31T00:00:00"}, "expires: must be a time with its zone"),
        ({"expires": "2027-02-31T00:00:00Z"}, "expires: '2027-02-31T00:00:00Z' is no time"),
        ({"expires": 1800000000}, "expires: must be a time with its zone"),
        ({"revoked": "no"}, "revoked: must be true or false"),
        ({"private_cache": 1}, "private_cache: must be true or false"),
    ],
)
def test_a_problem_names_its_entry_and_field(fields, complaint):
    """The entry before it is right, and the whole file is refused nevertheless."""
    told = problem(text(entry(id="first", sha256=OTHER), entry(**fields)))
    assert told.startswith("keys[1]")
    assert complaint in told
    if isinstance(fields.get("id", "alice"), str):
        assert repr(fields.get("id", "alice")[:64]) in told


def test_all_problems_of_all_entries_are_told_at_once():
    told = problem(text(entry(id="x", roles=[], revoked=1), entry(sha256="1"), 5, extra=1))
    assert [part.split(": ", 2)[:2] for part in told.split("; ")] == [
        ["unknown field 'extra'"],
        ["keys[0] ('x')", "roles"],
        ["keys[0] ('x')", "revoked"],
        ["keys[1] ('alice')", "sha256"],
        ["keys[2]", "must be a JSON object"],
    ]


def test_many_problems_are_cut():
    told = problem(text(*({"id": f"k{i}"} for i in range(100))))
    assert told.endswith("and 180 more problems")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "not JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"version": 1}', '"keys" must be a list'),
        ('{"keys": []}', "version: must be 1, not None"),
        ('{"version": 2, "keys": []}', "version: must be 1, not 2"),
        ('{"version": true, "keys": []}', "version: must be 1"),
        ('{"version": 1, "keys": [], "keys": []}', "'keys' stands twice"),
        (text(entry())[:-3] + ', "revoked": true, "revoked": false}]}', "'revoked' stands twice"),
    ],
)
def test_what_is_no_such_file(content, complaint):
    assert complaint in problem(content)


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        ({"id": "a"}, {"id": "a"}, "'a': id: the same as that of another entry, 'a'"),
        ({"id": "a"}, {"id": "b", "sha256": DIGEST}, "'b': sha256: the same as that of another entry, 'a'"),
        (
            {"id": "a", "certificates": ["c"]},
            {"id": "b", "certificates": ["d", "c"]},
            "'b': certificates: the same as that of another entry, 'a'",
        ),
    ],
)
def test_nothing_stands_for_two_callers(first, second, complaint):
    assert complaint in problem(text(entry(**first), entry(**({"sha256": OTHER} | second))))


def test_problems_quote_no_digest():
    assert DIGEST not in problem(text(entry(id="a"), entry(id="b", roles=[])))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2027-01-31T00:00:00Z", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2027-01-31t00:00:00z", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2027-01-31 00:00:00.25+00:00", datetime(2027, 1, 31, microsecond=250_000, tzinfo=UTC)),
        ("2027-01-31T00:00:00-05:30", datetime(2027, 1, 31, 5, 30, tzinfo=UTC)),
    ],
)
def test_times(written, meant):
    assert parse_time(written) == meant
