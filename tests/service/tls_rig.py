"""The certificates of tests/service/certs, channels that use them, and which certificate a server shows."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import grpc

from penstock.service.listening.listen_options import ListenOptions

CERTS = Path(__file__).with_name("certs")
CA = CERTS / "ca.pem"


def listening(folder: Path = CERTS, name: str = "server", *, client_ca: Path | None = None) -> ListenOptions:
    """Options of a server with TLS."""
    return ListenOptions(tls_cert=folder / f"{name}.pem", tls_key=folder / f"{name}.key", client_ca=client_ca)


def secure(address: str, *, ca: Path = CA, client: str | None = None) -> grpc.aio.Channel:
    """Make a channel that trusts `ca`, and shows the certificate `client`."""
    key, chain = (
        (None, None)
        if client is None
        else (CERTS.joinpath(f"{client}.{end}").read_bytes() for end in ("key", "pem"))
    )
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes(), key, chain))


async def shown(port: int | None) -> str:
    """Return the common name in the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=CA)
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            certificate = writer.get_extra_info("peercert")
        finally:
            writer.close()
    names: dict[str, str] = dict(pair for part in certificate["subject"] for pair in part)
    return names["commonName"]


def install(folder: Path, name: str, *, only: str = "") -> None:
    """Put a pair, or its half `only` ("pem" or "key"), where listening(folder) looks for it."""
    for end in (only,) if only else ("pem", "key"):
        new = folder / f"new.{end}"
        shutil.copyfile(CERTS / f"{name}.{end}", new)
        new.rename(folder / f"server.{end}")
