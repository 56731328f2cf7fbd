"""Serves the front until it is told to stop, in this process or in several."""

from __future__ import annotations

import logging
import socket
import sys
from typing import Final

from penstock.client.connection.address import is_loopback
from penstock.openai.serving.logs import open_logs
from penstock.openai.serving.tls import certificate_of
from penstock.openai.serving.worker import run_worker
from penstock.openai.serving.workers import run_workers
from penstock.openai.settings import Settings, SettingsError

log = logging.getLogger("penstock.openai")

_BACKLOG: Final = 2048


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, and print the address on stdout once the port is open. Returns the exit
    code. Raises ValueError for settings that cannot be honoured.
    """
    certificate_of(settings)  # so that wrong files are told here, and not by each worker
    listening = _listening(settings)
    open_logs(settings.log_format)

    def tell() -> None:
        # One write: a line of the log could come between the address and its newline otherwise.
        sys.stdout.write(f"penstock: openai on {_url(settings, listening)}\n")
        sys.stdout.flush()

    log.info("calling %s for %d worker%s", settings.addr, settings.workers, "s" * (settings.workers > 1))
    for warning in _warnings(settings):
        log.warning("listening on %s: %s", settings.host, warning)
    with listening:
        if settings.workers > 1:
            return run_workers(settings, listening, tell)
        run_worker(settings, listening, tell)
    return 0


def _listening(settings: Settings) -> socket.socket:
    """Open the port. Raises SettingsError if that is not possible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        raise SettingsError(f"port: cannot listen on {settings.host}:{settings.port}: {why}") from error
    made.setblocking(False)
    return made


def _url(settings: Settings, listening: socket.socket) -> str:
    scheme = "http" if settings.tls_cert is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _warnings(settings: Settings) -> list[str]:
    """What the operator has allowed with `insecure`."""
    if is_loopback(settings.host):
        return []
    found = []
    if settings.tls_cert is None:
        found.append("keys of callers cross the network in plaintext")
    if settings.token is not None:
        found.append("whoever reaches that may use the model: requests without a key get that of --token")
    return found
