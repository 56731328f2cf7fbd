"""Keeps responses in one SQLite file, which all workers of a front share, within bounds on its bytes and on
their age. A response belongs to the caller who asked for it, and no other caller finds it.

The file is written and read by a thread, so that the event loop waits for no disk. A file that is full,
broken or locked for long fails the request that needs it, and is opened anew for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from penstock.openai.callers import caller_of, secret_of
from penstock.openai.failures import ApiError
from penstock.openai.settings import Settings, SettingsError

ValueT = TypeVar("ValueT")
log = logging.getLogger("penstock.openai")

_VERSION: Final = 1
"""Of the tables, as `PRAGMA user_version` has it."""
_BUSY_S: Final = 5.0
"""How long a worker waits for another one that writes."""
_WAL_BYTES: Final = 1 << 20
"""What is left of the file beside the store, FILE-wal, once its contents have gone into the store."""
_FEW: Final = 32
"""How many responses leave at most for their age when another one comes."""
_DAY_S: Final = 86400.0
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, kept_at REAL NOT NULL,
    response BLOB NOT NULL, items BLOB NOT NULL, UNIQUE (owner, id)
);
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response, and the conversation that it answers."""

    response: bytes
    """The JSON of the object "response"."""
    items: bytes
    """The JSON of the list of all items that the model was given, also those of earlier responses."""


class ResponseStore:
    """The responses that are kept. It belongs to one event loop."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        """Open the file of `settings.store`. Raises SettingsError if it cannot be used. `clock` tells
        seconds of Unix time.
        """
        assert settings.store is not None, "the settings name a file"
        self._file = settings.store
        self._max_bytes = settings.store_max_bytes
        self._max_age_s = settings.store_days * _DAY_S
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-store")
        self._secret = b""
        self._opened: sqlite3.Connection | None = None
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"store: {self._file} cannot be used: {error}") from error

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """Make the store of these settings; None if they have none. Raises SettingsError."""
        return None if settings.store is None else cls(settings)

    async def keep(self, key: str, response_id: str, kept: Kept) -> None:
        """Keep a response of the caller with this key, in place of one with the same id. Raises ApiError if
        it cannot be kept.
        """

        def write(file: sqlite3.Connection) -> None:
            self._make_room(file, len(kept.response) + len(kept.items))
            file.execute(
                "INSERT OR REPLACE INTO responses (owner, id, kept_at, response, items) VALUES (?,?,?,?,?)",
                (caller_of(key, self._secret), response_id, self._clock(), kept.response, kept.items),
            )

        await self._run(write)

    async def find(self, key: str, response_id: str) -> Kept | None:
        """Find the response of this id that the caller with this key has; None if there is none any more.
        Raises ApiError if the file cannot be read.
        """

        def found(file: sqlite3.Connection) -> Kept | None:
            row = file.execute(
                "SELECT response, items FROM responses WHERE owner = ? AND id = ? AND kept_at >= ?",
                (caller_of(key, self._secret), response_id, self._oldest()),
            ).fetchone()
            return None if row is None else Kept(*row)

        return await self._run(found, "BEGIN")

    async def forget(self, key: str, response_id: str) -> bool:
        """Delete a response of the caller with this key. Returns whether there was one. Raises ApiError if
        the file cannot be written.
        """

        def forgotten(file: sqlite3.Connection) -> bool:
            where = (caller_of(key, self._secret), response_id, self._oldest())
            query = "DELETE FROM responses WHERE owner = ? AND id = ? AND kept_at >= ?"
            return file.execute(query, where).rowcount > 0

        return await self._run(forgotten)

    def close(self) -> None:
        """Wait for what is under way, and close the file."""
        self._thread.shutdown()
        self._shut()

    async def _run(
        self, work: Callable[[sqlite3.Connection], ValueT], begin: str = "BEGIN IMMEDIATE"
    ) -> ValueT:
        """Have the thread do this work. It begins at once as one that writes, or else waits for nobody."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._in_one_piece, work, begin)

    def _in_one_piece(self, work: Callable[[sqlite3.Connection], ValueT], begin: str) -> ValueT:
        """Do the work in a transaction of its own. Raises ApiError if that fails."""
        try:
            file = self._opened or self._open()
            file.execute(begin)
            done = work(file)
            file.execute("COMMIT")
            return done
        except (OSError, sqlite3.Error) as error:
            self._shut()
            log.error("the store of responses has failed: %s", error)
            raise ApiError(
                500, "the store of responses has failed", "server_error", code="store_failed", may_retry=False
            ) from error
        except BaseException:  # whatever it was, closing takes back what was not committed
            self._shut()
            raise

    def _open(self) -> sqlite3.Connection:
        """Open the file, which only its owner may read, and make it if there is none."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        os.chmod(self._file, 0o600)
        file = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(file)
        except BaseException:  # a file that is not ready is kept by nobody, who could close it
            file.close()
            raise
        self._opened = file
        return file

    def _prepare(self, file: sqlite3.Connection) -> None:
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("PRAGMA secure_delete = ON")  # what was deleted is not left in free pages
        file.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        ((version,),) = file.execute("PRAGMA user_version")
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"it was made by another version, {version}")
        file.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
        self._secret = secret_of(file)
        file.execute("DELETE FROM responses WHERE kept_at < ?", (self._oldest(),))

    def _shut(self) -> None:
        """Close the file, which takes back what was not committed."""
        file, self._opened = self._opened, None
        if file is not None:
            with contextlib.suppress(sqlite3.Error):
                file.close()

    def _oldest(self) -> float:
        """Tell when the oldest responses that count were kept."""
        return self._clock() - self._max_age_s

    def _make_room(self, file: sqlite3.Connection, num_bytes: int) -> None:
        """Let old responses leave: those that are too old, and so many that there is room for a new one of
        this size. Raises ApiError if there can be none.
        """
        ((page_bytes,),) = file.execute("PRAGMA page_size")
        needed = num_bytes + 4 * page_bytes  # of its row and its index, and their last pages
        few = f"number IN (SELECT number FROM responses ORDER BY number LIMIT {_FEW})"
        file.execute(f"DELETE FROM responses WHERE {few} AND kept_at < ?", (self._oldest(),))
        first = "DELETE FROM responses WHERE number = (SELECT min(number) FROM responses)"
        while _used_pages(file) * page_bytes + needed > self._max_bytes:
            if file.execute(first).rowcount == 0:
                raise ApiError(
                    413, "the response is larger than the store of responses", code="response_too_large"
                )


def _used_pages(file: sqlite3.Connection) -> int:
    ((pages,),) = file.execute("PRAGMA page_count")
    ((free,),) = file.execute("PRAGMA freelist_count")
    return int(pages) - int(free)
