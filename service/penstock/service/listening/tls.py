"""Reads the certificate, the key and the clients' authorities from files, checks them, and reads them again
when they change.

gRPC asks before each handshake whether there is a new certificate. So a replaced file applies from the next
connection on, and open connections keep theirs. Files that cannot be used, such as a pair of which only one
half has been replaced so far, change nothing: what was in force stays, and one line of the log says why.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import grpc

from penstock.runtime.errors import ConfigError

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Stamp: TypeAlias = "tuple[tuple[int, ...] | None, ...]"

_ATTEMPTS = 5
"""How often files that change while they are read are read again; each time takes a few milliseconds."""
_ROUNDS = 10
"""The most rounds of a handshake, which needs two or three."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files, in PEM form."""

    cert: Path
    """The server's certificate, followed by those between it and an authority that the clients know."""
    key: Path
    """Its private key, without a passphrase."""
    client_ca: Path | None = None
    """The authorities of clients' certificates. If it is given, clients without such a certificate are
    refused.
    """

    def named(self) -> dict[str, Path]:
        """Return each file by the name of its option."""
        files = {"tls_cert": self.cert, "tls_key": self.key}
        return files if self.client_ca is None else {**files, "client_ca": self.client_ca}


class Certificates:
    """The newest usable content of the files. It has a lock, because gRPC asks from its own threads."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises ConfigError if they cannot be used. Logs a warning about a certificate that
        clients would refuse.
        """
        self._files = files
        self._lock = threading.Lock()
        self._seen = _stamp(files)
        self._newest = _load(files)

    def credentials(self) -> grpc.ServerCredentials:
        """Make the credentials of one listener. Each listener needs its own, because gRPC must be told once
        about each change.
        """
        held = self._newest

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal held
            newest = self.newest()
            if newest is held:
                return None
            held = newest
            return newest

        # The hints of grpc lack None, which means "no change".
        return grpc.dynamic_ssl_server_credentials(
            held, cast("Any", fetch), require_client_authentication=self._files.client_ca is not None
        )

    def newest(self) -> grpc.ServerCertificateConfiguration:
        """Look at the files, and read them if they changed. Never raises."""
        with self._lock:
            stamp = _stamp(self._files)
            if stamp != self._seen:
                self._seen = stamp
                try:
                    self._newest = _load(self._files)
                except ConfigError as error:
                    log.error(
                        "the TLS files changed and cannot be used, so the old ones stay in force: %s", error
                    )
            return self._newest


def certificate_names(context: Context) -> tuple[str, ...]:
    """Return the names in the client's certificate: the common name, then the alternative names (DNS, URI,
    e-mail and IP addresses alike), each once. Empty if the client has no verified certificate. Names that are
    not printable are left out, because nobody can have meant them.
    """
    found = cast("dict[str, list[bytes]]", context.auth_context())
    names: dict[str, None] = {}
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for value in found.get(key, ()):
            with contextlib.suppress(UnicodeDecodeError):
                name = value.decode()
                if name and name.isprintable():
                    names[name] = None
    return tuple(names)


def _stamp(files: TlsFiles) -> Stamp:
    """Return a value that changes when one of the files is replaced, rewritten, or reached through another
    link.
    """
    stamps: list[tuple[int, ...] | None] = []
    for path in files.named().values():
        try:
            status = path.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append(
                (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            )
    return tuple(stamps)


def _load(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Read and check the files. Raises ConfigError."""
    for _ in range(_ATTEMPTS):
        before = _stamp(files)
        texts = {name: _read(name, path) for name, path in files.named().items()}
        trouble = _check(files, texts)
        # OpenSSL reads keys from files only. What it has checked is what was read here if nothing changed
        # meanwhile.
        if _stamp(files) == before:
            break
    else:
        raise ConfigError(f"tls_cert: {files.cert} and its key were changing while they were read")
    if trouble:
        log.warning("TLS: clients will refuse the certificate %s: %s", files.cert, trouble)
    else:
        log.info("TLS: the certificate is %s", files.cert)
    return grpc.ssl_server_certificate_configuration(
        [(texts["tls_key"], texts["tls_cert"])], texts.get("client_ca")
    )


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from error


def _check(files: TlsFiles, texts: dict[str, bytes]) -> str:
    """Check the files. Raises ConfigError if they cannot be used. Returns why clients would refuse the
    certificate, for example because it has expired, or an empty text.
    """
    certificate = _certificates("tls_cert", files.cert, texts["tls_cert"])
    if files.client_ca is not None:
        _certificates("client_ca", files.client_ca, texts["client_ca"])
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def refuse() -> NoReturn:  # otherwise OpenSSL asks for the passphrase on the terminal
        raise ConfigError(f"tls_key: {files.key} has a passphrase; give a key without one")

    try:
        server.load_cert_chain(files.cert, files.key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"tls_key: {files.key} is not the key of the certificate {files.cert}"
        elif error.reason in ("EE_KEY_TOO_SMALL", "CA_MD_TOO_WEAK", "CA_KEY_TOO_SMALL"):
            text = f"tls_cert: {files.cert} is too weak: {error.reason.lower().replace('_', ' ')}"
        else:
            text = f"tls_key: {files.key} holds no private key in PEM form"
        raise ConfigError(text) from error
    except OSError as error:
        raise ConfigError(f"tls_key: {files.key} cannot be read: {error.strerror}") from error
    return _handshake(server, certificate)


def _certificates(name: str, path: Path, content: bytes) -> str:
    """Return the file's text, if it holds certificates. Raises ConfigError if not."""
    text = content.decode("ascii", "backslashreplace")  # there may be any text between certificates
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{name}: {path} holds no certificate in PEM form") from error
    return text


def _handshake(server: ssl.SSLContext, certificate: str) -> str:
    """Shake hands in memory with a client that trusts this certificate and no other. Returns why the client
    refuses it, or an empty text.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # its name does not matter here
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it without its authority
    client.load_verify_locations(cadata=certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(_ROUNDS):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return str(error.verify_message)
            except ssl.SSLError as error:
                return str(error.reason or error).lower().replace("_", " ")
            ends.remove(end)
    return ""
