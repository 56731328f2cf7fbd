"""Makes a gRPC server listen on a TCP port, with or without TLS, or on a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

import grpc

from penstock.runtime.errors import ConfigError
from penstock.service.listening.listen_options import tcp_address, unix_address

MAX_SOCKET_PATH = 107
"""The system's limit, in bytes."""


def listen_tcp(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, *, flag: str
) -> int:
    """Listen on a port, or on any free one for 0, and return the port. Raises ConfigError, which names `flag`
    as the remedy if the port is taken.
    """
    address = tcp_address(host, port)
    _probe(host, port, address, flag)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error


def _probe(host: str, port: int, address: str, flag: str) -> None:
    """Try the port with a plain socket first, because the system's error is clearer than gRPC's."""
    bound_socket(host, port, address, flag).close()


def bound_socket(host: str, port: int, address: str, flag: str) -> socket.socket:
    """Make a plain socket that is bound to the port, or to any free one for 0. Raises ConfigError, which
    names `flag` as the remedy if the port is taken.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error.strerror}") from error
    family, kind, protocol, _, where = addresses[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}; choose another with {flag}, or 0 for any free one"
        ) from error
    return bound


class HeldPort:
    """A TCP port that other processes of this server listen on, all of them on the same one. While it is held
    another server is told that the port is taken, also when none of those processes lives.
    """

    def __init__(self, host: str, port: int, *, flag: str) -> None:
        """Take the port, or any free one for 0. Raises ConfigError, which names `flag` as the remedy if the
        port is taken.
        """
        self._socket = bound_socket(host, port, tcp_address(host, port), flag)
        # Both are set only now. With SO_REUSEADDR the port could be taken while nobody listens on it;
        # without it at first, it could not be taken right after another server. With SO_REUSEPORT from the
        # first it could be taken although the front processes of another server listen on it.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port: int = self._socket.getsockname()[1]
        self.address = tcp_address(host, self.port)

    def close(self) -> None:
        """Give the port back. May be called twice."""
        self._socket.close()


class UnixSocket:
    """A socket file that a server listens on."""

    def __init__(self, server: grpc.aio.Server, path: Path, mode: int) -> None:
        """Make the file. It replaces a socket that nobody listens on any more. Raises ConfigError."""
        self.path = path.absolute()
        _refuse_other_use(self.path)
        # The socket is made in a folder that nobody else may enter, and moved from there. So it has its mode
        # from the first moment, it replaces an old socket at once, and gRPC, which removes the file at the
        # path that it was given, cannot remove the socket of a later server.
        try:
            folder = Path(tempfile.mkdtemp(prefix=".", dir=self.path.parent))
        except OSError as error:
            raise ConfigError(
                f"unix_socket: {self.path} cannot be made: {error.strerror}: {self.path.parent}"
            ) from error
        try:
            self._identity = self._make(server, folder / "s", mode)
        except OSError as error:
            raise ConfigError(f"unix_socket: {self.path} cannot be made: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _make(self, server: grpc.aio.Server, made: Path, mode: int) -> tuple[int, int]:
        if max(len(os.fsencode(made)), len(os.fsencode(self.path))) > MAX_SOCKET_PATH:
            most = MAX_SOCKET_PATH - len("/.12345678/s")
            raise ConfigError(
                f"unix_socket: {self.path} is too long: the system allows {MAX_SOCKET_PATH} bytes, "
                f"of which the folder may have {most}"
            )
        try:
            server.add_insecure_port(unix_address(made))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {unix_address(self.path)}: {error}") from error
        made.chmod(mode)
        status = made.lstat()
        made.rename(self.path)
        return status.st_dev, status.st_ino

    @property
    def address(self) -> str:
        """The address for clients."""
        return unix_address(self.path)

    def remove(self) -> None:
        """Remove the file, unless it was replaced by another. To be called while the server still listens:
        afterwards the system may give the file's number to another file.
        """
        with contextlib.suppress(OSError):
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) == self._identity:
                self.path.unlink()


def _refuse_other_use(path: Path) -> None:
    """Raise ConfigError if something is at the path that must stay: a file, or a socket that somebody listens
    on.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"unix_socket: {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"unix_socket: {path} exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a full queue of connections is an answer, too
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # a killed server has left it
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConfigError(f"unix_socket: {path} cannot be tried: {error.strerror}") from error
    raise ConfigError(
        f"cannot listen on {unix_address(path)}: another server listens there; choose another --unix-socket"
    )
