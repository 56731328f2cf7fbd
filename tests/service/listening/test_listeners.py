"""Addresses: the file of a Unix socket, who has which port, and where a server may listen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions
from penstock.service.server import PenstockServer
from penstock.v1 import inference_pb2_grpc
from tests.service.rig import collect, generate, joined, serving, stream
from tests.service.tls_rig import CA, CERTS


async def text_of(address: str) -> str:
    """Return the answer of one call at the address."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        reply = await stub.Generate(generate("y"), timeout=20)
        return str(reply.outputs[0].text)


def at(path: Path, **options: Any) -> ListenOptions:
    return ListenOptions(unix_socket=path, **options)


def build(path: Path, **options: Any) -> PenstockServer:
    return PenstockServer(ServerOptions(port=None, listen=at(path, **options)))


@pytest.mark.parametrize("name", ["s", "with space", "100%", "ä#?"])
async def test_a_unix_socket_beside_the_port(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    async with serving(listen=at(path)) as rig:
        port, unix = rig.server.addresses.main
        assert await text_of(port) == await text_of(unix) == "z"
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert os.listdir(tmp_path) == [name], "nothing else is left"
    assert not path.exists()


async def test_a_unix_socket_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path may be relative; its address is not."""
    monkeypatch.chdir(tmp_path)
    async with serving(port=None, listen=at(Path("s"), unix_socket_mode=0o660)) as rig:
        assert rig.server.port is None
        assert rig.server.address == f"unix:{tmp_path}/s"
        assert stat.S_IMODE((tmp_path / "s").lstat().st_mode) == 0o660
        async with asyncio.timeout(20):
            messages = await collect(rig.inference.Stream(stream("y")))
        assert joined(messages).outputs[0].text == "z"


async def test_what_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.is_socket()
    async with serving(port=None, listen=at(path)) as rig:
        assert await text_of(rig.server.address) == "z"


async def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serving(port=None, listen=at(path)) as rig:
        with pytest.raises(
            ConfigError, match=r"cannot listen on unix:.*/s: another server listens there; .*--unix-socket"
        ):
            build(path)
        assert await text_of(rig.server.address) == "z"


async def test_a_socket_in_use_with_a_full_queue_is_in_use(tmp_path: Path) -> None:
    """Its server is too busy to accept connections, and a connection would have to wait."""
    path = tmp_path / "s"
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        with pytest.raises(BlockingIOError):
            connect_often(path, stack)
        with pytest.raises(ConfigError, match="another server listens there"):
            build(path)


def connect_often(path: Path, stack: contextlib.ExitStack) -> None:
    for _ in range(100):
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.setblocking(False)
        waiting.connect(str(path))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
async def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="s exists and is not a socket"):
        build(path)
    assert path.is_symlink() or path.is_dir() or path.read_text() == "mine"


async def test_a_socket_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unix_socket: .* cannot be made: No such file or directory"):
        build(tmp_path / "none" / "s")
    with pytest.raises(ConfigError, match="is too long: the system allows 107 bytes"):
        build(tmp_path / ("s" * 107))
    assert not os.listdir(tmp_path)


async def test_a_later_server_keeps_its_socket_when_the_earlier_one_stops(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serving(port=None, listen=at(path)) as first:
        path.unlink()
        async with serving(port=None, listen=at(path)) as second:
            await first.server.stop()
            assert await text_of(second.server.address) == "z"
        assert not path.exists()


async def test_no_socket_is_left_by_a_server_that_does_not_come_up(tmp_path: Path) -> None:
    async with serving() as taken:
        with pytest.raises(
            ConfigError, match=r"cannot listen on .*: Address already in use; .*--control-port"
        ):
            build(tmp_path / "s", control_port=taken.server.port)
    assert not os.listdir(tmp_path)


# -- options --


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"port": None}, "port: must be given if there is no unix_socket"),
        ({"host": "[::1]"}, r"host: must be a name or an IP address without brackets or port, not '\[::1\]'"),
        ({"host": "localhost:50051"}, "host: must be a name or an IP address without brackets or port"),
        ({"host": "unix:/run/s"}, "host: .*; a Unix socket is a unix_socket"),
        ({"listen": ListenOptions(unix_socket=Path())}, "unix_socket: must be the path of a file"),
        ({"listen": ListenOptions(unix_socket_mode=0o1777)}, "unix_socket_mode: must be from 0 to 777"),
        ({"listen": ListenOptions(control_port=65536)}, "control_port: must be from 0 to 65535"),
        ({"listen": ListenOptions(control_host="::1")}, "control_host: needs a control_port"),
        ({"listen": ListenOptions(control_port=0, control_host="[::1]")}, "control_host: must be a name"),
        ({"listen": ListenOptions(tls_cert=Path("c"))}, "tls_key: is required with tls_cert"),
        ({"listen": ListenOptions(tls_key=Path("k"))}, "tls_cert: is required with tls_key"),
        ({"listen": ListenOptions(client_ca=Path("a"))}, "client_ca: needs tls_cert and tls_key"),
        (
            {
                "port": None,
                "listen": ListenOptions(unix_socket=Path("s"), tls_cert=Path("c"), tls_key=Path("k")),
            },
            "tls_cert: needs a port, because a Unix socket does not",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        ServerOptions(**options)


TLS = {"tls_cert": CERTS / "server.pem", "tls_key": CERTS / "server.key"}


@pytest.mark.parametrize(
    ("host", "listen", "lacking"),
    [
        ("0.0.0.0", {}, ["TLS", "callers"]),
        ("::", {}, ["TLS", "callers"]),
        ("example.org", {}, ["TLS", "callers"]),
        ("0.0.0.0", TLS, ["callers"]),
        ("0.0.0.0", TLS | {"client_ca": CA}, []),
        ("0.0.0.0", {"insecure": True}, []),
        ("0.0.0.0", TLS | {"insecure": True}, []),
        ("127.0.0.1", {}, []),
        ("127.9.9.9", {}, []),
        ("::1", {}, []),
        ("localhost", {}, []),
        ("127.0.0.1", {"insecure": True}, []),
        ("127.0.0.1", {"control_port": 0}, []),
        ("127.0.0.1", {"control_port": 0, "control_host": "10.0.0.1"}, ["TLS", "callers"]),
    ],
)
def test_what_others_can_reach_needs_protection(
    host: str, listen: dict[str, Any], lacking: list[str]
) -> None:
    """The message says what is missing, where, and what to do about it."""
    try:
        ServerOptions(host=host, listen=ListenOptions(**listen))
    except ConfigError as error:
        text = str(error)
    else:
        text = ""
    reachable = listen.get("control_host", host)
    assert (f"host: {reachable} can be reached from other machines" in text) == bool(lacking)
    assert ("no TLS (--tls-cert and --tls-key)" in text) == ("TLS" in lacking)
    assert ("no way to tell callers apart (--keys or --client-ca)" in text) == ("callers" in lacking)
    assert ("--insecure" in text) == bool(lacking)


def test_no_port_needs_no_protection(tmp_path: Path) -> None:
    options = ServerOptions(host="0.0.0.0", port=None, listen=at(tmp_path / "s"))
    assert options.address() == f"unix:{tmp_path}/s"
    assert options.lacking == []


def test_addresses_as_people_write_them() -> None:
    assert ServerOptions(host="::1").address() == "[::1]:50051"
    assert ServerOptions(host="localhost").address(7) == "localhost:7"
