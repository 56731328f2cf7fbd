"""A server with keys, and what its callers send."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from penstock.service.access.callers import Role
from penstock.service.access.key_file import KeyEntry, format_keys
from penstock.service.access.key_store import digest_of
from tests.service.rig import Rig, serving

INFER, CONTROL = frozenset({Role.INFER}), frozenset({Role.CONTROL})
Metadata = list[tuple[str, str]]


def key(name: str, roles: frozenset[Role] = INFER, **fields: Any) -> KeyEntry:
    """Make an entry whose secret is "psk_" and the name."""
    return KeyEntry(**({"id": name, "sha256": digest_of(f"psk_{name}"), "roles": roles} | fields))


def as_(name: str) -> dict[str, Metadata]:
    """Arguments of a call with the key of this name."""
    return {"metadata": [("authorization", f"Bearer psk_{name}")]}


def write(file: Path, entries: Iterable[KeyEntry]) -> Path:
    file.write_text(format_keys(entries))
    file.chmod(0o600)
    return file


@contextlib.asynccontextmanager
async def serving_keys(
    file: Path, *entries: KeyEntry, engine: Any = None, **options: Any
) -> AsyncIterator[Rig]:
    """Run a server that asks for one of these keys."""
    write(file, entries)
    async with serving(engine, keys=file, **options) as rig:
        yield rig
