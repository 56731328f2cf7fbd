"""The gRPC server around one engine: build, start, serve, stop gracefully.

    server = PenstockServer(options)  # takes the port before anything slow: a port in use fails at once
    await server.serve(engine)        # answers; health says NOT_SERVING
    await server.start_engine()       # compiles; then health says SERVING
    await server.stop()               # refuses new requests, finishes the running ones

Must be made and used on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import TracerProvider

from penstock.runtime.chat.parser import ChatForms, choose_forms
from penstock.runtime.errors import ConfigError, PenstockError
from penstock.service.backend import Backend
from penstock.service.control import ControlServicer
from penstock.service.inference import InferenceServicer
from penstock.service.interceptors import PenstockInterceptor
from penstock.service.lanes import Lanes
from penstock.service.options import ServerOptions
from penstock.service.streams import Switchboard
from penstock.service.telemetry import Telemetry
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

log = logging.getLogger(__name__)

T = TypeVar("T")
SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in ((inference_pb2, "InferenceService"), (control_pb2, "ControlService"))
)
_LAST_REPLIES_S = 5.0


def version() -> str:
    """Of the installed package."""
    return importlib.metadata.version("penstock")


def in_thread(work: Callable[[], T]) -> Awaitable[T]:
    """Run blocking work in a daemon thread: unlike asyncio's own pool it does not keep the process from
    ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001 -- handed to whoever awaits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"penstock-{getattr(work, '__name__', 'work')}", daemon=True).start()
    return future


class PenstockServer:
    """One engine's gRPC front."""

    def __init__(self, options: ServerOptions, tracer_provider: TracerProvider | None = None) -> None:
        """Take the port; ConfigError where it cannot be had."""
        self._options = options
        self._telemetry = Telemetry(tracer_provider)
        self.instance_id = uuid.uuid4().hex
        self._lanes = Lanes()
        self._health = health.aio.HealthServicer()
        self._engine: Backend | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False
        self._starting = False
        self._server = grpc.aio.server(
            interceptors=[PenstockInterceptor(self._telemetry)],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", options.max_receive_bytes),
                # A long prefill sends nothing; clients may ping meanwhile.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ],
        )
        self.port = self._bind()

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._options.address(self.port)

    def _bind(self) -> int:
        _probe(self._options)
        try:
            return self._server.add_insecure_port(self._options.address())
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self._options.address()}: {error}") from error

    async def serve(self, engine: Backend) -> None:
        """Start to answer. Generation is refused as NOT_READY until `start_engine` ends."""
        self._engine = engine
        switchboard = Switchboard(asyncio.get_running_loop())
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(
                engine,
                switchboard,
                self._telemetry,
                self._forms(engine),
                self._lanes,
                stall_limit_s=self._options.stall_limit_s,
                truncation=self._options.truncation,
            ),
            self._server,
        )
        control_pb2_grpc.add_ControlServiceServicer_to_server(
            ControlServicer(engine, self._lanes, version=version(), instance_id=self.instance_id),
            self._server,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        await self._set_health(serving=False)
        await self._server.start()

    def _forms(self, engine: Backend) -> ChatForms:
        """How the model writes calls and thoughts."""
        codec = engine.text
        if codec is None:
            return ChatForms()
        return choose_forms(
            codec.chat_template,
            codec.added_tokens,
            tools=self._options.tool_call_parser,
            reasoning=self._options.reasoning_parser,
        )

    async def start_engine(self) -> None:
        """Compile and start the engine, then tell the world; raises what the engine raises."""
        assert self._engine is not None, "call serve() first"
        self._starting = True
        await in_thread(self._engine.start)
        self._starting = False
        if not self._stopping:
            await self._set_health(serving=True)
            self._watcher = asyncio.create_task(self._watch(self._engine))

    async def wait_for_failure(self) -> None:
        """Returns once the engine is dead."""
        assert self._watcher is not None, "call start_engine() first"
        await self._watcher

    async def stop(self) -> bool:
        """Finish what runs within the grace, abort the rest, stop; whether all of it came to its end."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
        engine = self._engine
        if engine is None:
            return True
        # First the drain, which refuses new requests from its start, then health, which takes a moment.
        draining = in_thread(lambda: engine.drain(self._options.grace_s)) if engine.ready else None
        await self._set_health(serving=False)
        drained = draining is None or await draining
        if not drained:
            with contextlib.suppress(PenstockError):
                aborted = engine.abort(all_requests=True, message="the server is shutting down")
                log.warning("grace of %g s is over; aborted %d requests", self._options.grace_s, len(aborted))
        await self._server.stop(_LAST_REPLIES_S)  # readers take what is buffered
        self._lanes.close()
        if not self._starting:  # a compilation cannot be interrupted; its thread ends with the process
            await in_thread(engine.shutdown)
        return drained

    async def _watch(self, engine: Backend) -> None:
        """Turn health to NOT_SERVING should the engine die."""
        loop, died = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(died.set)

        engine.on_failure(tell)
        await died.wait()
        log.error("the engine is dead: %s", engine.failure)
        await self._set_health(serving=False)

    async def _set_health(self, *, serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", *SERVICES):
            await self._health.set(service, status)


def _probe(options: ServerOptions) -> None:
    """Try the port with a plain socket first: the system's reason is clearer than gRPC's."""
    if not options.port:
        return
    try:
        addresses = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host {options.host!r} cannot be resolved: {error.strerror}") from error
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {options.address()}: {error.strerror}; "
                "choose another with --port, or 0 for any free one"
            ) from error
