"""The front's own certificate: HTTPS, a new certificate without a restart, and certificates of clients."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from penstock.openai.front import Front
from penstock.openai.serving.tls import certificate_of
from penstock.openai.serving.worker import HttpServer
from penstock.openai.settings import Settings, SettingsError
from tests.service.openai.rig import listening
from tests.service.rig import WAIT_S, until
from tests.service.tls_rig import CA, CERTS, install, shown


def settings_of(folder: Path, client_ca: Path | None = None) -> Settings:
    return Settings(
        addr="127.0.0.1:1",
        tls_cert=folder / "server.pem",
        tls_key=folder / "server.key",
        client_ca=client_ca,
        header_timeout_s=1.0,
    )


@contextlib.asynccontextmanager
async def https(settings: Settings) -> AsyncIterator[int]:
    """Run a front without a server, and yield its port."""
    front = Front.made(settings)
    server, found = HttpServer(front), listening()
    port = found.getsockname()[1]
    await server.start(found, certificate_of(settings))
    try:
        yield port
    finally:
        async with asyncio.timeout(WAIT_S):
            await server.stop(0.0)
            await front.backend.close()


async def status(port: int, client: str | None = None) -> int:
    """Return the status that /health has for a client that trusts our authority, with the certificate
    `client`.
    """
    context = ssl.create_default_context(cafile=CA)
    if client is not None:
        context.load_cert_chain(CERTS / f"{client}.pem", CERTS / f"{client}.key")
    async with httpx.AsyncClient(verify=context, timeout=WAIT_S) as http:
        return (await http.get(f"https://localhost:{port}/health")).status_code


async def test_a_renewed_certificate_is_shown_to_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "server")
    async with https(settings_of(tmp_path)) as port:
        assert await status(port) == 503, "there is no server behind it"
        first = await shown(port)
        install(tmp_path, "renewed", only="pem")  # one half is no pair: the old one stays
        await until(lambda: "the old ones stay in force" in caplog.text)
        assert await shown(port) == first
        install(tmp_path, "renewed")
        async with asyncio.timeout(WAIT_S):
            while await shown(port) == first:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_clients_without_a_certificate_are_refused_where_one_is_demanded(tmp_path: Path) -> None:
    install(tmp_path, "server")
    async with https(settings_of(tmp_path, CA)) as port:
        assert await status(port, "client") == 503
        for refused in (None, "stranger"):
            with pytest.raises(httpx.TransportError):
                await status(port, refused)


async def test_a_handshake_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    install(tmp_path, "server")
    async with https(settings_of(tmp_path)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("pem", "key", "said"),
    [
        (None, None, "cannot be read"),
        ("server", "client", "are not a PEM certificate and its key"),
        ("server", "encrypted", "has a password"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, pem: str | None, key: str | None, said: str) -> None:
    if pem is not None:
        (tmp_path / "server.pem").write_bytes((CERTS / f"{pem}.pem").read_bytes())
        (tmp_path / "server.key").write_bytes((CERTS / f"{key}.key").read_bytes())
    with pytest.raises(SettingsError, match=said):
        certificate_of(settings_of(tmp_path))
