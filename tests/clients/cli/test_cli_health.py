"""`penstock health` against real servers in every state."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.cli.__main__ import main
from tests.service.rig import WAIT_S, fake, serving


async def run(*argv: object) -> int:
    async with asyncio.timeout(3 * WAIT_S):
        return await asyncio.to_thread(main, ["health", *map(str, argv)])


@pytest.mark.parametrize(
    ("service", "starting", "started"),
    [("", 1, 0), ("penstock.v1.InferenceService", 1, 0), ("liveness", 0, 0), ("no such", 1, 1)],
)
async def test_the_exit_code_is_the_status(capsys, service, starting, started):
    said = {"no such": ("SERVICE_UNKNOWN", "SERVICE_UNKNOWN"), "liveness": ("SERVING", "SERVING")}
    before, after = said.get(service, ("NOT_SERVING", "SERVING"))
    async with serving(start=False) as rig:
        asked = ("--addr", rig.server.address, "--service", service)
        assert await run(*asked) == starting
        assert capsys.readouterr().out == f"{before}\n"
        await rig.server.start_engine()
        assert await run(*asked) == started
        assert capsys.readouterr().out == f"{after}\n"


async def test_it_waits_until_the_server_is_ready(capsys):
    async with serving(start=False) as rig:
        waiting = asyncio.create_task(run("--wait", "--addr", rig.server.address))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await rig.server.start_engine()
        assert await waiting == 0
    assert capsys.readouterr().out == "SERVING\n"


async def test_it_waits_until_there_is_a_server(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    waiting = asyncio.create_task(run("--wait", "--addr", f"127.0.0.1:{port}"))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    async with serving(port=port):
        assert await waiting == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("SERVING\n", "")


async def test_it_waits_no_longer_than_it_is_told(capsys):
    async with serving(start=False) as rig:
        assert await run("--wait", "--timeout", "0.5", "--addr", rig.server.address) == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"


async def test_a_name_that_the_server_does_not_know_is_not_waited_for(capsys):
    async with serving() as rig:
        assert await run("--wait", "--service", "livenes", "--addr", rig.server.address) == 1
    assert capsys.readouterr().out == "SERVICE_UNKNOWN\n"


async def test_nobody_there(capsys):
    with socket.socket() as taken:  # no server listens there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await run("--addr", address) == 3
        shown = capsys.readouterr()
        assert shown.out == ""
        assert f"penstock health: no server at {address}" in shown.err
        assert await run("--wait", "--timeout", "0.5", "--addr", address) == 3


async def test_somebody_who_does_not_answer(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await run("--timeout", "0.5", "--addr", address) == 3
    assert capsys.readouterr().err.startswith("penstock health: ")


async def test_a_dead_engine(capsys):
    async with serving(fake()) as rig:
        rig.engine.die()
        await rig.server.wait_for_failure()
        assert await run("--addr", rig.server.address) == 1
        assert await run("--addr", rig.server.address, "--service", "liveness") == 0
    assert capsys.readouterr().out == "NOT_SERVING\nSERVING\n"


async def test_wrong_usage(capsys):
    assert await run("--cert", "x") == 2
    assert "cert and key: must be given together" in capsys.readouterr().err
