"""A TCP proxy that stops forwarding when it is told to, like a network whose cable was pulled.

Connections that are open at that moment stay open, and carry nothing in either direction; new ones are
forwarded again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class FreezingProxy:
    """Forwards to a port of this machine; use `freezing_proxy` to make one."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._frozen: set[socket.socket] = set()
        self._forwarding: list[threading.Thread] = []
        self.addr = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Stop forwarding on all connections that are open now."""
        self._frozen.update(self._open)

    def close(self) -> None:
        self._listener.close()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._forwarding:
            thread.join()  # it ends, because the sockets are shut down
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # `close` was called
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for ends in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._forward, args=ends, daemon=True)
                    self._forwarding.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source in self._frozen:
                    return
                sink.sendall(data)
            if source not in self._frozen:
                sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def freezing_proxy(addr: str) -> Iterator[FreezingProxy]:
    """Run a proxy in front of a server of this machine; its connections end with the block."""
    proxy = FreezingProxy(int(addr.rpartition(":")[2]))
    try:
        yield proxy
    finally:
        proxy.close()
