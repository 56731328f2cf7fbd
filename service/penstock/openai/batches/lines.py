"""The lines of a batch: reads and checks those of its input, and finds those that have an output already.

Memory does not grow with a file: one line is held at a time, and the custom_ids, of which no two lines may
have the same, are in a temporary database on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from penstock.openai.failures import ApiError
from penstock.openai.jsonbytes import json_bytes
from penstock.openai.reading import json_object
from penstock.openai.schemas.base import Body
from penstock.openai.schemas.chat import ChatBody
from penstock.openai.schemas.completions import CompletionBody, EmbeddingBody
from penstock.openai.schemas.responses import ResponsesBody

URLS: Final[Mapping[str, type[Body]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/responses": ResponsesBody,
}
"""The endpoints that lines may ask for, with what reads their bodies."""
LAST: Final = 2**31 - 1
"""The priority of lines that give none: there is none that is served later. As in vLLM, a lower number is
served first.
"""
MOST_ID: Final = 512
"""How many characters a custom_id may have."""
MOST_PROBLEMS: Final = 20
"""How many problems of a file are told."""
_KEYS: Final = ("custom_id", "method", "url", "body")
_BESIDE_BODY: Final = 8 << 10
"""How many bytes a line may have beside its body."""


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch."""

    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a line cannot be run."""

    line: int | None
    """Counted from 1; None for what is wrong with the whole file."""
    code: str
    message: str
    param: str | None = None

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


class WrongLine(Exception):
    """A line cannot be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the lines of a batch may be."""

    model: str | None
    """The one that is served; None if it does not matter."""
    urls: tuple[str, ...] = tuple(URLS)
    max_body_bytes: int
    has_priority: bool
    """Whether the server schedules by priority: lines that give none are served last then."""
    max_lines: int | None = None


def read_line(data: bytes, terms: Terms) -> Line:
    """Read a line, with the priority that it is run with. Raises WrongLine."""
    try:
        value = json_object(data, "the line")
    except ApiError as error:
        raise WrongLine(error.code or "invalid_json", error.message) from None
    for name in value:
        if name not in _KEYS:
            raise WrongLine("unknown_parameter", f"Unknown parameter: {name[:100]!r}.", name[:100])
    custom_id, url, body = _text(value, "custom_id"), _text(value, "url"), value.get("body")
    if not 1 <= len(custom_id) <= MOST_ID:
        raise WrongLine("invalid_custom_id", f"custom_id must have 1 to {MOST_ID} characters", "custom_id")
    if _text(value, "method") != "POST":
        raise WrongLine("invalid_method", "method must be 'POST'", "method")
    if url not in terms.urls:
        raise WrongLine("invalid_url", f"url must be {' or '.join(terms.urls)}, not {url[:100]!r}", "url")
    if not isinstance(body, dict):
        raise WrongLine("invalid_type", "body must be an object", "body")
    if terms.model is not None and (model := body.get("model")) != terms.model:
        told = f"body.model must be {terms.model!r}, which is served, not {str(model)[:100]!r}"
        raise WrongLine("model_mismatch", told, "body.model")
    if body.get("stream"):
        raise WrongLine("unsupported_value", "body.stream: a batch has no streams", "body.stream")
    if terms.has_priority and body.get("priority") is None and "priority" in URLS[url].model_fields:
        body["priority"] = LAST
    return Line(custom_id, url, json_bytes(body))


def _text(value: Mapping[str, Any], name: str) -> str:
    if name not in value:
        raise WrongLine("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    found = value[name]
    if not isinstance(found, str):
        raise WrongLine("invalid_type", f"{name} must be a string", name)
    return found


def numbered(file: IO[bytes], most: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines of a file with their numbers, without those that are empty. A line of more than `most`
    bytes is None.
    """
    number = 0
    while data := file.readline(most):
        number += 1
        if len(data) == most and not data.endswith(b"\n"):
            while (rest := file.readline(most)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif data.strip():
            yield number, data


class Ids(AbstractContextManager["Ids"]):
    """The custom_ids of a file, and which of them have an output. They are in a temporary database, which
    SQLite moves to the disk when it grows.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for command in (
            "PRAGMA journal_mode = OFF",
            "CREATE TABLE ids (digest BLOB PRIMARY KEY, line INTEGER, done INTEGER DEFAULT 0) WITHOUT ROWID",
        ):
            self._database.execute(command)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def add(self, custom_id: str, line: int) -> int | None:
        """Add the id of a line. Returns the number of the line that has it already, or None."""
        digest = _digest(custom_id)
        added = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, 0)", (digest, line))
        if added.rowcount:
            return None
        found = self._database.execute("SELECT line FROM ids WHERE digest = ?", (digest,)).fetchone()
        return int(found[0])

    def note_done(self, custom_id: str) -> bool | None:
        """Note that the line has an output. Returns whether it had none; None if there is no such line."""
        digest = _digest(custom_id)
        found = self._database.execute("SELECT done FROM ids WHERE digest = ?", (digest,)).fetchone()
        if found is None:
            return None
        self._database.execute("UPDATE ids SET done = 1 WHERE digest = ?", (digest,))
        return not found[0]

    def is_done(self, custom_id: str) -> bool:
        """Say whether the line has an output."""
        found = self._database.execute("SELECT done FROM ids WHERE digest = ?", (_digest(custom_id),))
        return bool((found.fetchone() or (0,))[0])


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode("utf-8", "replace"), digest_size=16).digest()


@dataclass(slots=True)
class Checked:
    """What was found in the input of a batch."""

    total: int = 0
    problems: list[Problem] = field(default_factory=list)
    """The first ones."""
    num_problems: int = 0

    def add(self, problem: Problem) -> None:
        """Add a problem; of many, only the first are kept."""
        self.num_problems += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


def check(path: Path, terms: Terms, ids: Ids) -> Checked:
    """Look at all lines of a file, and note their custom_ids. Raises OSError."""
    found = Checked()
    most = terms.max_body_bytes + _BESIDE_BODY
    with path.open("rb") as file:
        for number, data in numbered(file, most):
            found.total += 1
            if terms.max_lines is not None and found.total > terms.max_lines:
                message = f"a batch may have at most {terms.max_lines} lines"
                found.add(Problem(number, "too_many_lines", message))
                return found
            if data is None:
                found.add(Problem(number, "line_too_long", f"the line has more than {most} bytes"))
                continue
            try:
                line = read_line(data, terms)
            except WrongLine as wrong:
                found.add(Problem(number, wrong.code, wrong.message, wrong.param))
                continue
            if (first := ids.add(line.custom_id, number)) is not None:
                told = f"line {first} has the same custom_id, {line.custom_id[:100]!r}"
                found.add(Problem(number, "duplicate_custom_id", told, "custom_id"))
    if not found.total:
        found.add(Problem(None, "empty_file", "the file has no lines"))
    return found


def pending(path: Path, terms: Terms, ids: Ids) -> Generator[Line, None, None]:
    """Yield the lines of a checked file that have no output. Raises OSError and, if the file was changed
    since it was checked, WrongLine.
    """
    with path.open("rb") as file:
        for number, data in numbered(file, terms.max_body_bytes + _BESIDE_BODY):
            if data is None:
                raise WrongLine("line_too_long", f"line {number} is too long")
            line = read_line(data, terms)
            if not ids.is_done(line.custom_id):
                yield line


@dataclass(slots=True)
class Counts:
    """How many lines have ended, and how."""

    completed: int = 0
    failed: int = 0

    def add(self, *, is_ok: bool) -> None:
        """Count a line."""
        if is_ok:
            self.completed += 1
        else:
            self.failed += 1

    @property
    def ended(self) -> int:
        """How many have an output."""
        return self.completed + self.failed


class WrongOutput(Exception):
    """A file of outputs has something else. The message says what."""


def take_in(file: IO[bytes], ids: Ids, counts: Counts) -> None:
    """Note and count the lines of which this file, which is open for reading and writing, has the output. A
    last line that was not written to its end is cut off. Raises WrongOutput for a line that is none of this
    batch, and OSError.
    """
    file.seek(0)
    whole = 0
    for number, data in enumerate(file, 1):
        if not data.endswith(b"\n"):
            break
        whole += len(data)
        custom_id, is_ok = _output_of(number, data)
        is_new = ids.note_done(custom_id)
        if is_new is None:
            raise WrongOutput(f"line {number} is of {custom_id[:100]!r}, which the input lacks")
        if is_new:
            counts.add(is_ok=is_ok)
    os.truncate(file.fileno(), whole)
    file.seek(0, os.SEEK_END)


def cut_off(file: IO[bytes]) -> int:
    """Cut off a last line that was not written to its end. Returns how many lines there are. Raises
    OSError.
    """
    number, whole = 0, 0
    file.seek(0)
    for data in file:
        if data.endswith(b"\n"):
            number, whole = number + 1, whole + len(data)
    os.truncate(file.fileno(), whole)
    return number


def _output_of(number: int, data: bytes) -> tuple[str, bool]:
    try:
        value = json.loads(data)
        response = value["response"]
        custom_id = value["custom_id"]
        is_ok = response is not None and 200 <= response["status_code"] < 300
    except (ValueError, TypeError, KeyError):
        raise WrongOutput(f"line {number} is no output of a batch") from None
    return str(custom_id), is_ok
