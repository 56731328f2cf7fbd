"""TLS of a client: which servers it trusts, and the certificate that it shows."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

File = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """Use TLS. Files are in PEM form, and are read when a client is made.

    Without `ca` the server's certificate must lead to one of the well-known authorities that gRPC ships, or
    to one in GRPC_DEFAULT_SSL_ROOTS_FILE_PATH.
    """

    ca: File | None = None
    """Authorities to trust instead."""
    cert: File | None = None
    """The client's own certificate, followed by those that lead to its authority; for a server that asks for
    one.
    """
    key: File | None = None
    """The private key of `cert`, without a password."""
    name: str | None = None
    """The name in the server's certificate; by default the host of the address."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key: must be given together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises ValueError for a file that cannot be read, or has the wrong content. gRPC
        would notice only when it connects, and says little then.
        """
        roots = _checked_roots(self.ca) if self.ca is not None else None
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(roots)
        _check_pair(self.cert, self.key)
        return grpc.ssl_channel_credentials(roots, _read(self.key), _read(self.cert))


def _read(file: File) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {os.fspath(file)}: {error.strerror}") from error


def _checked_roots(file: File) -> bytes:
    data = _read(file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except ssl.SSLError as error:
        raise ValueError(f"{os.fspath(file)} holds no PEM certificates: {_reason(error)}") from error
    return data


def _check_pair(cert: File, key: File) -> None:
    _read(cert), _read(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(
            f"{os.fspath(cert)} and {os.fspath(key)} are not a PEM certificate and its key: {_reason(error)}"
        ) from error


def _no_password() -> str:
    raise ValueError("the private key is locked with a password, which is not supported")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
