"""Keeps what every key used in a SQLite file: counts per hour, key, method and outcome.

    ledger = Ledger(Path("usage.db"))
    noted = ledger.record(usage)   # on the event loop; done once the count is on the disk
    ledger.close()                 # writes what is left

One thread writes. It takes everything that came since its last transaction and writes it in one, so many
requests share the wait for the disk. The file is in write-ahead mode with full synchronisation: what was
confirmed survives a crash of the server and of the machine. Counts are sums, so the file grows with hours and
keys and not with requests, and several servers may share one file.

While the file cannot be written no answer waits for it: the counts are kept in memory, and the thread tries
again every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from penstock.runtime.errors import ConfigError
from penstock.service.usage.meter import Outcome, Usage

log = logging.getLogger(__name__)

HOUR_S = 3600
_VERSION = 2
"""The version of the file's tables, in PRAGMA user_version; an empty file has 0. Version 1 has no column for
tokens of the reasoning; it gets one when a server opens it.
"""
_BUSY_S = 5.0
"""Seconds that a transaction waits for the transaction of another server."""
_RETRY_S = 5.0
"""Seconds until counts that could not be written are tried again."""
_RETRY_BUSY_S = 0.1
"""Seconds that such a new try waits for another server. Answers that come meanwhile wait for it."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
  hour INTEGER NOT NULL,
  key TEXT NOT NULL,
  method TEXT NOT NULL,
  outcome TEXT NOT NULL,
  reason TEXT NOT NULL,
  requests INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  cached_prompt_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  reasoning_tokens INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (hour, key, method, outcome, reason)
) WITHOUT ROWID
"""
_UPGRADE = "ALTER TABLE usage ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0"
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (hour, key, method, outcome, reason) DO UPDATE SET
  requests = requests + excluded.requests,
  prompt_tokens = prompt_tokens + excluded.prompt_tokens,
  cached_prompt_tokens = cached_prompt_tokens + excluded.cached_prompt_tokens,
  completion_tokens = completion_tokens + excluded.completion_tokens,
  reasoning_tokens = reasoning_tokens + excluded.reasoning_tokens
"""


class Kind(NamedTuple):
    """Requests with the same kind are counted together."""

    hour: int
    """The start of the hour, in seconds since 1970, UTC."""
    key: str
    """The id of the caller's key; empty on a server without keys."""
    method: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Counts:
    """What the requests of one kind used together."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """How many of the completion's tokens belong to the reasoning."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_prompt_tokens + other.cached_prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


_COLUMNS = (*Kind._fields, *(field.name for field in fields(Counts)))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One request on its way to the file."""

    kind: Kind
    counts: Counts
    noted: asyncio.Future[None] | None
    """Done once the entry is in the file; None if nothing waits for it."""


class Ledger:
    """Records usage in one file; a `penstock.service.usage.UsageSink`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open the file, or make it. Raises ConfigError if it cannot be written, or is another program's."""
        self._path = path
        self._clock = clock
        try:
            with closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
                _refuse_others(path, connection)
            with closing(_open(path, _BUSY_S)) as connection, connection:
                _make_tables(connection)
        except sqlite3.Error as error:
            raise ConfigError(f"usage file {path} cannot be used: {error}") from error
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._gone = False
        self._thread = threading.Thread(target=self._run, name="penstock-ledger", daemon=True)
        self._thread.start()

    def record(self, usage: Usage) -> asyncio.Future[None] | None:
        """Count a request. Only answered requests get a future to wait for; see `UsageSink`."""
        hour = int(self._clock()) // HOUR_S * HOUR_S
        kind = Kind(hour, usage.caller, usage.method, usage.outcome, usage.reason)
        counts = Counts(
            1,
            usage.prompt_tokens,
            usage.cached_prompt_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
        )
        noted = asyncio.get_running_loop().create_future() if usage.outcome is Outcome.ANSWERED else None
        self._entries.put(_Entry(kind, counts, noted))
        if self._gone:
            self._settle_the_rest()
        return noted

    def close(self) -> None:
        """Write what is left; blocks for at most a few seconds. What is recorded afterwards is lost."""
        self._entries.put(None)
        self._thread.join(2 * _BUSY_S)

    def _run(self) -> None:
        """Run the thread."""
        try:
            self._write_until_the_end()
        finally:
            # In this order, because `record` looks at `_gone` after it has put its entry: an entry that this
            # last look misses is settled by `record` itself.
            self._gone = True
            self._settle_the_rest()

    def _write_until_the_end(self) -> None:
        """Write everything that waits in one transaction, again and again. What cannot be written is kept for
        a later one.
        """
        kept: dict[Kind, Counts] = {}
        connection: sqlite3.Connection | None = None
        retry_at: float | None = None  # of time.monotonic; None: the last transaction succeeded
        ended = False
        while not ended:
            batch, ended = self._take(None if retry_at is None else max(retry_at - time.monotonic(), 0.0))
            try:
                for entry in batch:
                    kept[entry.kind] = kept.get(entry.kind, Counts()) + entry.counts
                if ended or retry_at is None or time.monotonic() >= retry_at:
                    patient = ended or retry_at is None
                    connection = connection or _open(self._path, _BUSY_S if patient else _RETRY_BUSY_S)
                    with connection:
                        connection.executemany(_ADD, _rows(kept))
                    kept, retry_at = {}, None
                    if not patient:
                        connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
            except Exception as error:  # without this thread nothing would be counted any more
                requests = sum(counts.requests for counts in kept.values())
                bug = None if isinstance(error, sqlite3.Error) else error
                log.error(
                    "the usage of %d requests could not be written to %s, and is tried again: %s",
                    requests,
                    self._path,
                    error,
                    exc_info=bug,
                )
                retry_at = time.monotonic() + _RETRY_S
                if connection is not None:
                    connection.close()
                    connection = None
            finally:
                # Also if writing failed: an answer matters more to its caller than its entry in the file.
                _settle(batch)
        if connection is not None:
            connection.close()

    def _take(self, timeout_s: float | None) -> tuple[list[_Entry], bool]:
        """Wait for entries, for at most `timeout_s` seconds (None: for ever). Returns them, and whether
        `close` was called.
        """
        batch: list[_Entry] = []
        try:
            entry = self._entries.get(timeout=timeout_s)
            while entry is not None:
                batch.append(entry)
                entry = self._entries.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _settle_the_rest(self) -> None:
        """Let all answers leave that still wait, because the thread has ended."""
        while True:
            batch, ended = self._take(0.0)
            _settle(batch)
            if not batch and not ended:
                return


def _rows(kept: Mapping[Kind, Counts]) -> Iterable[tuple[str | int, ...]]:
    for kind, counts in kept.items():
        yield (
            kind.hour,
            kind.key,
            kind.method,
            kind.outcome.value,
            kind.reason,
            counts.requests,
            counts.prompt_tokens,
            counts.cached_prompt_tokens,
            counts.completion_tokens,
            counts.reasoning_tokens,
        )


def _settle(batch: Iterable[_Entry]) -> None:
    """Let these entries' answers leave, with one call for each event loop (there is only one)."""
    waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for entry in batch:
        if entry.noted is not None:
            waiting.setdefault(entry.noted.get_loop(), []).append(entry.noted)
    for loop, futures in waiting.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_release, futures)


def _release(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # already cancelled if the client is gone
            future.set_result(None)


def _refuse_others(path: Path, connection: sqlite3.Connection) -> None:
    """Raise ConfigError if the file is neither empty nor a ledger. Nothing in it is changed, not even the
    journal mode.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, 1, _VERSION):
        raise ConfigError(
            f"usage file {path}: made by another version of penstock or another program ({version}); "
            "choose another name"
        )
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    own = False
    if "usage" in names:
        columns = connection.execute("SELECT * FROM usage LIMIT 0").description
        own = tuple(name for name, *_ in columns) in (_COLUMNS, _COLUMNS[:-1])
    # Two servers may start at once: then one may find the other's table, while the version is not set yet.
    if names and not (own and (version or names == {"usage"})):
        raise ConfigError(f"usage file {path} is the database of another program; choose another name")


def _make_tables(connection: sqlite3.Connection) -> None:
    """Make the table, or bring that of version 1 up to date, in one transaction: two servers may start at
    once.
    """
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(_SCHEMA)
    if len(connection.execute("SELECT * FROM usage LIMIT 0").description) < len(_COLUMNS):
        connection.execute(_UPGRADE)
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def _open(path: Path, busy_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_s)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def read_usage(path: Path, since: int = 0, until: int = 2**62) -> dict[Kind, Counts]:
    """Read the usage of the hours that start from `since` to before `until`, both in seconds since 1970. A
    server may be writing the file meanwhile. Raises ConfigError if it cannot be read.
    """
    if not path.is_file():
        raise ConfigError(f"there is no usage file {path}; `penstock serve --usage {path}` makes it")
    try:
        with closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)
        ) as file:
            rows = file.execute("SELECT * FROM usage WHERE hour >= ? AND hour < ?", (since, until)).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"usage file {path} cannot be read: {error}") from error
    return {
        Kind(hour, key, method, Outcome(outcome), reason): Counts(*counts)
        for hour, key, method, outcome, reason, *counts in rows
    }
