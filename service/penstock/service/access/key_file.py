"""The text of the file of keys, parsed to frozen entries and back. Nothing here reads a file, a clock or a
secret.

The file is JSON, because `penstock keys` writes it and Python's standard library cannot write TOML:

    {"version": 1, "keys": [{"id": "alice", "sha256": "9f86d0...", "roles": ["infer"]}]}

It holds digests and never a secret. They are plain SHA-256, without a salt and without a slow function such
as scrypt. Those make it expensive to try out likely passwords, but a key is 256 random bits, of which no
value is likelier than another: whoever reads the file would have to try 2**255 of them. So the server can
look a key up for every RPC in a microsecond.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.runtime.errors import ConfigError
from penstock.service.access.callers import Role

VERSION = 1
MAX_LIMIT = 10**9
MAX_NAME_CHARS = 256
MAX_PROBLEMS = 20
ID_RULE = "1 to 64 of the characters a-z A-Z 0-9 . _ -, of which the first is a letter or a digit"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_parallel_requests")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key, or one identity that client certificates give. A limit that is None or empty does
    not apply.
    """

    id: str
    """Names the caller in logs, traces and usage."""
    sha256: str = ""
    """The digest of the whole secret, in lower-case hexadecimal digits; empty if only a certificate gives
    this id.
    """
    roles: frozenset[Role] = frozenset({Role.INFER})
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and outputs together."""
    max_parallel_requests: int | None = None
    models: tuple[str, ...] = ()
    """The served models that the key may use; empty means all."""
    expires: datetime | None = None
    """The moment from which on the key is refused; it always has a time zone."""
    revoked: bool = False
    certificates: tuple[str, ...] = ()
    """Names (the subject's CN, or a SAN) of client certificates that stand for this id."""
    private_cache: bool = False
    """Whether the key shares no cached prefixes with other ids."""
    adapters: tuple[str, ...] = ()
    """The adapters that the key may use; empty means all. It may always use the model without one."""


_FIELDS = frozenset(KeyEntry.__dataclass_fields__)


def is_key_id(text: str) -> bool:
    """Say whether the text follows ID_RULE."""
    return _ID.fullmatch(text) is not None


def parse_time(text: str) -> datetime:
    """Parse a time in the form of RFC 3339, such as 2027-01-31T00:00:00Z. Raises ValueError for anything
    else, such as a time without a zone.
    """
    if not _TIME.fullmatch(text):
        raise ValueError(f"must be a time with its zone, as 2027-01-31T00:00:00Z, not {text!r}")
    try:
        return datetime.fromisoformat(text.upper())
    except ValueError as error:
        raise ValueError(f"{text!r} is no time: {error}") from error


def parse_keys(text: str) -> tuple[KeyEntry, ...]:
    """Parse the text of a file to its entries. Raises ConfigError with every problem, each with the name of
    its entry.
    """
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError('must be a JSON object with "version" and "keys"')
    problems = [f"unknown field {name!r}" for name in content if name not in ("version", "keys")]
    version, listed = content.get("version"), content.get("keys")
    if version != VERSION or isinstance(version, bool):
        problems.append(f"version: must be {VERSION}, not {version!r}")
    if not isinstance(listed, list):
        problems.append('"keys" must be a list')
        listed = []
    entries = []
    for index, fields in enumerate(listed):
        found: list[str] = []
        entry = _entry(fields, found)
        if entry is not None:
            entries.append(entry)
        problems += [f"{_place(index, fields)}: {problem}" for problem in found]
    problems += _shared(entries)
    if problems:
        told = problems[:MAX_PROBLEMS]
        if len(problems) > len(told):
            told.append(f"and {len(problems) - len(told)} more problems")
        raise ConfigError("; ".join(told))
    return tuple(entries)


def format_keys(entries: Iterable[KeyEntry]) -> str:
    """Write the text of a file with these entries. `parse_keys` reads it back to equal entries."""
    return json.dumps({"version": VERSION, "keys": [_fields(entry) for entry in entries]}, indent=2) + "\n"


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that has one name twice: Python would keep the last value, and the author may believe
    in the first.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return made


def _place(index: int, fields: object) -> str:
    name = fields.get("id") if isinstance(fields, dict) else None
    return f"keys[{index}]" + (f" ({name[:64]!r})" if isinstance(name, str) else "")


def _entry(fields: object, problems: list[str]) -> KeyEntry | None:
    """Convert one entry. Adds to `problems` and returns None if anything is wrong."""
    if not isinstance(fields, dict):
        problems.append("must be a JSON object")
        return None
    problems += [f"unknown field {name!r}" for name in fields if name not in _FIELDS]
    name = fields.get("id")
    if not isinstance(name, str) or not is_key_id(name):
        problems.append(f"id: must be {ID_RULE}")
    digest = fields.get("sha256", "")
    if not isinstance(digest, str) or (digest and not _DIGEST.fullmatch(digest)):
        problems.append("sha256: must be 64 lower-case hexadecimal digits")
    certificates = _names(fields, "certificates", problems)
    if not digest and not certificates:
        problems.append("sha256: is required where there are no certificates")
    entry_limits = {limit: _limit(fields, limit, problems) for limit in _LIMITS}
    roles = _roles(fields, problems)
    models, adapters = _allowed(fields, "models", problems), _allowed(fields, "adapters", problems)
    expires = _expires(fields, problems)
    revoked, private = _flag(fields, "revoked", problems), _flag(fields, "private_cache", problems)
    if problems:
        return None
    return KeyEntry(
        str(name),
        str(digest),
        roles,
        models=models,
        adapters=adapters,
        expires=expires,
        revoked=revoked,
        certificates=certificates,
        private_cache=private,
        **entry_limits,
    )


def _roles(fields: dict[str, Any], problems: list[str]) -> frozenset[Role]:
    known = [role.value for role in Role]
    given = fields.get("roles")
    if not isinstance(given, list) or not given or not all(role in known for role in given):
        problems.append(f"roles: must be a list of one or more of {', '.join(known)}")
        return frozenset()
    return frozenset(map(Role, given))


def _names(fields: dict[str, Any], field: str, problems: list[str]) -> tuple[str, ...]:
    given = fields.get(field, [])
    if not isinstance(given, list) or not all(
        isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS for name in given
    ):
        problems.append(f"{field}: must be a list of strings of 1 to {MAX_NAME_CHARS} characters")
        return ()
    if len(set(given)) < len(given):
        problems.append(f"{field}: has the same name twice")
    return tuple(given)


def _allowed(fields: dict[str, Any], field: str, problems: list[str]) -> tuple[str, ...]:
    """Read the names that a key is limited to. An empty list would look like none at all, and mean all."""
    if fields.get(field) == []:
        problems.append(f"{field}: must not be empty; leave it out to allow all")
    return _names(fields, field, problems)


def _limit(fields: dict[str, Any], field: str, problems: list[str]) -> int | None:
    value = fields.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LIMIT:
        problems.append(f"{field}: must be a whole number from 1 to {MAX_LIMIT}, or left out for no limit")
        return None
    return value


def _expires(fields: dict[str, Any], problems: list[str]) -> datetime | None:
    value = fields.get("expires")
    if value is None:
        return None
    try:
        return parse_time(value if isinstance(value, str) else repr(value))
    except ValueError as error:
        problems.append(f"expires: {error}")
        return None


def _flag(fields: dict[str, Any], field: str, problems: list[str]) -> bool:
    value = fields.get(field, False)
    if not isinstance(value, bool):
        problems.append(f"{field}: must be true or false")
        return False
    return value


def _shared(entries: Sequence[KeyEntry]) -> list[str]:
    """Find values that must be unique and stand in two entries."""
    problems: list[str] = []
    owners: dict[tuple[str, str], str] = {}
    for entry in entries:
        for field, value in (
            ("id", entry.id),
            ("sha256", entry.sha256),
            *(("certificates", name) for name in entry.certificates),
        ):
            if not value:
                continue
            if (field, value) in owners:
                first = owners[field, value]
                problems.append(f"{entry.id!r}: {field}: the same as that of another entry, {first!r}")
            owners.setdefault((field, value), entry.id)
    return problems


def _fields(entry: KeyEntry) -> dict[str, Any]:
    """Return the fields of an entry that differ from their defaults, and its roles."""
    fields: dict[str, Any] = {"id": entry.id}
    if entry.sha256:
        fields["sha256"] = entry.sha256
    fields["roles"] = sorted(role.value for role in entry.roles)
    for limit in _LIMITS:
        if (value := getattr(entry, limit)) is not None:
            fields[limit] = value
    if entry.models:
        fields["models"] = list(entry.models)
    if entry.adapters:
        fields["adapters"] = list(entry.adapters)
    if entry.expires is not None:
        fields["expires"] = entry.expires.isoformat().replace("+00:00", "Z")
    if entry.certificates:
        fields["certificates"] = list(entry.certificates)
    if entry.private_cache:
        fields["private_cache"] = True
    if entry.revoked:
        fields["revoked"] = True
    return fields
