"""The calls that look at a server or change it for everybody: their requests, the pages of a vocabulary, and
the files of a profile.

Values that the wire cannot carry raise InvalidRequest, as the server would answer.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal, get_args

from penstock.client.errors import ProtocolError
from penstock.client.generation.checks import Violations, checked, named, one_of
from penstock.client.generation.options import CHAT_FIELDS, ChatOptions
from penstock.client.generation.receiving import AsyncServerStream, ServerStream
from penstock.client.generation.requests import chat_prompt, given_of
from penstock.client.values.server_values import Profile, Vocabulary
from penstock.v1 import control_pb2, inference_pb2, telemetry_pb2

TraceLevel = Literal["off", "requests", "steps", "detailed"]
"""How much a server traces: nothing; each call and the phases of its request; also the engine's steps; also a
span for each request and step.
"""


def abort_request(
    ids: str | Sequence[str] | None, prefix: str | None, all_requests: bool, reason: str
) -> inference_pb2.AbortRequest:
    """Build an AbortRequest. Raises TypeError unless there is exactly one target, and ValueError for an empty
    prefix, which must not mean everything.
    """
    targets = [
        name
        for name, on in (("ids", ids is not None), ("prefix", prefix is not None), ("all", all_requests))
        if on
    ]
    if len(targets) != 1:
        raise TypeError(
            "give one of ids, prefix and all=True" + (f", not {' and '.join(targets)}" if targets else "")
        )
    if prefix == "":
        raise ValueError("prefix: must not be empty; to abort every request use all=True")
    with checked("reason"):
        request = inference_pb2.AbortRequest(reason=reason)
    with checked("request_ids.ids" if ids is not None else "request_id_prefix"):
        if ids is not None:
            request.request_ids.SetInParent()
            request.request_ids.ids.extend([ids] if isinstance(ids, str) else ids)
        elif prefix is not None:
            request.request_id_prefix = prefix
        else:
            request.all.SetInParent()
    return request


def tokenize_request(
    text: str | None, add_special_tokens: bool | None, chat: ChatOptions
) -> control_pb2.TokenizeRequest:
    """Build a TokenizeRequest of a text or a conversation. Raises TypeError unless exactly one is given."""
    given = given_of(chat, CHAT_FIELDS)
    if (text is None) == ("messages" not in given):
        raise TypeError("give one of text and messages")
    if text is not None and given:
        raise TypeError(f"{next(iter(given))} goes with messages, not with text")
    request = control_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
    if text is not None:
        with checked("text"):
            request.text = text
    else:
        request.chat.CopyFrom(chat_prompt(chat))
    return request


def detokenize_request(
    token_ids: Sequence[int], skip_special_tokens: bool | None
) -> control_pb2.DetokenizeRequest:
    with checked("token_ids"):
        return control_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)


def watch_request(interval: float | None, max_requests: int) -> telemetry_pb2.WatchLoadRequest:
    """Build a WatchLoadRequest; the interval is in seconds."""
    request = telemetry_pb2.WatchLoadRequest()
    violations = Violations()
    with violations.of("interval"), named("interval"):
        if interval is not None:
            request.interval.FromNanoseconds(round(interval * 1e9))
    with violations.of("max_requests"), named("max_requests"):
        request.max_requests = max_requests
    violations.tell()
    return request


def profile_request(
    steps: int | None, max_time: float | None, *, send_files: bool
) -> telemetry_pb2.ProfileRequest:
    """Build a ProfileRequest; the time is in seconds."""
    request = telemetry_pb2.ProfileRequest(include_data=send_files)
    violations = Violations()
    with violations.of("steps"), named("steps"):
        if steps is not None:
            request.steps = steps
    with violations.of("timeout"), named("max_time"):
        if max_time is not None:
            request.timeout.FromNanoseconds(round(max_time * 1e9))
    violations.tell()
    return request


def tracing_request(level: TraceLevel | None) -> telemetry_pb2.SetTracingRequest:
    request = telemetry_pb2.SetTracingRequest()
    if level is not None:
        with checked("level"):
            name = one_of(level, get_args(TraceLevel))
        request.level = telemetry_pb2.TraceLevel.Value(f"TRACE_LEVEL_{name}")
    return request


class VocabularyPages:
    """The pages so far, and which one comes next."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []
        self._special: list[int] = []
        self._last: control_pb2.GetVocabularyResponse | None = None

    def next_request(self) -> control_pb2.GetVocabularyRequest | None:
        """Return what to ask for; None where all pages are here."""
        if self._last is not None and not self._last.HasField("next_token_id"):
            return None
        return control_pb2.GetVocabularyRequest(first_token_id=len(self._tokens))

    def add(self, page: control_pb2.GetVocabularyResponse) -> None:
        """Take the page that was asked for. Raises ProtocolError if it does not follow the one before it, as
        when another server has taken the place of the first one meanwhile.
        """
        before = self._last or page
        self._tokens += page.tokens
        end = len(self._tokens)
        expected = page.next_token_id if page.HasField("next_token_id") else page.vocab_size
        if not page.tokens or end != expected or page.vocab_size != before.vocab_size:
            raise ProtocolError.local(
                f"the pages of the vocabulary do not join: {end} tokens, then {expected}"
            )
        self._special += page.special_token_ids
        self._last = page

    def joined(self) -> Vocabulary:
        """Return the whole vocabulary, once all pages are here."""
        assert self._last is not None, "there is at least one page"
        return Vocabulary(
            tokens=tuple(self._tokens),
            special_token_ids=frozenset(self._special),
            is_exact=self._last.is_exact,
            dropped_leading_spaces=self._last.dropped_leading_spaces,
        )


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
    """Do the same as `received`. Files are written in threads."""
    async with messages:
        with tempfile.TemporaryFile() as file:
            answer = await asyncio.to_thread(_Answer, file, folder)
            async for message in messages:
                await asyncio.to_thread(answer.take, message)
            return await asyncio.to_thread(answer.result)


class _Answer:
    """The answer so far, whose chunks are written to a file."""

    def __init__(self, file: IO[bytes], folder: Folder | None) -> None:
        """Raise OSError if `folder` cannot be made."""
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
