"""The interceptor around every RPC: it authenticates, admits, receives, has messages decoded, calls the
servicer and maps errors.

Every method is registered with gRPC as one that takes a stream of messages, even if it takes only one. gRPC
calls such a handler when the headers have arrived; it would call the other kind only after it has received
the whole message. So a call that is refused for its headers, or because too much is under way, is refused
before its message is read.

`Access` decides which caller may make which call, from an RPC's headers, before its message is read.

`Incoming` receives the messages of a call that may send many. Messages are decoded here (`decoded`) and not
by gRPC, which answers an undecodable one with an untyped INTERNAL. Here it is INVALID_ARGUMENT, and fields
that protobuf would drop silently are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from penstock.runtime.errors import InvalidRequest, PenstockError, RequestError, UnsupportedFeature, Violation
from penstock.runtime.measuring.registry import Registry
from penstock.service.access.authentication import Authenticator
from penstock.service.access.callers import ANYBODY, CURRENT_CALLER, Caller
from penstock.service.access.keys import Keys
from penstock.service.access.rates import Account
from penstock.service.access.roles import check_model, check_role, rule_of
from penstock.service.errors import MessageTooLarge, StalledReader, row_of, to_status, trailers
from penstock.service.lifecycle.underway import Calls
from penstock.service.limits.admission import PACKAGES, Admission, Receiving, kind_of
from penstock.service.limits.bounds import Bounds
from penstock.service.listening.tls import certificate_names
from penstock.service.options import ServerOptions
from penstock.service.replies.outputs import StallLog
from penstock.service.requests.support import check_known, check_parts
from penstock.service.rpcs.ending import Send, Sends
from penstock.service.telemetry.logs.access_log import AccessLog
from penstock.service.telemetry.logs.refusals import Refusal, RefusalLog, fields_of
from penstock.service.telemetry.metrics.service_meters import UNKNOWN_METHOD, ServiceMeters
from penstock.service.telemetry.tracing.service_spans import (
    CURRENT_RPC,
    RECEIVED_NS,
    UNTRACED,
    RpcTrace,
    Telemetry,
)
from penstock.service.threads.lanes import MESSAGE_BYTES, Lanes
from penstock.service.usage.meter import CURRENT_METER, CallLog, Meter, UsageSink, current_meter

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = "Callable[[Any, Context], Any]"
Serialize: TypeAlias = "Callable[[Any], bytes]"
_OPEN = "grpc.health.v1.Health/"
"""Calls of this service need no key: probes cannot carry one, and learn no more than whether the server is
up.
"""


class Access:
    """Checks the callers of one server. Without an authenticator every caller is ANYBODY."""

    def __init__(
        self,
        authenticator: Authenticator | None = None,
        sink: UsageSink | None = None,
        call_log: CallLog | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._sink = sink
        self._call_log = call_log
        self.served_model: str | None = None
        """The served model's name, once it is known, because keys may be limited to models."""

    def authenticate(self, method: str, context: Context) -> None:
        """Find out who makes this call, and set CURRENT_CALLER and, for an RPC that counts, CURRENT_METER.

        `method` is a name such as "penstock.v1.InferenceService/Generate". Reflection needs a key of any
        role. Raises Unauthenticated, KeyExpired or Forbidden.
        """
        caller = self._caller(method, context)
        # set before the other checks, so that a refusal too is logged for this caller
        CURRENT_CALLER.set(caller)
        if not method.startswith(PACKAGES):
            return
        if rule_of(method).counts:
            meter = Meter(caller, method, self._account(caller), self._sink, self._call_log)
            CURRENT_METER.set(meter)
        self._check(caller, method)

    def still(self, method: str, context: Context) -> Caller:
        """Return the caller of a call that is under way, by the keys that are valid now. For calls without an
        end: a key that was revoked must not see more. Raises Unauthenticated, KeyExpired or Forbidden.
        """
        caller = self._caller(method, context)
        if method.startswith(PACKAGES):
            self._check(caller, method)
        return caller

    def _caller(self, method: str, context: Context) -> Caller:
        if self._authenticator is None or method.startswith(_OPEN):
            return ANYBODY
        metadata = cast("Any", context.invocation_metadata() or ())
        known = self._authenticator.authenticate(metadata)
        return known or self._authenticator.by_certificate(certificate_names(context))

    def _check(self, caller: Caller, method: str) -> None:
        check_role(caller, method)
        if self.served_model is not None:
            check_model(caller, self.served_model)

    def admit(self, method: str) -> Callable[[], None]:
        """Count this call against its caller's rates, if it is an RPC that counts. Call the returned function
        once, when the RPC has ended. Raises RateLimited or Busy.
        """
        account = self._account(CURRENT_CALLER.get()) if rule_of(method).counts else None
        if account is None:
            return _nothing
        account.admit()
        return account.leave

    def _account(self, caller: Caller) -> Account | None:
        return None if self._authenticator is None else self._authenticator.account(caller)


def access_of(keys: Keys | None, sink: UsageSink | None, *, logs_calls: bool) -> Access:
    """Make the checks of a server with these keys, or without any. `logs_calls`: whether it has an access
    log.
    """
    return Access(None if keys is None else keys.authenticator, sink, AccessLog() if logs_calls else None)


def _nothing() -> None:
    pass


M = TypeVar("M", bound=Message)


def decode(parse: Callable[[bytes], M], data: bytes, vocab_size: int = 0) -> M:
    """Parse the request. Raises InvalidRequest if the bytes are no such message, or have too many parts."""
    try:
        check_parts(cast("Descriptor", parse(b"").DESCRIPTOR), data, vocab_size)
        return parse(data)
    except (DecodeError, ValueError) as error:  # ValueError: a string that is not UTF-8
        raise InvalidRequest([Violation("", f"the request cannot be decoded: {error}")]) from error


def decoded(method: str, parse: Any, data: bytes, vocab_size: int = 0) -> tuple[Any, RequestError | None]:
    """Parse the message, and return it with the error that refuses its unknown fields, if it has any and the
    method is ours.
    """
    request = decode(parse, data, vocab_size)
    try:
        if method.startswith(PACKAGES):
            check_known(request, parse, data)
    except RequestError as error:
        return request, error.with_traceback(None)  # the traceback would keep the message's bytes alive
    return request, None


def decoded_whole(method: str, parse: Any, data: bytes) -> Any:
    """Parse the message. Raises the error that refuses its unknown fields, if it has any and the method is
    ours.
    """
    request, refusal = decoded(method, parse, data)
    if refusal is not None:
        raise refusal
    return request


async def all_decoded(method: str, parse: Any, chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Decode each message of a call. They must be small: this is done on the event loop."""
    async for data in chunks:
        yield decoded_whole(method, parse, data)


@dataclass(frozen=True)
class Undecoded:
    """A message as it was received, to be decoded in the thread that works on it."""

    method: str
    parse: Any
    data: bytes

    def decode(self) -> Any:
        """Return the message. It takes the longer the larger it is. Raises InvalidRequest and
        UnsupportedFeature.
        """
        return decoded_whole(self.method, self.parse, self.data)


class Incoming:
    """The messages of a call that sends many, undecoded, to be iterated over once.

    It is no generator, because one that is not read to its end would keep the call alive until a garbage
    collection.
    """

    def __init__(self, method: str, parse: Any, receive: Callable[[], Awaitable[Any]]) -> None:
        """`receive` returns the bytes of the next message, or gRPC's EOF. It raises what refuses the
        message.
        """
        self._method, self._parse, self._receive = method, parse, receive

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Undecoded:
        data = await self._receive()
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return Undecoded(self._method, self._parse, data)


UNKNOWN = "(unknown method)"
"""Stands for an unknown method's name in the log."""


@dataclass(slots=True)
class Rpc:
    """One call and what is known about it so far."""

    method: str
    trace: RpcTrace
    send: Send
    meters: ServiceMeters
    has_place: bool = False
    """Whether the call is counted among those that go on at once."""
    given_id: str = ""
    """The request's id once it is known: the caller's own, or the one made for it."""
    began_s: float = field(default_factory=time.monotonic)

    def end(self, code: grpc.StatusCode, description: str = "") -> None:
        """Record how the call ends."""
        self.trace.end(code, description)
        method = UNKNOWN_METHOD if self.method == UNKNOWN else self.method
        self.meters.call_ended(method, code.name, time.monotonic() - self.began_s)

    @property
    def request_id(self) -> str:
        """The request's id. A call that has none gets one now, so that its error can be found in the log."""
        self.given_id = self.given_id or new_request_id()
        return self.given_id


def new_request_id() -> str:
    """Make an id that no other request has."""
    return uuid.uuid4().hex


def as_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Wrap a serializer so that it returns bytes unchanged: handlers serialize large replies themselves."""
    return lambda reply: reply if isinstance(reply, bytes) else serialize(reply)


class PenstockInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all services of one server."""

    def __init__(
        self,
        telemetry: Telemetry,
        admission: Admission | None = None,
        *,
        access: Access | None = None,
        receiving: Receiving | None = None,
        lanes: Lanes | None = None,
        max_receive_bytes: int = ServerOptions().max_receive_bytes,
        sends: Sends | None = None,
        calls: Calls | None = None,
        vocab_size: Callable[[], int] = lambda: 0,
        meters: ServiceMeters | None = None,
    ) -> None:
        """Take `sends`, which ends RPCs whose replies are not taken. `vocab_size` is asked for each message,
        because it is known only once a model is loaded; it returns 0 until then.
        """
        self._sends = sends or Sends(ServerOptions().stall_limit_s, StallLog())
        self._telemetry = telemetry
        self._admission = admission or Admission(Bounds())
        self._access = access or Access()
        defaults = Bounds()
        self._receiving = receiving or Receiving(defaults.max_receiving_rpcs, defaults.receive_limit_s)
        self._lanes = lanes or Lanes()
        self._calls = calls or Calls()
        self._max_receive_bytes = max_receive_bytes
        self._vocab_size = vocab_size
        self._refusals = RefusalLog()
        self._meters = meters or ServiceMeters(Registry())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Any = await continuation(handler_call_details)
        assert handler is not None, "all other calls go to `refuse_unknown`"
        method = handler_call_details.method.removeprefix("/")
        kind = "stream" if handler.request_streaming else "unary"
        kind += "_stream" if handler.response_streaming else "_unary"
        behaviour: Behaviour = getattr(handler, kind)
        if handler.response_streaming:
            make, handle = grpc.stream_stream_rpc_method_handler, self._many
        else:
            make, handle = grpc.stream_unary_rpc_method_handler, self._one
        serialize = as_bytes(handler.response_serializer)
        streamed = handler.request_streaming
        wrapped = handle(method, handler.request_deserializer, serialize, behaviour, streamed=streamed)
        return make(wrapped, None, serialize)

    def _one(
        self, method: str, parse: Any, serialize: Serialize, behaviour: Behaviour, *, streamed: bool
    ) -> Behaviour:
        """Make the handler of a method with a single reply. If it takes many messages (`streamed`), it gets
        them undecoded.
        """

        async def handle(chunks: AsyncIterator[bytes], context: Context) -> Any:
            rpc = self._start(method)
            try:
                self._enter(rpc, context)
                if streamed:
                    receive = partial(self._receive_bytes, rpc, context)
                    reply = await behaviour(Incoming(method, parse, receive), context)
                else:
                    reply = await behaviour(await self._receive(rpc, parse, context), context)
                data = serialize(reply)
                await current_meter().answered()
            except BaseException as error:  # noqa: BLE001 -- any error ends the span; `_fail` always raises
                await self._fail(error, rpc, context)
            rpc.end(grpc.StatusCode.OK)
            rpc.send.begin(len(data))
            return data

        return handle

    def _many(
        self, method: str, parse: Any, serialize: Serialize, behaviour: Behaviour, *, streamed: bool
    ) -> Behaviour:
        """Make the handler of a method with a stream of replies. `behaviour` is a generator of them, or a
        coroutine that writes them itself.

        The handler is a coroutine that writes, because gRPC does not close a generator when the client is
        gone, but leaves that to Python's collector.
        """

        async def handle(chunks: AsyncIterator[bytes], context: Context) -> None:
            rpc = self._start(method)
            followed = rpc.send.followed(context)
            try:
                self._enter(rpc, context)
                if streamed:
                    replies = behaviour(all_decoded(method, parse, chunks), followed)
                else:
                    replies = behaviour(await self._receive(rpc, parse, context), followed)
                if inspect.isawaitable(replies):
                    await replies
                else:
                    async with contextlib.aclosing(replies):
                        async for reply in replies:
                            data = serialize(reply)
                            rpc.send.begin(len(data))
                            await context.write(data)
                            rpc.send.done()
                await current_meter().answered()
            except BaseException as error:  # noqa: BLE001 -- as above
                await self._fail(error, rpc, context)
            rpc.end(grpc.StatusCode.OK)
            rpc.send.begin()

        return handle

    async def refuse_unknown(self, context: Context) -> None:
        """End a call of a method that the server does not have; gRPC itself would answer without any details.
        Always raises.
        """
        rpc = self._start(UNKNOWN)
        rpc.has_place = True  # `grpc_server` counts them
        await self._fail(
            UnsupportedFeature(["method"], "the server has no method of this name"), rpc, context
        )

    def _start(self, method: str) -> Rpc:
        return Rpc(method, UNTRACED, self._sends.start(method), self._meters)

    def _enter(self, rpc: Rpc, context: Context) -> None:
        """Decide what the headers alone decide: who calls, whether there is a place for the call, and whether
        the caller may have one more.

        Places are given back when the task ends, which is after the reply was sent. A call is traced only
        once its caller is known: otherwise anybody could fill the traces, or put spans into those of others.
        """
        method = rpc.method
        self._access.authenticate(method, context)
        rpc.trace = self._telemetry.rpc(method, cast("Any", context.invocation_metadata() or ()))
        CURRENT_RPC.set(rpc.trace.span)  # this task serves only this RPC, so it is never reset
        if method.startswith(PACKAGES):  # the server's stop does not wait for health and reflection
            self._calls.begin()
        task = asyncio.current_task()
        assert task is not None, "gRPC calls handlers in a task"
        leave = self._admission.enter(kind_of(method), context.peer())
        task.add_done_callback(lambda _: leave())
        rpc.has_place = True
        leave_account = self._access.admit(method)
        task.add_done_callback(lambda _: leave_account())

    async def _receive(self, rpc: Rpc, parse: Any, context: Context) -> Message:
        """Receive the call's one message. Raises Busy, StalledSender, MessageTooLarge, InvalidRequest,
        UnsupportedFeature and Draining.
        """
        if not rpc.method.startswith(PACKAGES):
            return await self._read(rpc, parse, context)
        async with self._calls.preparing():
            return await self._read(rpc, parse, context)

    async def _read(self, rpc: Rpc, parse: Any, context: Context) -> Message:
        data = await self._receive_bytes(rpc, context)
        if data is grpc.aio.EOF:
            raise InvalidRequest([Violation("", "the call has no message")])
        MESSAGE_BYTES.set(len(data))  # never reset, as CURRENT_RPC
        RECEIVED_NS.set(time.monotonic_ns())
        work = partial(decoded, rpc.method, parse, data, self._vocab_size())
        received: tuple[Any, RequestError | None] = await self._lanes.convert(work, len(data))
        request, refusal = received
        if "request_id" in request.DESCRIPTOR.fields_by_name:  # the errors that follow carry the id
            request.request_id = rpc.given_id = request.request_id or new_request_id()
            current_meter().named(rpc.given_id)
        if refusal is not None:
            raise refusal
        return cast("Message", request)

    async def _receive_bytes(self, rpc: Rpc, context: Context) -> Any:
        """Receive the call's next message. Returns gRPC's EOF if there is none. Raises Busy, StalledSender
        and MessageTooLarge.
        """
        data: Any = await self._receiving.message(kind_of(rpc.method), context.peer(), context.read)
        if data is not grpc.aio.EOF and len(data) > self._max_receive_bytes:
            raise MessageTooLarge(len(data), self._max_receive_bytes)
        return data

    async def _fail(self, error: BaseException, rpc: Rpc, context: Context) -> NoReturn:
        """End the RPC with the status of this error. Always raises."""
        if isinstance(error, grpc.aio.AbortError):  # the method has answered by itself
            rpc.end(cast("Any", context.code()) or grpc.StatusCode.UNKNOWN)
            raise error
        if isinstance(error, grpc.aio.InternalError):  # a write failed, because the client is gone
            code = _code_of_cancel(context)
            rpc.end(code)
            current_meter().vanished(code.name)
            raise asyncio.CancelledError from error
        if isinstance(error, asyncio.CancelledError):
            stalled = grpc.StatusCode.RESOURCE_EXHAUSTED
            code = stalled if rpc.send.gave_up else _code_of_cancel(context)
            current_meter().vanished(code.name)
            rpc.end(code)
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and this cycle would keep the call alive
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, grpc.aio.BaseError)):
            rpc.end(grpc.StatusCode.INTERNAL, type(error).__name__)
            raise error
        # Whatever else is no Exception, such as a panic of a library in Rust, is a bug like any other: gRPC
        # would send no status at all for it.
        row = row_of(error)
        current_meter().failed(row.reason, row.code.name)
        self._meters.refused(row.reason)
        if isinstance(error, StalledReader):
            rpc.send.stalled()
        if not isinstance(error, PenstockError):
            log.error("a bug in the service: %s, request %r", rpc.method, rpc.request_id, exc_info=error)
        status = to_status(error, rpc.request_id)
        metadata, fields = trailers(error, status), fields_of(error)
        # gRPC keeps the abort and what it refers to until a garbage collection, so it must not refer to the
        # request
        del error
        try:
            if rpc.has_place:
                rpc.send.begin()
            else:
                await rpc.send.begin_refusal(context.peer())
            await context.abort(row.code, status.message, metadata)
        except grpc.aio.AbortError as abort:
            abort.__context__ = None
            rpc.end(row.code, row.reason)
            if not current_meter().is_logged:
                caller_id = CURRENT_CALLER.get().id
                self._refusals.tell(
                    Refusal(rpc.method, row.code.name, row.reason, rpc.request_id, caller_id, fields)
                )
            raise
        except (grpc.aio.InternalError, asyncio.CancelledError) as gone:  # the client is gone
            rpc.end(_code_of_cancel(context))
            raise asyncio.CancelledError from gone


DEADLINE_SLACK_S = 0.1
"""gRPC reports a passed deadline as a cancellation, and the client's clock may be a little ahead of the
server's.
"""


def _code_of_cancel(context: Context) -> grpc.StatusCode:
    remaining_s = cast("float | None", context.time_remaining())  # None: no deadline
    late = remaining_s is not None and remaining_s < DEADLINE_SLACK_S
    return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
