"""Runs the batches of a folder, in one worker of a front.

A worker looks at the folder every second. It runs a batch that no other worker holds, if it knows the key
that the batch needs. Keys are in memory only: after a restart, a batch whose caller has a key waits until the
caller asks for any of its batches. A batch that was running goes on where its answers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from typing import IO, Any, Final

from starlette.types import ASGIApp

from penstock.client import PenstockClientError
from penstock.openai.backend import Backend
from penstock.openai.batches.lines import (
    Counts,
    Ids,
    Line,
    Problem,
    Terms,
    WrongLine,
    WrongOutput,
    check,
    cut_off,
    pending,
    take_in,
)
from penstock.openai.batches.running import KEY_REFUSED, Done, NotTaken, output_line, run_lines
from penstock.openai.batches.storing import (
    UNFINISHED,
    WINDOW_S,
    Folder,
    FolderFull,
    Growing,
    Status,
    StoredBatch,
    Unfinished,
    to_its_end,
)
from penstock.openai.calls import make_call
from penstock.openai.failures import of_client_error
from penstock.openai.jsonbytes import json_bytes
from penstock.openai.settings import Settings, SettingsError

log = logging.getLogger("penstock.openai")

LOOK_S: Final = 1.0
"""How often a worker looks for batches to run, and for wishes to cancel those that it runs, in seconds."""
SWEEP_S: Final = 600.0
"""How often it looks for what is to be removed, in seconds."""
MOST_RUNNING: Final = 4
"""How many batches run in one worker at a time, each of another caller."""
MOST_LINES: Final = 50_000
"""How many lines a batch may have, as in OpenAI's API."""
_PAUSE_S: Final = 5.0
_EXPIRED: Final = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def opened_folder(settings: Settings) -> Folder | None:
    """Open the folder of files that the settings name, if they do. Raises SettingsError."""
    if settings.files is None:
        return None
    try:
        return Folder(settings.files, settings.files_max_bytes, settings.files_days)
    except OSError as error:
        raise SettingsError(f"files: {settings.files}: {error.strerror or error}") from None
    except ValueError as error:
        raise SettingsError(f"files: {settings.files} {error}") from None


class BatchRunner:
    """Runs the batches of a folder. Used on one event loop."""

    def __init__(self, folder: Folder, backend: Backend, settings: Settings) -> None:
        self.folder = folder
        self._backend = backend
        self._settings = settings
        self._keys: dict[str, str] = {}
        """From callers with batches that have not ended to what they sent as `authorization`."""
        self._just_told: set[str] = set()
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """By batch, its caller and what runs it."""
        self._woken = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Begin to run batches, whose lines are requests to this app."""
        self._keeping = asyncio.create_task(self._keep(app), name="penstock-batches")

    async def stop(self) -> None:
        """Stop. Batches that run go on when a worker starts again, or another one takes them."""
        tasks = [task for _, task in self._running.values()]
        if self._keeping is not None:
            tasks.append(self._keeping)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Look at the folder at once."""
        self._woken.set()

    def remember(self, caller: str, key: str) -> None:
        """Keep the key of a caller who may have batches that have not ended."""
        if key and self._keys.get(caller) != key:
            self._keys[caller] = key
            self._just_told.add(caller)
            self.wake()

    async def _keep(self, app: ASGIApp) -> None:
        loop, swept_at = asyncio.get_running_loop(), -math.inf
        while True:
            try:
                if loop.time() - swept_at >= SWEEP_S:
                    await asyncio.to_thread(self.folder.sweep)
                    swept_at = loop.time()
                await self._look(app)
            except (OSError, sqlite3.Error):
                log.exception("the folder of files cannot be used")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), LOOK_S)
            self._woken.clear()

    async def _look(self, app: ASGIApp) -> None:
        self._just_told.clear()
        batches = await asyncio.to_thread(self.folder.unfinished)
        # A key is told after its batch was made; what was told meanwhile may be of a batch that is not here.
        needed = {batch.caller for batch in batches} | self._just_told
        self._keys = {caller: key for caller, key in self._keys.items() if caller in needed}
        for batch in batches:
            if batch.id in self._running or not self._may_run(batch):
                continue
            claim = self.folder.claim(batch.id)
            if claim is not None:
                task = asyncio.create_task(self._run(app, batch.id, self._keys.get(batch.caller, "")))
                self._running[batch.id] = batch.caller, task
                task.add_done_callback(functools.partial(self._ended, batch.id, claim))

    def _ended(self, batch_id: str, claim: IO[bytes], _: asyncio.Task[None]) -> None:
        del self._running[batch_id]
        claim.close()

    def _may_run(self, batch: Unfinished) -> bool:
        if self._is_over(batch):
            return True
        is_known = not batch.has_key or batch.caller in self._keys
        callers = {caller for caller, _ in self._running.values()}
        return is_known and batch.caller not in callers and len(callers) < MOST_RUNNING

    def _is_over(self, batch: Unfinished) -> bool:
        """Say whether no line of it shall run."""
        return batch.status == "cancelling" or self.folder.now() >= batch.created_at + WINDOW_S

    async def _run(self, app: ASGIApp, batch_id: str, key: str) -> None:
        batch = await asyncio.to_thread(self.folder.batch, batch_id)
        if batch is None or batch.status not in UNFINISHED:  # since the folder was looked at
            return
        one = _OneBatch(self.folder, batch)
        try:
            await one.see_through(self, app, key)
        except PenstockClientError as error:
            told = of_client_error(error, {})
            if told.status in KEY_REFUSED:
                await one.fail(Problem(None, told.code or "forbidden", told.message))
            else:
                log.warning("batch %s waits: %s", batch_id, told.message)
                await asyncio.sleep(_PAUSE_S)
        except sqlite3.Error:  # such as a full disk
            log.exception("batch %s waits, as the folder of files cannot be used", batch_id)
            await asyncio.sleep(_PAUSE_S)
        except Exception:  # a defect: the batch must not be tried for ever
            log.exception("batch %s failed", batch_id)
            await one.fail(Problem(None, "internal", "internal error"))

    async def terms(self, batch: StoredBatch, key: str, *, is_over: bool) -> Terms:
        """Say what the lines of a batch may be; nothing is asked of the server if none shall run. Raises the
        client's errors.
        """
        model, has_priority = None, False
        if not is_over:
            headers = [(b"authorization", key.encode("latin-1"))] if key else []
            facts = await self._backend.facts(make_call({"headers": headers}, 0), fresh=True)
            model, has_priority = facts.only_model, "priority" in facts.features
        return Terms(
            model=model,
            urls=(batch.endpoint,),
            max_body_bytes=self._settings.max_body_bytes,
            has_priority=has_priority,
            max_lines=MOST_LINES,
        )

    @property
    def concurrency(self) -> int:
        """How many lines of a batch run at a time."""
        return self._settings.batch_concurrency


def _error(problem: Problem) -> dict[str, Any]:
    return {
        "code": problem.code,
        "message": problem.message,
        "line": problem.line,
        "param": problem.param,
    }


class _OneBatch:
    """A batch that this worker holds."""

    def __init__(self, folder: Folder, batch: StoredBatch) -> None:
        self._folder = folder
        self._batch = batch
        self._counts = Counts(batch.completed, batch.failed)

    async def see_through(self, runner: BatchRunner, app: ASGIApp, key: str) -> None:
        """Bring the batch to its end. If that is cancelled, it can be taken up again. Raises the client's
        errors if the server does not say what lines may be.
        """
        over = self._over()
        if over and not self._batch.output_file:
            await asyncio.to_thread(self._folder.move, self._batch.id, over, of=UNFINISHED)
            return
        terms = await runner.terms(self._batch, key, is_over=over is not None)
        path = self._folder.content_of(self._batch.input_file)
        with Ids() as ids:
            try:
                found = await to_its_end(check, path, terms, ids)
                if not self._batch.output_file and not found.problems:
                    begun = await asyncio.to_thread(self._folder.begin_to_run, self._batch, found.total)
                    if begun is None:
                        return  # it was cancelled meanwhile, and is looked at again
                    self._batch = begun
                problems = found.problems
            except (FolderFull, OSError) as error:
                problems = [_storing_problem(error)]
            if problems:
                await self.fail(*problems)
                return
            with (
                Growing(self._folder, self._batch.output_file) as output,
                Growing(self._folder, self._batch.error_file) as errors,
            ):
                end: Status = "failed"
                lines = functools.partial(pending, path, terms, ids)
                try:
                    await to_its_end(self._take_in, ids, output, errors)
                    end = over or await self._answered(runner, app, key, lines(), ids, output, errors)
                    if end == "expired":
                        await to_its_end(self._write_expired, lines(), errors)
                except NotTaken as error:
                    end, problems = "failed", [Problem(None, error.code or "forbidden", error.message)]
                except (FolderFull, OSError, WrongLine, WrongOutput) as error:
                    end, problems = "failed", [_storing_problem(error)]
                await to_its_end(self._finish, end, problems, output, errors)

    async def fail(self, *problems: Problem) -> None:
        """End the batch, which cannot go on. It keeps the answers that it has."""
        await to_its_end(self._fail, problems)

    def _fail(self, problems: Sequence[Problem]) -> None:
        folder, batch = self._folder, self._batch
        if batch.output_file:
            try:
                with (
                    Growing(folder, batch.output_file) as output,
                    Growing(folder, batch.error_file) as errors,
                ):
                    self._counts = Counts(cut_off(output.content), cut_off(errors.content))
                    self._finish("failed", problems, output, errors)
                    return
            except OSError as error:
                log.error("the answers of batch %s are lost: %s", batch.id, error)
        told = [_error(problem) for problem in problems]
        folder.move(batch.id, "failed", of=UNFINISHED, errors=told, files=("", ""))

    def _over(self) -> Status | None:
        """Return the status in which the batch ends at once, if no line of it shall run."""
        if self._batch.status == "cancelling":
            return "cancelled"
        return "expired" if self._folder.now() >= self._batch.expires_at else None

    def _take_in(self, ids: Ids, *files: Growing) -> None:
        self._counts = Counts()
        for file in files:
            take_in(file.content, ids, self._counts)

    async def _answered(
        self,
        runner: BatchRunner,
        app: ASGIApp,
        key: str,
        lines: Generator[Line, None, None],
        ids: Ids,
        output: Growing,
        errors: Growing,
    ) -> Status:
        """Run lines until all have answers or none shall run any more. Returns how the batch ends."""

        def write_now(done: Done) -> None:
            (output if done.is_ok else errors).write(done.written())
            ids.note_done(done.line.custom_id)
            self._counts.add(is_ok=done.is_ok)

        async def write(done: Done) -> None:
            await to_its_end(write_now, done)

        running = run_lines(app, lines, write, key=key, concurrency=runner.concurrency, patience_s=math.inf)
        work = asyncio.create_task(running)
        try:
            while True:
                await asyncio.wait((work,), timeout=LOOK_S)
                if work.done():
                    work.result()
                    return "completed"
                counts = self._counts
                status = await asyncio.to_thread(
                    self._folder.count, self._batch.id, counts.completed, counts.failed
                )
                if status == "cancelling":
                    return "cancelled"
                if self._folder.now() >= self._batch.expires_at:
                    return "expired"
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _write_expired(self, lines: Iterator[Line], errors: Growing) -> None:
        for line in lines:
            errors.write(output_line(line.custom_id, b"null", json_bytes(_EXPIRED)))
            self._counts.add(is_ok=False)

    def _finish(self, end: Status, problems: Sequence[Problem], output: Growing, errors: Growing) -> None:
        folder, batch = self._folder, self._batch
        if end == "completed" and not folder.move(batch.id, "finalizing", of=("in_progress", "finalizing")):
            end = "cancelled"
        folder.count(batch.id, self._counts.completed, self._counts.failed)
        made = [file.id if file.finish(batch.output_s) else "" for file in (output, errors)]
        told = [_error(problem) for problem in problems]
        folder.move(batch.id, end, of=UNFINISHED, errors=told, files=(made[0], made[1]))


def _storing_problem(error: Exception) -> Problem:
    if isinstance(error, FolderFull):
        return Problem(None, "files_full", "there is no room for the answers; delete files")
    log.error("a batch cannot be read or written: %s", error)
    return Problem(None, "files_failed", "the front could not read or write a file of the batch")
