"""The server in the storm: a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from penstock.service.access.callers import Role
from penstock.service.access.key_file import KeyEntry
from penstock.service.access.key_store import change_keys, digest_of, new_secret

START_S = 240.0
"""The first start on a machine compiles the kernels."""
ATTACKER_PARALLEL = 8
"""How many requests the attacker may have at once, as an operator would limit a caller that is
not trusted.
"""
IDS = ("honest", "attacker", "expired", "revoked", "operator")


@dataclass(frozen=True, slots=True)
class Remains:
    """What a server holds; compared before and after."""

    rss_bytes: int
    descriptors: int
    threads: int
    children: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers."""

    process: asyncio.subprocess.Process
    address: str
    secrets: Mapping[str, str]
    """The secret of each key of IDS."""
    folder: Path

    def remains(self) -> Remains:
        """Return what the server holds now. Its event loop must be running, because it writes down how many
        tasks it has.
        """
        proc = Path(f"/proc/{self.process.pid}")
        status = (proc / "status").read_text()
        pages = int((proc / "statm").read_text().split()[1])
        return Remains(
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            descriptors=len(list((proc / "fd").iterdir())),
            threads=int(_line(status, "Threads")),
            children=len((proc / "task" / str(self.process.pid) / "children").read_text().split()),
            tasks=int((self.folder / "tasks").read_text()),
        )

    async def counted(self) -> Remains:
        """Return what the server holds now, with a fresh count of the tasks."""
        told = self.folder / "tasks"
        told.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR2)
        async with asyncio.timeout(60):
            while not told.exists() or not told.read_text():  # noqa: ASYNC110 -- a file has no event
                await asyncio.sleep(0.05)
        return self.remains()


def _line(status: str, name: str) -> str:
    (value,) = re.findall(rf"^{name}:\s*(\d+)", status, re.MULTILINE)
    return str(value)


def write_keys(path: Path) -> dict[str, str]:
    """Write a file with a key for each of IDS, and return their secrets."""
    secrets = {key_id: new_secret(key_id) for key_id in IDS}
    entries = [
        KeyEntry(
            key_id,
            digest_of(secret),
            roles=frozenset(Role) if key_id == "operator" else frozenset({Role.INFER}),
            revoked=key_id == "revoked",
            expires=datetime(2026, 1, 1, tzinfo=UTC) if key_id == "expired" else None,
            max_parallel_requests=ATTACKER_PARALLEL if key_id == "attacker" else None,
        )
        for key_id, secret in secrets.items()
    ]
    change_keys(path, lambda none: entries)
    return secrets


@contextlib.asynccontextmanager
async def running(folder: Path, arguments: Sequence[str] = ()) -> AsyncIterator[Target]:
    """Run `penstock serve demo` with keys until the block ends; its log is in `folder`."""
    secrets = write_keys(folder / "keys.json")
    log = (folder / "server.log").open("wb")
    command = [
        *(sys.executable, "-m", "tests.storm.serve", str(folder / "tasks"), "serve", "demo"),
        *("--port", "0", "--keys", str(folder / "keys.json"), "--usage", str(folder / "usage.db")),
        *("--stall-limit", "2", "--allow-request-templates", *arguments),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
        found = re.fullmatch(r"penstock: ready on (\S+)\n", line)
        if found is None:
            raise RuntimeError(f"the server did not start: {line!r}; {(folder / 'server.log').read_text()}")
        yield Target(process, found[1], secrets, folder)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
        log.close()


def figures(remains: Remains) -> str:
    return json.dumps({name: getattr(remains, name) for name in Remains.__slots__})
