"""The folder with callers' files and batches, which all workers of a front share.

A database of SQLite says what there is; contents are files beside it, named by ids that are made here. All of
it together is bounded. Each file belongs to one caller, for all others there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Final, Literal, ParamSpec, Self, TypeVar

from penstock.openai.callers import secret_of

ParamsT = ParamSpec("ParamsT")
ValueT = TypeVar("ValueT")

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
UNFINISHED: Final[tuple[Status, ...]] = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_S: Final = 24 * 3600
"""How long a batch may take."""
UPLOAD_S: Final = 3600
"""How long an upload may take."""
MOST_UNFINISHED: Final = 100
"""How many batches of a caller may wait or run."""
LEAST_FILE: Final = 4 << 10
BATCH_BYTES: Final = 64 << 10
"""A file counts as so many bytes at least, and a batch as so many beside its files, so that the bound on
bytes bounds their numbers, too.
"""
_GROWTH: Final = 1 << 20
"""So much room is taken at once for a file that grows."""
_VERSION: Final = 2
_DAY_S: Final = 24 * 3600
_BUSY_S: Final = 30.0
"""How long a change waits for those of other workers."""


class FolderFull(Exception):
    """There is no room for more."""


class TooManyBatches(Exception):
    """As many batches of the caller have not ended as may be."""


class FileInUse(Exception):
    """A batch that has not ended reads the file."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, without its content."""

    id: str
    caller: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int
    is_whole: bool
    """False while it is written; callers are not told of it then."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch. Times are in seconds of Unix time."""

    id: str
    caller: str
    has_key: bool
    """Whether it can run only with its caller's key, which is not stored."""
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    """Files that are made for it when it begins to run; empty before."""
    output_s: int
    """How long these are kept, in seconds."""
    status: Status
    created_at: int
    total: int
    completed: int
    failed: int
    metadata: Mapping[str, str] | None
    errors: Sequence[Mapping[str, Any]]
    times: Mapping[str, int]
    """When it came to a status, such as {"completed_at": 1700000000}."""

    @property
    def expires_at(self) -> int:
        """When its window ends."""
        return self.created_at + WINDOW_S


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What tells whether a batch that has not ended may run."""

    id: str
    caller: str
    has_key: bool
    status: Status
    created_at: int


_FILE_COLUMNS: Final = ", ".join(field.name for field in fields(StoredFile))
_BATCH_COLUMNS: Final = ", ".join(field.name for field in fields(StoredBatch))
_UNFINISHED_COLUMNS: Final = ", ".join(field.name for field in fields(Unfinished))
_NUMBER: Final = "number INTEGER PRIMARY KEY AUTOINCREMENT"
"""The order in which they were made."""
_TABLES: Final = (
    f"CREATE TABLE files ({_NUMBER}, {_FILE_COLUMNS}, UNIQUE (id))",
    f"CREATE TABLE batches ({_NUMBER}, {_BATCH_COLUMNS}, UNIQUE (id))",
    "CREATE INDEX files_of ON files (caller, number)",
    "CREATE INDEX batches_of ON batches (caller, number)",
    "CREATE INDEX batches_by_status ON batches (status)",
)
_IS_UNFINISHED: Final = f"status IN ({', '.join(repr(status) for status in UNFINISHED)})"


def _file_of(row: Sequence[Any]) -> StoredFile:
    return StoredFile(*row)


def _batch_of(row: Sequence[Any]) -> StoredBatch:
    *rest, metadata, errors, times = row
    return StoredBatch(*rest, *map(json.loads, (metadata, errors, times)))


class Folder:
    """The folder. Its methods wait for the disk, and may be called from any thread."""

    def __init__(
        self, path: Path, max_bytes: int, days: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the folder, or make it. Files are kept for `days`, and batches for as long after their end.
        `clock` tells seconds of Unix time. Raises OSError, and ValueError for a folder of another version.
        """
        self.max_bytes = max_bytes
        self.keep_s = int(days * _DAY_S)
        self._clock = clock
        self._contents, self._locks = path / "contents", path / "locks"
        for folder in (path, self._contents, self._locks):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._guard = threading.Lock()
        database = path / "files.sqlite"
        os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let others read it
        self._database = sqlite3.connect(
            database, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self.secret = self._prepared()
        except (sqlite3.Error, ValueError) as error:
            self._database.close()
            if isinstance(error, ValueError):
                raise
            raise OSError(f"its database cannot be used: {error}") from None

    def close(self) -> None:
        """Close the database."""
        with self._guard:
            self._database.close()

    def _prepared(self) -> bytes:
        with self._changing() as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise ValueError(f"is of another version of Penstock, {version}")
            if not version:
                for command in _TABLES:
                    database.execute(command)
                database.execute(f"PRAGMA user_version = {_VERSION}")
            return secret_of(database)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:  # whatever ends the change, the lock must not stay
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _rows(self, command: str, *values: Any) -> list[Any]:
        with self._guard:
            return self._database.execute(command, values).fetchall()

    def now(self) -> int:
        """Return the time, in seconds of Unix time."""
        return int(self._clock())

    # -- room --

    def _take_room(self, database: sqlite3.Connection, more: int) -> None:
        (of_files,) = database.execute(
            "SELECT COALESCE(SUM(MAX(bytes, ?)), 0) FROM files", (LEAST_FILE,)
        ).fetchone()
        (batches,) = database.execute("SELECT COUNT(*) FROM batches").fetchone()
        if of_files + batches * BATCH_BYTES + more > self.max_bytes:
            raise FolderFull

    def reserve(self, file_id: str, size: int) -> None:
        """Count a file as of this size from now on. Raises FolderFull, and KeyError if it is gone."""
        with self._changing() as database:
            found = database.execute("SELECT bytes FROM files WHERE id = ?", (file_id,)).fetchone()
            if found is None:
                raise KeyError(file_id)
            self._take_room(database, max(size, LEAST_FILE) - max(found[0], LEAST_FILE))
            database.execute("UPDATE files SET bytes = ? WHERE id = ?", (size, file_id))

    # -- files --

    def content_of(self, file_id: str) -> Path:
        """Tell where the content of a file is."""
        return self._contents / file_id

    def begin_file(self, caller: str, purpose: str, filename: str) -> str:
        """Make a file that is to be written, of which callers are not told yet. Returns its id. Raises
        FolderFull.
        """
        with self._changing() as database:
            return self._begin_file(database, caller, purpose, filename)

    def _begin_file(self, database: sqlite3.Connection, caller: str, purpose: str, filename: str) -> str:
        self._take_room(database, LEAST_FILE)
        made = StoredFile(f"file-{uuid.uuid4().hex}", caller, purpose, filename, 0, self.now(), 0, False)
        _insert(database, "files", made)
        return made.id

    def finish_file(
        self, file_id: str, size: int, keep_s: int | None = None, filename: str | None = None
    ) -> bool:
        """Tell callers of a file that is written. It is kept for `keep_s` seconds, or as long as the folder
        keeps files. A `filename` takes the place of that which it has. A file of no bytes is removed instead.
        Returns whether there is one.
        """
        if not size:
            self._remove([file_id])
            return False
        until = self.now() + min(self.keep_s, self.keep_s if keep_s is None else keep_s)
        with self._changing() as database:
            database.execute(
                "UPDATE files SET bytes = ?, expires_at = ?, filename = COALESCE(?, filename), is_whole = 1"
                " WHERE id = ? AND NOT is_whole",
                (size, until, filename, file_id),
            )
        return True

    def file(self, caller: str, file_id: str) -> StoredFile | None:
        """Find a file of the caller."""
        command = (
            f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND caller = ? AND is_whole AND expires_at > ?"
        )
        rows = self._rows(command, file_id, caller, self.now())
        return _file_of(rows[0]) if rows else None

    def files(
        self, caller: str, *, purpose: str | None, after: str | None, limit: int, is_ascending: bool
    ) -> tuple[list[StoredFile], bool]:
        """List some files of the caller, and say whether there are more. `purpose` leaves others out. Raises
        KeyError if there is no file `after`.
        """
        where, values = "caller = ? AND is_whole AND expires_at > ?", [caller, self.now()]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        rows, more = self._page("files", _FILE_COLUMNS, where, values, caller, after, limit, is_ascending)
        return [_file_of(row) for row in rows], more

    def _page(
        self,
        table: str,
        columns: str,
        where: str,
        values: list[Any],
        caller: str,
        after: str | None,
        limit: int,
        is_ascending: bool,
    ) -> tuple[list[Any], bool]:
        if after is not None:
            found = self._rows(f"SELECT number FROM {table} WHERE id = ? AND caller = ?", after, caller)
            if not found:
                raise KeyError(after)
            where, values = f"{where} AND number {'>' if is_ascending else '<'} ?", [*values, found[0][0]]
        order = "ASC" if is_ascending else "DESC"
        command = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
        rows = self._rows(command, *values, limit + 1)
        return rows[:limit], len(rows) > limit

    def delete_file(self, caller: str, file_id: str) -> bool:
        """Remove a file of the caller. Returns whether there was one. Raises FileInUse."""
        if self.file(caller, file_id) is None:
            return False
        in_use = f"SELECT 1 FROM batches WHERE input_file = ? AND {_IS_UNFINISHED}"
        if self._rows(in_use, file_id):
            raise FileInUse
        self._remove([file_id])
        return True

    def drop_file(self, file_id: str) -> None:
        """Remove a file that was not written to its end."""
        self._remove([file_id])

    def _remove(self, file_ids: Collection[str]) -> None:
        with self._changing() as database:
            database.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in file_ids])
        for file_id in file_ids:
            self.content_of(file_id).unlink(missing_ok=True)

    # -- batches --

    def begin_batch(
        self,
        caller: str,
        has_key: bool,
        endpoint: str,
        input_file: str,
        metadata: Mapping[str, str] | None,
        output_s: int | None,
    ) -> StoredBatch:
        """Make a batch, which waits to be run. Raises FolderFull and TooManyBatches."""
        made = StoredBatch(
            *(f"batch_{uuid.uuid4().hex}", caller, has_key, endpoint, input_file, "", ""),
            output_s=min(self.keep_s, self.keep_s if output_s is None else output_s),
            status="validating",
            created_at=self.now(),
            total=0,
            completed=0,
            failed=0,
            metadata=metadata,
            errors=(),
            times={},
        )
        of_caller = f"SELECT COUNT(*) FROM batches WHERE caller = ? AND {_IS_UNFINISHED}"
        with self._changing() as database:
            if database.execute(of_caller, (caller,)).fetchone()[0] >= MOST_UNFINISHED:
                raise TooManyBatches
            self._take_room(database, BATCH_BYTES)
            _insert(database, "batches", made)
        return made

    def batch(self, batch_id: str, caller: str | None = None) -> StoredBatch | None:
        """Find a batch; with a `caller`, only if it is one of that caller's."""
        rows = self._rows(f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ?", batch_id)
        found = _batch_of(rows[0]) if rows else None
        return found if found is not None and caller in (None, found.caller) else None

    def batches(self, caller: str, after: str | None, limit: int) -> tuple[list[StoredBatch], bool]:
        """List some batches of the caller, the newest first, and say whether there are more. Raises KeyError
        if there is no batch `after`.
        """
        rows, more = self._page(
            "batches", _BATCH_COLUMNS, "caller = ?", [caller], caller, after, limit, is_ascending=False
        )
        return [_batch_of(row) for row in rows], more

    def unfinished(self) -> list[Unfinished]:
        """List all batches that have not ended, the oldest first."""
        rows = self._rows(f"SELECT {_UNFINISHED_COLUMNS} FROM batches WHERE {_IS_UNFINISHED} ORDER BY number")
        return [Unfinished(*row) for row in rows]

    def move(
        self,
        batch_id: str,
        status: Status,
        *,
        of: Collection[Status],
        errors: Sequence[Mapping[str, Any]] = (),
        files: tuple[str, str] | None = None,
    ) -> bool:
        """Give a batch another status, if it has one of these. Returns whether it had. `files` are then its
        files of answers and of errors; empty for none.
        """
        with self._changing() as database:
            row = database.execute("SELECT status, times FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None or row[0] not in of:
                return False
            times = json.dumps(json.loads(row[1]) | {f"{status}_at": self.now()})
            database.execute(
                "UPDATE batches SET status = ?, times = ?, errors = ? WHERE id = ?",
                (status, times, json.dumps(errors), batch_id),
            )
            if files is not None:
                database.execute(
                    "UPDATE batches SET output_file = ?, error_file = ? WHERE id = ?", (*files, batch_id)
                )
        return True

    def begin_to_run(self, batch: StoredBatch, total: int) -> StoredBatch | None:
        """Give a batch whose lines are right the files for its answers. Returns it as it is then; None if it
        does not wait any more. Raises FolderFull.
        """
        with self._changing() as database:
            made = [
                self._begin_file(database, batch.caller, "batch_output", f"{batch.id}_{name}.jsonl")
                for name in ("output", "error")
            ]
            times = json.dumps(dict(batch.times) | {"in_progress_at": self.now()})
            changed = database.execute(
                "UPDATE batches SET status = 'in_progress', total = ?, output_file = ?, error_file = ?,"
                " times = ? WHERE id = ? AND status = 'validating'",
                (total, *made, times, batch.id),
            )
            if not changed.rowcount:
                database.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in made])
        return self.batch(batch.id) if changed.rowcount else None

    def count(self, batch_id: str, completed: int, failed: int) -> Status | None:
        """Note how many lines have answers, and return the batch's status; None if there is none."""
        with self._changing() as database:
            database.execute(
                "UPDATE batches SET completed = ?, failed = ? WHERE id = ?", (completed, failed, batch_id)
            )
            row = database.execute("SELECT status FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return None if row is None else row[0]

    def claim(self, batch_id: str) -> IO[bytes] | None:
        """Hold a batch, which one worker at a time can, until what is returned is closed; None if another one
        holds it. The system gives it up when the process ends, however it ends.
        """
        descriptor = os.open(self._locks / batch_id, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return os.fdopen(descriptor, "r+b")

    def sweep(self) -> None:
        """Remove files whose time is over, batches that ended long ago, and what killed workers left."""
        now = self.now()
        old = self._rows(
            "SELECT id FROM files WHERE is_whole AND expires_at <= ? AND id NOT IN"
            f" (SELECT input_file FROM batches WHERE {_IS_UNFINISHED})"
            " UNION SELECT id FROM files WHERE NOT is_whole AND created_at < ? AND id NOT IN"
            f" (SELECT output_file FROM batches WHERE {_IS_UNFINISHED}"
            f" UNION SELECT error_file FROM batches WHERE {_IS_UNFINISHED})",
            now,
            now - 2 * UPLOAD_S,
        )
        self._remove([row[0] for row in old])
        with self._changing() as database:
            database.execute(
                f"DELETE FROM batches WHERE NOT ({_IS_UNFINISHED})"
                " AND (SELECT MAX(value) FROM json_each(times)) + ? < ?",  # the last is that of its end
                (self.keep_s, now),
            )
        for folder, kept in (
            (self._contents, "SELECT id FROM files"),
            (self._locks, f"SELECT id FROM batches WHERE {_IS_UNFINISHED}"),
        ):
            there = list(folder.iterdir())  # before the question: what is made meanwhile is not looked at
            known = {row[0] for row in self._rows(kept)}
            for path in there:
                if path.name not in known:
                    path.unlink(missing_ok=True)


def _insert(database: sqlite3.Connection, table: str, made: StoredFile | StoredBatch) -> None:
    columns = [field.name for field in fields(made)]
    values = [getattr(made, name) for name in columns]
    written = [
        json.dumps(value) if name in ("metadata", "errors", "times") else value
        for name, value in zip(columns, values, strict=True)
    ]
    places = ", ".join("?" * len(columns))
    database.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})", written)


async def to_its_end(
    function: Callable[ParamsT, ValueT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
) -> ValueT:
    """Call the function in a thread, which nothing can stop, and wait until it has returned, also if the
    waiting is cancelled meanwhile: what comes next must not run beside it.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return work.result()
    if not work.cancelled():
        work.exception()  # nobody asks for it any more
    raise cancelled


class Growing:
    """The content of a file that is written, within the folder's bound. It waits for the disk."""

    def __init__(self, folder: Folder, file_id: str) -> None:
        """Open the content, which may be there in part. Raises OSError."""
        self.id = file_id
        self._folder = folder
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self.content: IO[bytes] = os.fdopen(os.open(folder.content_of(file_id), flags, 0o600), "r+b")
        """For reading, and for cutting off its end."""
        self._room = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.content.close()

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return os.fstat(self.content.fileno()).st_size

    def write(self, data: bytes) -> None:
        """Add to the end all or nothing. Raises FolderFull, KeyError if the file was removed, ValueError if
        it was closed, and OSError.
        """
        size = self.size
        if size + len(data) > self._room:
            try:
                self._reserve(size + max(len(data), _GROWTH))
            except FolderFull:
                self._reserve(size + len(data))
        descriptor = self.content.fileno()  # not earlier: closed meanwhile, the number may be another file's
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.truncate(descriptor, size)
            raise

    def _reserve(self, size: int) -> None:
        self._folder.reserve(self.id, size)
        self._room = size

    def finish(self, keep_s: int | None = None, filename: str | None = None) -> bool:
        """Have all of it on the disk, and tell callers of it, as `Folder.finish_file`."""
        os.fsync(self.content.fileno())
        return self._folder.finish_file(self.id, self.size, keep_s, filename)
