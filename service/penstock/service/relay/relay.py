"""In a front process: carries each call between gRPC and the link.

It decides nothing. A message is received from the client only when the engine's process asks for one, and the
engine's process hears that a message was sent only when gRPC asks for more. So who is admitted, and how long
a message may take either way, is decided in the engine's process as if gRPC ran there.

The engine's process hears of a call once the link has room for it. Peers that begin and cancel calls faster
than the engine's process can hear of them would fill the memory otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from penstock.service.relay.link import Kind, Link, Opening, Status
from penstock.service.rpcs.ending import Ender

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
IDENTITY_KEYS = ("x509_common_name", "x509_subject_alternative_name")
"""What `listening.tls.certificate_names` reads of a client's verified certificate."""
_LAST_TURNS = 100
"""How many turns of the event loop the tasks of the last calls have to end."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Relay:
    """All calls of one front process. Used on its event loop only."""

    def __init__(self, link: Link, *, max_calls: int, tells_identity: bool) -> None:
        """`tells_identity`: whether clients have verified certificates."""
        self._link = link
        self._max_calls = max_calls
        self._tells_identity = tells_identity
        self._calls: dict[int, _Call] = {}
        self._num_begun = 0
        self._num_refusing = 0
        self._ender = Ender()
        self._turns = asyncio.Lock()
        """Held by the call that is the next one to open."""

    def handler(self, method: str, *, streaming: bool) -> grpc.RpcMethodHandler[Any, Any]:
        """Make the handler of a method. `streaming`: whether it answers with a stream."""

        async def handle(_: AsyncIterator[bytes], context: Context) -> bytes | None:
            return await self._carry(method, context, streaming=streaming)

        if streaming:
            return grpc.stream_stream_rpc_method_handler(handle)
        return grpc.stream_unary_rpc_method_handler(handle)

    async def refuse(self, context: Context) -> None:
        """Carry a call of a method that the server does not have, which the engine's process refuses."""
        await self._carry("", context, streaming=True)

    async def _carry(self, method: str, context: Context, *, streaming: bool) -> bytes | None:
        task = asyncio.current_task()
        assert task is not None, "gRPC calls handlers in a task"
        if len(self._calls) >= self._max_calls:
            await self._turn_away(context, task)
        self._num_begun += 1
        number = self._num_begun
        call = self._calls[number] = _Call(self._link, number, context)
        task.add_done_callback(lambda _: self._end(number))
        async with self._turns:  # after those that came earlier
            await self._link.room()
        left_s: float | None = context.time_remaining()  # None, whatever the hint says, without a deadline
        metadata: Any = context.invocation_metadata() or ()
        identity: dict[str, list[bytes]] = {}
        if self._tells_identity:
            found: Any = context.auth_context()
            identity = {key: list(found[key]) for key in IDENTITY_KEYS if key in found}
        opening = Opening(
            method,
            context.peer(),
            None if left_s is None else time.time() + left_s,
            tuple((key, value) for key, value in metadata),
            identity,
        )
        self._link.send(Kind.OPEN, number, opening.packed())
        call.is_open = True
        status = await call.until_finished()
        if status.code or streaming:
            await call.answer(status)
            return None
        return status.reply

    async def _turn_away(self, context: Context, task: asyncio.Task[Any]) -> None:
        """End a call that is one too many: with a status, unless too many of those are on their way already.
        Always raises.
        """
        if self._num_refusing >= self._max_calls:
            self._ender.end(task)
            await asyncio.Event().wait()  # waits until the task is cancelled
        self._num_refusing += 1
        try:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls are under way")
        finally:
            self._num_refusing -= 1

    def _end(self, number: int) -> None:
        """Note that gRPC has ended the call: its status has left, or its client is gone."""
        call = self._calls.pop(number)
        call.close()
        if call.is_open:
            self._link.send(Kind.ENDED, number)

    async def until_idle(self) -> None:
        """Wait until the tasks of the last calls have ended, once gRPC has ended all calls."""
        for _ in range(_LAST_TURNS):
            if not self._calls:
                return
            await asyncio.sleep(0)

    def receive(self, kind: int, number: int, payload: bytes) -> None:
        """Take a frame about a call. Calls that have ended here already are left alone."""
        call = self._calls.get(number)
        if call is None:
            return
        if kind == Kind.READ:
            call.read()
        elif kind == Kind.DROP:
            self._ender.end(call.task)
        else:
            call.take(kind, payload)


class _Call:
    """One call."""

    def __init__(self, link: Link, number: int, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None, "gRPC calls handlers in a task"
        self.task: asyncio.Task[Any] = task
        self._link, self._number, self._context = link, number, context
        self._orders: deque[tuple[int, bytes]] = deque()
        """What the engine's process wants sent and gRPC has not been given yet."""
        self._ordered: asyncio.Future[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self.is_open = False
        """Whether the engine's process has been told of the call."""

    def take(self, kind: int, payload: bytes) -> None:
        """Take what is to be sent: INITIAL, MESSAGE or FINISH."""
        self._orders.append((kind, payload))
        if self._ordered is not None and not self._ordered.done():
            self._ordered.set_result(None)

    async def until_finished(self) -> Status:
        """Send what the engine's process wants sent, until FINISH, and return the status in that."""
        context, loop = self._context, asyncio.get_running_loop()
        while True:
            while not self._orders:
                self._ordered = loop.create_future()
                await self._ordered
            kind, payload = self._orders.popleft()
            if kind == Kind.FINISH:
                return Status.of(payload)
            if kind == Kind.INITIAL:
                await context.send_initial_metadata(())
            else:
                await context.write(payload)
            del payload
            self._link.send(Kind.SENT, self._number)

    async def answer(self, status: Status) -> None:
        """Have gRPC end the call with this status."""
        trailing: Any = status.trailing_metadata
        if status.code:
            await self._context.abort(_CODES[status.code], status.details, trailing)

    def read(self) -> None:
        """Receive the next message of the client, and pass it on."""
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            message: Any = await self._context.read()
        except (grpc.aio.BaseError, asyncio.CancelledError):  # the call has ended
            return
        if message is grpc.aio.EOF:
            self._link.send(Kind.NO_MESSAGE, self._number)
        else:
            self._link.send(Kind.MESSAGE, self._number, message)

    def close(self) -> None:
        """Let go of the call, which gRPC's core would otherwise keep."""
        if self._reading is not None:
            self._reading.cancel()
