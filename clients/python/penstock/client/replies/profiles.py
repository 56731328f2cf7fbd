"""Takes the answer to Profile, and unpacks the files that come with it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from penstock.client.errors import ProtocolError
from penstock.client.replies.server_streams import AsyncServerStream, ServerStream
from penstock.client.values.server_values import Profile
from penstock.v1 import telemetry_pb2

Message = telemetry_pb2.ProfileResponse
Folder = str | os.PathLike[str]
_DAMAGED = (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, EOFError)
"""What `zipfile` raises for a file that it cannot read, also for one that is encrypted, packed by another
method, or has names that are no text.
"""


def received(messages: ServerStream[Message], folder: Folder | None) -> Profile:
    """Read the answer to its end. With `folder` the files are unpacked to a new folder there."""
    with messages, tempfile.TemporaryFile() as file:
        answer = _Answer(file, folder)
        for message in messages:
            answer.take(message)
        return answer.result()


async def received_async(messages: AsyncServerStream[Message], folder: Folder | None) -> Profile:
    """As `received`. Files are written in threads."""
    async with messages:
        with tempfile.TemporaryFile() as file:
            answer = await asyncio.to_thread(_Answer, file, folder)
            async for message in messages:
                await asyncio.to_thread(answer.take, message)
            return await asyncio.to_thread(answer.result)


class _Answer:
    """The answer so far, whose chunks are written to a file."""

    def __init__(self, file: IO[bytes], folder: Folder | None) -> None:
        """OSError if `folder` cannot be made."""
        self._file = file
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._finished: telemetry_pb2.ProfileFinished | None = None

    def take(self, message: Message) -> None:
        kind = message.WhichOneof("event")
        if kind == "finished":
            self._finished = message.finished
        elif kind == "chunk":
            self._file.write(message.chunk.data)

    def result(self) -> Profile:
        if self._finished is None:
            raise ProtocolError.local("the answer ended before the profile was finished")
        done = self._finished
        saved = None if self._folder is None else self._unpack(self._folder, done)
        duration = done.duration.ToNanoseconds() / 1e9
        return Profile(
            path=done.path, steps=done.steps, num_bytes=done.bytes, duration=duration, folder=saved
        )

    def _unpack(self, parent: Path, done: telemetry_pb2.ProfileFinished) -> Path:
        """Unpack the files to a new folder in `parent`, which is returned. OSError if it cannot be written.

        The names are the server's. `zipfile` keeps them below the folder, and no more is written than the
        server has announced.
        """
        self._file.seek(0)
        folder: Path | None = None
        try:
            with zipfile.ZipFile(self._file) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > done.bytes:
                    raise ProtocolError.local("the profile has more bytes than the server announced")
                folder = _new_folder(parent, done.path)
                archive.extractall(folder)
        except _DAMAGED as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise ProtocolError.local(f"the profile's files are damaged: {error}") from error
        return folder


def _new_folder(parent: Path, path: str) -> Path:
    """Make a folder in `parent`, named as the profile at the server if that name can be used and is free."""
    last = re.split(r"[/\\]", path)[-1]
    name = re.sub(r"[^\w.-]", "_", last, flags=re.ASCII)[:100].lstrip(".") or "profile"
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
