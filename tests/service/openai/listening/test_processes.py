"""`penstock openai` as processes: workers on one port, their metrics, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.__main__ import main
from tests.service.rig import WAIT_S, Rig, fake, serving

LIMIT_S = 3 * WAIT_S
TOTAL = re.compile(
    r'^penstock_openai_requests_total\{code="",endpoint="/v1/models",status="200"\} ([\d.]+)$', re.MULTILINE
)


@dataclass
class Program:
    """A front that runs as its command does."""

    process: asyncio.subprocess.Process
    url: str
    server: Rig

    def workers(self) -> list[int]:
        """Return the process ids of its workers."""
        pid, found = self.process.pid, []
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if b"serving.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    async def ended(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def program(*flags: str, engine: Any = None) -> AsyncIterator[Program]:
    """Run the command in front of a server on a fake engine."""
    async with serving(engine or fake()) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "penstock.cli", "openai", "--addr", server.server.address, "--port", "0", *flags),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(LIMIT_S):
                line = (await process.stdout.readline()).decode()
            found = re.fullmatch(r"penstock: openai on (http://127\.0\.0\.1:\d+)\n", line)
            assert found is not None, line
            yield Program(process, found[1], server)
        finally:
            if process.returncode is None:
                process.kill()
            async with asyncio.timeout(LIMIT_S):
                await process.communicate()  # to the end of its output, which its workers write to as well


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def asked(url: str) -> None:
    """One request over a connection of its own, so that any worker may get it."""
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        assert (await http.get(f"{url}/v1/models")).status_code == 200


async def until_total(url: str, wanted: float) -> None:
    """Wait until any worker tells of so many requests of all: a request counts just after its reply."""
    async with asyncio.timeout(LIMIT_S):
        while await total(url) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def total(url: str) -> float:
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        found = TOTAL.search((await http.get(f"{url}/metrics")).text)
    return 0.0 if found is None else float(found[1])


@pytest.mark.sweep
async def test_workers_share_port_and_metrics_and_are_replaced() -> None:
    async with program("--workers", "2") as front:
        first = front.workers()
        assert len(first) == 2
        await asyncio.gather(*(asked(front.url) for _ in range(20)))
        await until_total(front.url, 20.0)
        os.kill(first[0], signal.SIGKILL)
        await until(lambda: len(set(front.workers()) - {first[0]}) == 2)
        await asked(front.url)
        await until_total(front.url, 21.0)  # what the dead worker counted still counts
        second = front.workers()
        front.process.terminate()
        assert await front.ended() == 0
        assert not [pid for pid in second if is_alive(pid)]


@pytest.mark.sweep
async def test_workers_end_when_their_parent_is_killed() -> None:
    async with program("--workers", "2") as front:
        workers = front.workers()
        front.process.kill()
        await until(lambda: not [pid for pid in workers if is_alive(pid)])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.sweep
async def test_sigterm_lets_a_stream_end_and_a_second_signal_does_not() -> None:
    engine = fake(hold=True)
    async with program("--workers", "2", engine=engine) as front, httpx.AsyncClient(timeout=LIMIT_S) as http:
        engine.step(2)
        body = {"model": "fake", "prompt": "a", "max_tokens": 5, "stream": True}
        async with http.stream("POST", f"{front.url}/v1/completions", json=body) as reply:
            lines = reply.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            front.process.terminate()
            await until_draining(front.url)
            engine.release()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await front.ended() == 0
    engine = fake(hold=True)
    async with program(engine=engine) as front, httpx.AsyncClient(timeout=LIMIT_S) as http:
        asking = asyncio.create_task(http.post(f"{front.url}/v1/completions", json=body | {"stream": False}))
        await until(lambda: engine.load().num_running == 1)
        front.process.terminate()
        await until_draining(front.url)
        front.process.terminate()
        assert await front.ended() == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            await asking
        await until(lambda: engine.load().num_running == 0)


async def until_draining(url: str) -> None:
    async with httpx.AsyncClient(timeout=LIMIT_S) as http, asyncio.timeout(LIMIT_S):
        while (await http.get(f"{url}/health")).json() != {"status": "draining"}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--host", "0.0.0.0"), "--host: 0.0.0.0 can be reached from other machines"),
        (("--addr", "example.org:1"), "--addr: keys would be sent to example.org:1 in plaintext"),
        (("--host", "::", "--token", "abc"), "--token: requests that bring no key would use it"),
        (("--workers", "0"), "--workers: must be from 1 to 256"),
        (("--tls-cert", "/nothing"), "--tls-cert: must be given together with --tls-key"),
        (("--tls-cert", "/nothing", "--tls-key", "/nothing"), "cannot be read"),
        (("--cors-origin", "example.org"), "--cor"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_flags_that_cannot_work(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["openai", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["openai", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
