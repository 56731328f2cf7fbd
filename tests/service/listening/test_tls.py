"""TLS as a peer sees it: who may connect, which certificate is shown, and what happens to replaced files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.listening.tls import Certificates, TlsFiles, certificate_names
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from tests.service.rig import collect, failure_of, fake, joined, serving, stream
from tests.service.tls_rig import CA, CERTS, install, listening, secure, shown

OTHER_CA = CERTS / "other_ca.pem"


async def load_of(channel: grpc.aio.Channel) -> control_pb2.GetLoadResponse:
    stub: Any = control_pb2_grpc.ControlServiceStub(channel)
    reply: control_pb2.GetLoadResponse = await stub.GetLoad(control_pb2.GetLoadRequest())
    return reply


async def test_a_call_over_tls() -> None:
    async with serving(listen=listening()) as rig, secure(rig.server.address) as channel:
        assert (await load_of(channel)).kv_pages_total > 0


async def test_plaintext_does_not_reach_a_port_with_tls() -> None:
    async with serving(listen=listening()) as rig:
        failure = await failure_of(load_of(rig.channel))
        assert failure.code is grpc.StatusCode.UNAVAILABLE


async def test_a_client_of_another_authority_finds_no_server() -> None:
    async with serving(listen=listening()) as rig, secure(rig.server.address, ca=OTHER_CA) as channel:
        failure = await failure_of(load_of(channel))
        assert failure.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_versions_of_tls_that_are_spoken(version: ssl.TLSVersion) -> None:
    async with serving(listen=listening()) as rig:
        context = ssl.create_default_context(cafile=CA)
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        async with asyncio.timeout(20):
            _, writer = await asyncio.open_connection("127.0.0.1", rig.server.port, ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()


async def test_tls_1_1_is_refused() -> None:
    async with serving(listen=listening()) as rig:
        context = ssl.create_default_context(cafile=CA)
        context.set_ciphers("ALL:@SECLEVEL=0")  # otherwise this end would refuse
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        async with asyncio.timeout(20):
            with pytest.raises((ConnectionError, ssl.SSLError)) as refused:
                await asyncio.open_connection("127.0.0.1", rig.server.port, ssl=context)
        # gRPC closes the connection without an error. An error of this end would look different.
        assert isinstance(refused.value, ConnectionError) or "ALERT_PROTOCOL_VERSION" in str(refused.value)


# -- clients' certificates --


async def test_a_client_with_a_certificate_gets_in() -> None:
    async with (
        serving(listen=listening(client_ca=CA)) as rig,
        secure(rig.server.address, client="client") as channel,
    ):
        assert (await load_of(channel)).kv_pages_total > 0


@pytest.mark.parametrize("client", [None, "stranger"])
async def test_a_client_without_one_that_counts_does_not(client: str | None) -> None:
    async with (
        serving(listen=listening(client_ca=CA)) as rig,
        secure(rig.server.address, client=client) as channel,
    ):
        failure = await failure_of(load_of(channel))
        assert failure.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("client_ca", "names"),
    [(CA, ("alice", "alice.example", "spiffe://example/alice")), (None, ())],
)
async def test_who_a_certificate_says_that_it_is(client_ca: Path | None, names: tuple[str, ...]) -> None:
    """Each name once. A certificate that was not verified has no names."""
    files = TlsFiles(CERTS / "server.pem", CERTS / "server.key", client_ca)
    async with naming(files) as address, secure(address, client="client") as channel:
        call: Any = channel.unary_unary("/test/Names")
        assert (await call(b"", timeout=20)).decode() == "\n".join(names)


async def test_plaintext_has_no_certificate() -> None:
    async with naming(None) as address, grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary("/test/Names")
        assert await call(b"", timeout=20) == b""


@contextlib.asynccontextmanager
async def naming(files: TlsFiles | None) -> AsyncIterator[str]:
    """Run a server whose one method answers with the names in the caller's certificate; yields its
    address.
    """

    async def names(request: bytes, context: Any) -> bytes:
        return "\n".join(certificate_names(context)).encode()

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Names": grpc.unary_unary_rpc_method_handler(names)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    if files is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", Certificates(files).credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Said:
    """Stands in for a context."""

    def __init__(self, **found: list[bytes]) -> None:
        self._found = found

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._found


def test_names_that_are_no_text_are_left_out() -> None:
    context: Any = Said(
        x509_common_name=[b"bob\x00.example"],
        x509_subject_alternative_name=[b"\xff", b"", b"a\nb", "é".encode(), b"bob"],
        x509_subject=[b"CN=mallory"],
    )
    assert certificate_names(context) == ("é", "bob")


# -- files that change --


async def test_a_replaced_certificate_counts_for_new_connections(tmp_path: Path) -> None:
    """A running stream goes on over the old connection."""
    install(tmp_path, "server")
    engine = fake(hold=True)
    async with (
        serving(engine, listen=listening(tmp_path)) as rig,
        secure(rig.server.address) as channel,
    ):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Stream(stream("w"))
        reading = asyncio.create_task(collect(call))
        await call.initial_metadata()
        assert await shown(rig.server.port) == "first"
        install(tmp_path, "renewed")
        assert await shown(rig.server.port) == "second"
        engine.release()
        assert joined(await reading).outputs[0].text == "xyz"


async def test_a_broken_replacement_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However many clients connect meanwhile, it is logged once; the other half of the pair completes it."""
    install(tmp_path, "server")
    async with serving(listen=listening(tmp_path)) as rig:
        install(tmp_path, "renewed", only="pem")
        assert [await shown(rig.server.port) for _ in range(3)] == ["first"] * 3
        errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "is not the key of the certificate" in errors[0]
        install(tmp_path, "renewed", only="key")
        assert await shown(rig.server.port) == "second"
        (tmp_path / "server.key").unlink()
        assert await shown(rig.server.port) == "second"
        install(tmp_path, "server")
        assert await shown(rig.server.port) == "first"


async def test_a_file_may_be_written_in_place(tmp_path: Path) -> None:
    install(tmp_path, "server")
    async with serving(listen=listening(tmp_path)) as rig:
        assert await shown(rig.server.port) == "first"
        for end in ("pem", "key"):
            (tmp_path / f"server.{end}").write_bytes((CERTS / f"renewed.{end}").read_bytes())
        assert await shown(rig.server.port) == "second"


async def test_a_replaced_authority_counts_for_new_connections(tmp_path: Path) -> None:
    install(tmp_path, "server")
    authority = tmp_path / "clients.pem"
    authority.write_bytes(CA.read_bytes())
    async with serving(listen=listening(tmp_path, client_ca=authority)) as rig:
        async with secure(rig.server.address, client="client") as channel:
            await load_of(channel)
        authority.write_bytes(OTHER_CA.read_bytes())
        async with secure(rig.server.address, client="stranger") as channel:
            await load_of(channel)
        async with secure(rig.server.address, client="client") as channel:
            assert (await failure_of(load_of(channel))).code is grpc.StatusCode.UNAVAILABLE


# -- at start --


@pytest.mark.parametrize(
    ("cert", "key", "client_ca", "complaint"),
    [
        ("none.pem", "server.key", None, r"^tls_cert: .*none\.pem cannot be read: No such file"),
        ("server.pem", "none.key", None, r"^tls_key: .*none\.key cannot be read: No such file"),
        ("server.pem", ".", None, r"^tls_key: .* cannot be read: Is a directory"),
        ("server.key", "server.key", None, r"^tls_cert: .*server\.key holds no certificate in PEM form"),
        ("README.md", "server.key", None, r"^tls_cert: .*README\.md holds no certificate"),
        ("server.pem", "server.pem", None, r"^tls_key: .*server\.pem holds no private key in PEM form"),
        ("server.pem", "client.key", None, r"^tls_key: .*client\.key is not the key of .*server\.pem"),
        ("server.pem", "encrypted.key", None, r"^tls_key: .*encrypted\.key has a passphrase"),
        ("server.pem", "server.key", "none.pem", r"^client_ca: .*none\.pem cannot be read"),
        ("server.pem", "server.key", "client.key", r"^client_ca: .*client\.key holds no certificate"),
    ],
)
def test_files_that_cannot_be_used(cert: str, key: str, client_ca: str | None, complaint: str) -> None:
    files = TlsFiles(CERTS / cert, CERTS / key, None if client_ca is None else CERTS / client_ca)
    with pytest.raises(ConfigError, match=complaint):
        Certificates(files)


def test_a_broken_pem_is_no_certificate(tmp_path: Path) -> None:
    half = (CERTS / "server.pem").read_bytes()[:300]
    (tmp_path / "half.pem").write_bytes(half)
    with pytest.raises(ConfigError, match="holds no certificate in PEM form"):
        Certificates(TlsFiles(tmp_path / "half.pem", CERTS / "server.key"))


def test_an_expired_certificate_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It is used nevertheless: some clients do not check dates, and a server must be able to start."""
    Certificates(TlsFiles(CERTS / "expired.pem", CERTS / "expired.key"))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "expired.pem: certificate has expired" in record.getMessage()


def test_a_good_certificate_is_no_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Also if there is other text between the certificates of the chain."""
    chain = (CERTS / "server.pem").read_bytes() + "Prüfstelle:\n".encode() + CA.read_bytes()
    (tmp_path / "chain.pem").write_bytes(chain)
    Certificates(TlsFiles(tmp_path / "chain.pem", CERTS / "server.key"))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
