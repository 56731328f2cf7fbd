"""The addresses that a server listens on: one gRPC server, one more if control has a port of its own, and one
more if front processes serve the main port.

All have the same servicers and interceptors; one interceptor more refuses at each what belongs to the other
(`rpcs.surface`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from penstock.runtime.errors import ConfigError
from penstock.service.limits.bounds import grpc_options
from penstock.service.listening.grpc_server import MakeServer, Refuse, refusing_server
from penstock.service.listening.listen_options import tcp_address
from penstock.service.listening.listeners import HeldPort, UnixSocket, listen_tcp
from penstock.service.listening.tls import Certificates
from penstock.service.options import ServerOptions
from penstock.service.relay.processes import link_server
from penstock.service.rpcs.surface import control_surface, main_surface

Serve = Callable[[MakeServer], grpc.aio.Server]
"""Has a server made, and gives it all services. The servers of one `Serve` share their bounds."""
Build = Callable[[Sequence[grpc.aio.ServerInterceptor]], Serve]
"""Prepares the services of an address. The given interceptors come after its own."""
Lost = Callable[[BaseException | None], None]
"""Is called when one of the gRPC servers has ended by itself, with the error if there was one."""
_LOOK_S = 3600.0


class Addresses:
    """Takes the addresses when it is made, and answers from `start` to `stop`."""

    def __init__(self, options: ServerOptions, build: Build, lost: Lost) -> None:
        """`lost` is called if a gRPC server ends although `stop` was not called. Raises ConfigError if an
        address cannot be taken, or TLS cannot be used.
        """
        listen = options.listen
        tls = listen.tls
        certificates = None if tls is None else Certificates(tls)

        def take(server: grpc.aio.Server, host: str, port: int, flag: str) -> int:
            credentials = None if certificates is None else certificates.credentials()
            return listen_tcp(server, host, port, credentials, flag=flag)

        self.port: int | None = None
        """The port of the main address; None if it has none."""
        self.control_port: int | None = None
        """The port that serves control; None if the main address does."""
        self._options = options
        self._lost = lost
        self._watches: list[asyncio.Task[None]] = []
        self._stopping = False
        self._socket: UnixSocket | None = None
        apart = listen.control_port is not None

        def grpc_server(
            refuse: Refuse, *, interceptors: Sequence[grpc.aio.ServerInterceptor]
        ) -> grpc.aio.Server:
            arguments = [
                *grpc_options(options.bounds, options.max_receive_bytes, options.num_addresses),
                *options.connections.arguments(),
            ]
            return refusing_server(refuse, interceptors=interceptors, options=arguments)

        serve = build([main_surface(lambda: self.control_port)] if apart else [])
        self.servers: list[grpc.aio.Server] = []
        """The servers of the main addresses, then that of control, if it has one of its own."""
        self._held: HeldPort | None = None
        try:
            if options.front_processes and options.port is not None:
                self._held = HeldPort(options.host, options.port, flag="--port")
                self.port = self._held.port
                self.servers.append(serve(link_server(options, self._held)))
            if not options.front_processes or listen.unix_socket is not None:
                main = serve(grpc_server)
                self.servers.append(main)
                if self._held is None and options.port is not None:
                    self.port = take(main, options.host, options.port, "--port")
                if listen.unix_socket is not None:
                    self._socket = UnixSocket(main, listen.unix_socket, listen.unix_socket_mode)
            if listen.control_port is not None:
                control = build([control_surface()])(grpc_server)
                self.servers.append(control)
                self.control_port = take(control, options.control_host, listen.control_port, "--control-port")
        except ConfigError:
            self._remove_socket()
            if self._held is not None:
                self._held.close()
            raise

    @property
    def main(self) -> tuple[str, ...]:
        """The addresses that take requests: the port first, then the Unix socket."""
        addresses = [] if self.port is None else [tcp_address(self._options.host, self.port)]
        return tuple(addresses + ([] if self._socket is None else [self._socket.address]))

    @property
    def control_address(self) -> str | None:
        """The address of control, if it has one of its own."""
        if self.control_port is None:
            return None
        return tcp_address(self._options.control_host, self.control_port)

    async def start(self) -> None:
        """Start to answer."""
        for server in self.servers:
            await server.start()
            self._watches.append(asyncio.create_task(self._watch(server)))

    async def _watch(self, server: grpc.aio.Server) -> None:
        """Wait until the server has ended, and call `lost` unless that was asked for."""
        error: BaseException | None = None
        try:
            # With a time limit cygrpc also shields what others wait for from a cancellation of this task.
            while await server.wait_for_termination(_LOOK_S):
                pass
        except Exception as raised:  # noqa: BLE001 -- `lost` is told of any error
            error = raised
        if not self._stopping:
            self._lost(error)

    async def stop(self, grace_s: float | None) -> None:
        """Stop listening; RPCs may go on for `grace_s` seconds. May be called again with a shorter grace."""
        self._stopping = True
        self._remove_socket()
        await asyncio.gather(*(server.stop(grace_s) for server in self.servers))
        await asyncio.gather(*self._watches)
        if self._held is not None:
            self._held.close()

    def _remove_socket(self) -> None:
        if self._socket is not None:
            self._socket.remove()
