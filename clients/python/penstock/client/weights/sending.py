"""Sends the messages of an update, or of an adapter, on a stream, sync and async, and shows how much has been
sent. The call ends at once if the server answers before it has all of them, or if a message cannot be made.

grpc.aio forgets how a call ended if a write fails because it has ended: it then says INTERNAL, and the answer
is lost (https://github.com/grpc/grpc/issues/36066). A server may well answer before it has all messages. So
the async call is made as one with a stream of answers, of which exactly one comes: reading it does not depend
on the status. And the status is noted when it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, cast

import grpc
import grpc.aio

from penstock.client.errors import ProtocolError
from penstock.client.weights.update import Progress


class Upload(Protocol):
    """What is sent on a stream, maybe several times."""

    @property
    def title(self) -> str:
        """What a bar says while it is sent."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of all tensors that will be sent."""
        ...

    @property
    def progress(self) -> bool | Progress: ...

    def steps(self, chunk_bytes: int) -> Iterator[tuple[Any, int]]:
        """Yield the messages of the stream, each with how many bytes of tensors are in it."""
        ...


class Tracker:
    """Tells the progress of one attempt at an upload. It may be told from another thread, in turn."""

    def __init__(self, upload: Upload) -> None:
        self._sent = 0
        self._total = upload.num_bytes
        self._told = upload.progress if callable(upload.progress) else None
        shows = upload.progress is True and self._total > 0
        self._bar = _bar(upload.title, self._total) if shows else None

    def add(self, num_bytes: int) -> None:
        """Count bytes that were sent."""
        if not num_bytes:
            return
        self._sent += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        if self._told is not None:
            self._told(self._sent, self._total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(title: str, total: int) -> Any:
    """Make a bar of tqdm on stderr, or None if that is no terminal. Who shows none does not need tqdm."""
    if not sys.stderr.isatty():
        return None
    tqdm = importlib.import_module("tqdm").tqdm
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, leave=False)


ReplyT_co = TypeVar("ReplyT_co", covariant=True)
ReplyT = TypeVar("ReplyT")


class SyncCall(Protocol[ReplyT_co]):
    """A running call of a sync client that sends a stream."""

    def add_done_callback(self, fn: Callable[[object], None]) -> None: ...
    def result(self) -> ReplyT_co: ...
    def cancel(self) -> object: ...


def send(start: Callable[[Iterator[Any]], SyncCall[ReplyT]], upload: Upload, chunk_bytes: int) -> ReplyT:
    """Send one attempt and return the answer. Raises grpc.RpcError, and whatever reading a tensor or the
    caller's progress function raises.

    gRPC asks for the messages in a thread of its own, one when it has sent the one before. What is raised
    there is raised here.
    """
    ended = threading.Event()
    failures: list[BaseException] = []
    with Tracker(upload) as tracker:
        call = start(_fed(upload.steps(chunk_bytes), tracker, failures, ended))
        try:
            call.add_done_callback(lambda _: ended.set())
            ended.wait()
            if failures:
                raise failures[0]
            return call.result()
        finally:
            call.cancel()  # does nothing to a call that has ended


def _fed(
    messages: Iterator[tuple[Any, int]],
    tracker: Tracker,
    failures: list[BaseException],
    ended: threading.Event,
) -> Iterator[Any]:
    """Yield the messages alone. If one cannot be made the stream ends, so without a commit."""
    try:
        for message, num_bytes in messages:
            yield message
            tracker.add(num_bytes)
    except Exception as error:  # noqa: BLE001 - the caller's thread raises it
        failures.append(error)
        ended.set()


Call = grpc.aio.StreamStreamCall[Any, ReplyT]
ValueT = TypeVar("ValueT")

_LOST: Final = "Internal error from Core"
"""What grpc.aio says of a call whose status it has forgotten."""
_STATUS_S: Final = 5.0
"""How long to wait for the status of a call that has ended."""


def start(
    channel: grpc.aio.Channel,
    method: str,
    reply: type[ReplyT],
    timeout: float | None,
    metadata: tuple[tuple[str, str | bytes], ...],
) -> Call[ReplyT]:
    """Start a call of a method such as "penstock.v1.InferenceService/UpdateWeights", which answers with a
    message of the class `reply`.
    """
    made: Any = channel.stream_stream(
        f"/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=cast("Any", reply).FromString,
    )
    return cast("Call[ReplyT]", made(timeout=timeout, metadata=metadata))


async def async_send(call: Call[ReplyT], upload: Upload, chunk_bytes: int) -> ReplyT:
    """Send one attempt and return the answer. Raises grpc.RpcError, and whatever reading a tensor or the
    caller's progress function raises. Tensors are read in a thread, because that may take long.
    """
    ending = _Ending(call)
    reading = asyncio.ensure_future(call.read())
    try:
        await _write(call, upload, chunk_bytes, reading)
        reply = await reading
    except grpc.RpcError:
        raise (await ending.error()) from None
    finally:
        call.cancel()  # does nothing to a call that has ended
        reading.cancel()
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            await reading
    if reply is cast("Any", grpc.aio.EOF):
        raise ProtocolError.local("the server ended the stream without a report")
    return cast("ReplyT", reply)


async def _write(call: Call[Any], upload: Upload, chunk_bytes: int, reading: asyncio.Future[Any]) -> None:
    """Write all messages, or as many as the server wants: when it has answered, writing fails."""
    has_ended = (grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
    messages = upload.steps(chunk_bytes)
    with Tracker(upload) as tracker:
        while not reading.done():
            step: tuple[Any, int] | None = await asyncio.to_thread(next, messages, None)
            try:
                await (call.done_writing() if step is None else call.write(step[0]))
            except has_ended:
                return
            if step is None:
                return
            tracker.add(step[1])


class _Ending:
    """Notes how a call ends."""

    def __init__(self, call: Call[Any]) -> None:
        self._call = call
        self._error: grpc.aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    def _note(self, _: object) -> None:
        """Note how the call ended, each time that grpc.aio sets the status, which it then knows, so that
        nothing waits.
        """
        if self._known.is_set():
            return
        call = self._call
        self._error = grpc.aio.AioRpcError(
            _at_once(call.code()),
            _at_once(call.initial_metadata()),
            _at_once(call.trailing_metadata()),
            _at_once(call.details()),
        )
        if self._error.details() != _LOST:
            self._known.set()

    async def error(self) -> grpc.RpcError:
        """Return the error of a call that has failed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._known.wait(), _STATUS_S)
        assert self._error is not None
        return self._error


def _at_once(coroutine: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        value: ValueT = finished.value
        return value
    raise RuntimeError("a coroutine waits that should not")
