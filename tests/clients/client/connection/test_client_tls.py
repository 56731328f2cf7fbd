"""TLS on the client's side, against the real server with the certificates of tests/service/certs."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock import client as api
from penstock.cli.__main__ import main
from penstock.client import AsyncClient, Client, Tls
from tests.service.rig import serving
from tests.service.tls_rig import CA, CERTS, listening

OTHER_CA = CERTS / "other_ca.pem"
CERT, KEY = CERTS / "client.pem", CERTS / "client.key"


@contextlib.asynccontextmanager
async def addresses(*, client_ca=None, name="server"):
    """Addresses of a server with TLS: by name and by number."""
    async with serving(listen=listening(name=name, client_ca=client_ca)) as rig:
        yield f"localhost:{rig.server.port}"


async def model_of(addr, **more):
    """Return the model's name, asked for by both clients."""

    def ask():
        with Client(addr, **more) as client:
            return client.model_info(timeout=20).model

    async with AsyncClient(addr, **more) as client:
        found = (await client.model_info(timeout=20)).model
    assert await asyncio.to_thread(ask) == found
    return found


async def test_a_trusted_server():
    async with addresses() as addr:
        assert await model_of(addr, tls=Tls(ca=CA)) == "fake"
        assert await model_of(addr, tls=Tls(ca=str(CA), name="localhost"), token="t") == "fake"


async def test_a_token_goes_with_every_call():
    """With TLS a token is sent to any host; this server has no keys and ignores it."""
    async with addresses() as addr, AsyncClient(addr, tls=Tls(ca=CA), token="t") as client:
        assert client.metadata == (("authorization", "Bearer t"),)
        await client.wait_ready(timeout=20)
        assert (await client.generate("x")).text == "yz"


@pytest.mark.parametrize(
    "tls", [True, Tls(ca=OTHER_CA), Tls(ca=CA, name="another.example")], ids=["known", "other", "name"]
)
async def test_a_server_that_is_not_trusted(tls):
    async with addresses() as addr, AsyncClient(addr, tls=tls) as client:
        with pytest.raises(api.Unreachable, match=r"CERTIFICATE_VERIFY_FAILED|Hostname"):
            await client.load(timeout=20)


async def test_a_server_that_wants_a_certificate():
    async with addresses(client_ca=CA) as addr:
        assert await model_of(addr, tls=Tls(CA, CERT, KEY)) == "fake"
        with pytest.raises(api.Unreachable):
            await model_of(addr, tls=Tls(ca=CA))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ca": "no-such-file"}, "cannot read no-such-file: No such file"),
        ({"ca": CERTS / "client.key"}, "client.key holds no PEM certificates"),
        ({"cert": CERTS / "no-such-file", "key": CERTS / "client.key"}, "cannot read .*no-such-file"),
        (
            {"cert": CERTS / "client.pem", "key": CERTS / "server.key"},
            "are not a PEM certificate and its key",
        ),
        ({"cert": CERTS / "server.pem", "key": CERTS / "encrypted.key"}, "locked with a password"),
    ],
)
@pytest.mark.parametrize("client", [Client, AsyncClient])
async def test_files_are_looked_at_before_anything_is_sent(client, files, message):
    with pytest.raises(ValueError, match=message):
        client("localhost:1", tls=Tls(**files))


FLAGS = ["--ca", str(CA)]
ENDINGS = [
    ([], None, {}, "it may want TLS (--tls)"),
    (
        ["--tls"],
        None,
        {},
        "is not trusted (unable to get local issuer certificate); name its authority with --ca",
    ),
    (["--ca", str(OTHER_CA)], None, {}, "is not trusted"),
    ([*FLAGS, "--tls-name", "another.example"], None, {}, "is for another name"),
    (FLAGS, None, {"name": "expired"}, "is not trusted (certificate has expired)"),
    (FLAGS, CA, {}, "a certificate of yours (--cert and --key)"),
    ([*FLAGS, "--cert", f"{CERTS}/stranger.pem", "--key", f"{CERTS}/stranger.key"], CA, {}, "that it trusts"),
]


@pytest.mark.parametrize(("flags", "client_ca", "more", "hint"), ENDINGS, ids=[hint for *_, hint in ENDINGS])
async def test_the_command_line_says_what_is_wrong(capfd, flags, client_ca, more, hint):
    async with addresses(client_ca=client_ca, **more) as addr:
        assert await asyncio.to_thread(main, ["info", "--addr", addr, *flags]) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("penstock info: ")]
    assert len(lines) == 1
    assert hint in lines[0]


async def test_the_command_line_over_tls(capsys):
    own = ["--cert", str(CERT), "--key", str(KEY)]
    async with addresses(client_ca=CA) as addr:
        assert await asyncio.to_thread(main, ["generate", "x", "--addr", addr, *FLAGS, *own]) == 0
    assert capsys.readouterr().out == "yz\n"


async def test_tls_with_a_server_that_has_none(capsys):
    async with serving() as rig:
        assert await asyncio.to_thread(main, ["info", "--addr", rig.server.address, "--tls"]) == 1
    assert "does not use TLS" in capsys.readouterr().err
