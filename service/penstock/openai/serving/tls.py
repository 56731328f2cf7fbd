"""The front's own certificate, which is read again when its files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import NoReturn

from penstock.openai.settings import Settings, SettingsError

log = logging.getLogger("penstock.openai")


class Certificate:
    """A certificate chain with its key, and the authorities of clients' certificates, in PEM form."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Read the files. Raises SettingsError if they cannot be used. With `client_ca`, clients without a
        certificate of such an authority are refused; that file is read once.
        """
        self._cert, self._key = cert, key
        self._seen = self._stamp()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._load(self.context)
        if client_ca is not None:
            self._demand(client_ca)

    def refresh(self) -> None:
        """Read the files again if they have changed; connections from now on get the new certificate. Files
        that cannot be used, such as a pair of which one half has been replaced so far, change nothing.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a trial: the one in use keeps a whole pair
            self._load(self.context)
        except SettingsError as error:
            log.error("the TLS files changed and cannot be used, so the old ones stay in force: %s", error)
        else:
            log.info("TLS: the certificate %s was read again", self._cert)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._cert, self._key, password=self._refuse)
        except ssl.SSLError as error:
            why = (error.reason or str(error)).replace("_", " ").lower()
            raise SettingsError(
                f"tls_cert: {self._cert} and {self._key} are not a PEM certificate and its key: {why}"
            ) from error
        except OSError as error:
            raise SettingsError(
                f"tls_cert: {self._cert} and {self._key} cannot be read: {error.strerror}"
            ) from error

    def _demand(self, client_ca: Path) -> None:
        try:
            self.context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise SettingsError(f"client_ca: {client_ca} holds no certificate in PEM form") from error
        except OSError as error:
            raise SettingsError(f"client_ca: {client_ca} cannot be read: {error.strerror}") from error
        self.context.verify_mode = ssl.CERT_REQUIRED

    def _refuse(self) -> NoReturn:
        """Refuse a key with a password; OpenSSL would ask for it on the terminal otherwise."""
        raise SettingsError(f"tls_key: {self._key} has a password; give a key without one")

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        stamps: list[tuple[int, int, int] | None] = []
        for path in (self._cert, self._key):
            try:
                status = path.stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(stamps)


def certificate_of(settings: Settings) -> Certificate | None:
    """Return the certificate that the settings name; None for plain HTTP. Raises SettingsError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificate(settings.tls_cert, settings.tls_key, settings.client_ca)
