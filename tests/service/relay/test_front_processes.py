"""Front processes begin, die and end: what their clients see then, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.listening.listeners import HeldPort
from penstock.service.options import ServerOptions
from penstock.service.relay import processes
from penstock.service.relay.processes import LinkServer
from penstock.service.server import PenstockServer
from penstock.v1 import inference_pb2_grpc
from tests.service.cli.test_serve import START_S, fake_process
from tests.service.h2peer import Peer
from tests.service.relay.test_relay_server import nothing_left
from tests.service.rig import WAIT_S, Rig, failure_of, fake, generate, serving, stream, until
from tests.service.tls_rig import install, listening, secure, shown


def fronts(rig: Rig) -> LinkServer:
    made: Any = rig.server.addresses.servers[0]
    assert isinstance(made, LinkServer)
    return made


def is_alive(pid: int) -> bool:
    """Say whether the process runs. One that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def served(rig: Rig) -> str:
    """Return the text that a new connection gets, as soon as it gets one."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with asyncio.timeout(WAIT_S), grpc.aio.insecure_channel(rig.server.address, options=own) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        reply = await stub.Generate(generate("y"), wait_for_ready=True)
        return str(reply.outputs[0].text)


async def test_a_front_process_that_is_killed_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its calls end at their clients and in the engine, and another process serves the port."""
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    async with serving(fake(hold=True), front_processes=1) as rig:
        call = rig.inference.Stream(stream("a"))
        assert (await call.read()).HasField("started")
        (process,) = fronts(rig).processes
        killed = process.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        assert (await failure_of(call.read())).code is grpc.StatusCode.UNAVAILABLE
        await nothing_left(rig)
        assert len(rig.engine.cancelled) == 1
        rig.engine.release()
        assert await served(rig) == "z"
        assert process.pid not in (None, killed)
    assert f"front process 1 ended with the code {-signal.SIGKILL}" in caplog.text


@pytest.mark.ci
async def test_a_front_process_that_hangs_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here it is stopped by a signal. The limit is that of the watchdog."""
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    async with serving(front_processes=1, watchdog_s=2.0) as rig:
        (process,) = fronts(rig).processes
        stopped = process.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: process.pid not in (None, stopped))
        assert await served(rig) == "z"
    assert "front process 1 has done nothing for 2 s" in caplog.text


@pytest.mark.ci
async def test_a_front_process_ends_by_itself_with_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system closes the link of an engine's process that dies."""
    async with serving(front_processes=1) as rig:
        (process,) = fronts(rig).processes
        pid, link = process.pid, vars(process)["_link"]
        assert pid is not None
        with monkeypatch.context() as patched:
            patched.setattr(process, "kill", lambda: None)
            link.close()
            await until(lambda: not is_alive(pid))


@pytest.mark.ci
async def test_where_front_processes_die_at_once_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.001)
    async with serving(front_processes=1) as rig:
        (process,) = fronts(rig).processes
        monkeypatch.setattr(processes, "PROGRAM", "no.such.program")
        process.kill()
        await asyncio.wait_for(rig.server.wait_for_failure(), 3 * WAIT_S)
        assert rig.server.addresses.port is not None


@pytest.mark.ci
async def test_a_front_process_that_cannot_listen_says_why(tmp_path: Path) -> None:
    """Its certificate has gone since the server was made."""
    install(tmp_path, "server")
    server = PenstockServer(ServerOptions(port=0, listen=listening(tmp_path), front_processes=2))
    (tmp_path / "server.key").unlink()
    try:
        with pytest.raises(ConfigError, match=r"a front process cannot listen: tls_key: .* cannot be read"):
            await asyncio.wait_for(server.start(), WAIT_S)
    finally:
        await server.stop()


@pytest.mark.ci
async def test_a_port_that_front_processes_serve_is_taken_for_others() -> None:
    async with serving(front_processes=2) as rig:
        assert rig.server.port is not None
        for number in (0, 1):
            with pytest.raises(ConfigError, match="Address already in use; choose another with --port"):
                PenstockServer(ServerOptions(port=rig.server.port, front_processes=number))
    HeldPort("127.0.0.1", rig.server.port, flag="--port").close()


async def test_a_held_port_is_taken_for_others_while_no_front_process_listens() -> None:
    """As before the first one does, and after the last one has died. Otherwise two servers that start at the
    same time would share the port, and each would get some of the other's calls.
    """
    server = PenstockServer(ServerOptions(port=0, front_processes=1))
    try:
        for number in (0, 1):
            with pytest.raises(ConfigError, match="Address already in use; choose another with --port"):
                PenstockServer(ServerOptions(port=server.port, front_processes=number))
    finally:
        await server.stop()


def test_a_port_is_held_although_connections_of_an_earlier_server_linger_there() -> None:
    """The system keeps them for a minute, at the side that closed first. A server must be able to restart."""
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        where = earlier.getsockname()
        with socket.create_connection(where) as client:
            earlier.accept()[0].close()
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="Address already in use"):
        plain.bind(where)
    HeldPort(*where, flag="--port").close()


@pytest.mark.ci
async def test_a_replaced_certificate_is_shown_by_all_front_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While only half of it is replaced, the log of the engine's process tells what each of them found."""
    install(tmp_path, "server")
    async with serving(listen=listening(tmp_path), front_processes=2) as rig:
        assert {await shown(rig.server.port) for _ in range(6)} == {"first"}
        install(tmp_path, "renewed", only="pem")
        assert {await shown(rig.server.port) for _ in range(6)} == {"first"}
        told = re.compile(r"^front process [12]: the TLS files changed and cannot be used")
        await until(lambda: any(map(told.match, caplog.messages)))
        install(tmp_path, "renewed")
        assert {await shown(rig.server.port) for _ in range(6)} == {"second"}
        async with secure(rig.server.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            assert (await stub.Generate(generate("y"))).outputs[0].text == "z"


@pytest.mark.ci
async def test_each_front_process_takes_connections() -> None:
    """The system chooses one for each connection, which with twenty of them is never always the same one."""
    async with serving(front_processes=2) as rig, contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(Peer(rig.server.address))
        pids = [process.pid for process in fronts(rig).processes]
        assert all(pid is not None and num_sockets(pid) > 3 for pid in pids)


def num_sockets(pid: int) -> int:
    """How many sockets the process has open."""
    return sum(os.readlink(file).startswith("socket:") for file in Path(f"/proc/{pid}/fd").iterdir())


def fronts_of(pid: int) -> list[int]:
    """Return the ids of the front processes of a server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(") ")[2].split()[1]
            if int(parent) == pid and processes.PROGRAM in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    asyncio.run(until(condition))


@pytest.mark.ci
def test_sigterm_finishes_what_runs_in_front_processes() -> None:
    """It comes to all processes of the group, as from a terminal or a service manager."""
    with fake_process("--port", "0", "--grace", "60", "--front-processes", "2") as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        pids = fronts_of(server.popen.pid)
        assert len(pids) == 2
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Stream(stream("a"))
            next(call)
            for pid in (*pids, server.popen.pid):
                os.kill(pid, signal.SIGTERM)
            server.wait_for("stopping")
            while (failure := stub.Generate.future(generate("a")).exception(20)) is None:
                pass  # it came before the drain began, and was still accepted
            assert isinstance(failure, grpc.RpcError)
            assert failure.code().name in ("UNAVAILABLE", "CANCELLED")
            text = "".join(message.delta.text for message in call)
        assert text == "bcdefghijklmnopqrstuvwxyz"
        assert server.wait() == 0
        assert not any(map(is_alive, pids))
    assert "Traceback" not in server.output


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.sweep)])
def test_a_signal_to_all_processes_ends_a_server_that_starts(number: signal.Signals) -> None:
    """Front processes are still importing modules then."""
    with fake_process("--port", "0", "--front-processes", "1") as server:
        deadline = time.monotonic() + START_S  # a busy machine takes long to import a server's modules
        while not (pids := fronts_of(server.popen.pid)):
            assert server.popen.poll() is None, server.output
            assert time.monotonic() < deadline, server.output
            time.sleep(0.005)
        for pid in (*pids, server.popen.pid):
            os.kill(pid, number)
        assert server.wait() == 0
    assert "Traceback" not in server.output


@pytest.mark.sweep
def test_front_processes_end_with_the_engine_s_process() -> None:
    with fake_process("--port", "0", "--front-processes", "2") as server:
        server.wait_for("ready on")
        pids = fronts_of(server.popen.pid)
        assert len(pids) == 2
        server.popen.kill()
        server.popen.wait(20)
        wait_until(lambda: not any(map(is_alive, pids)))
