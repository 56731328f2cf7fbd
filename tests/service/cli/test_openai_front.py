"""Keeps an OpenAI front alive beside a server: real fronts, whose server is not there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import signal
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.openai.serving import worker
from penstock.openai.settings import Settings
from penstock.runtime.errors import ConfigError
from penstock.server_cli.processes import openai_front
from penstock.server_cli.processes.openai_front import OpenAIFront

WAIT_S = 60.0
SETTINGS = Settings(addr="unix:/nonexistent", port=0, grace_s=0.0)


@contextlib.asynccontextmanager
async def kept(settings: Settings = SETTINGS, **more: str) -> AsyncIterator[OpenAIFront]:
    """Hold a front that is started."""
    front = OpenAIFront(settings, **more)
    front.start()
    try:
        async with asyncio.timeout(WAIT_S):
            yield front
    finally:
        await front.close()


async def health_of(front: OpenAIFront) -> httpx.Response:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return await http.get(f"{front.url}/health")


async def until_another(front: OpenAIFront, than: int | None) -> int:
    while front.pid is None or front.pid == than:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return front.pid


async def test_a_front_that_dies_is_replaced_and_nobody_who_comes_meanwhile_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with kept() as front:
        await front.listening()
        first = front.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        # A connection is made at once, also while nobody is there to accept it.
        assert (await health_of(front)).json() == {"status": "unavailable"}
        assert await until_another(front, None) != first
    assert "the OpenAI front was ended by signal 9; its calls are lost, another starts" in caplog.text


@pytest.mark.ci
async def test_signals_that_end_a_server_do_not_end_its_front(caplog: pytest.LogCaptureFixture) -> None:
    """A service manager sends them to all processes; the server tells its front when it is time."""
    async with kept() as front:
        await front.listening()
        pid = front.pid
        assert pid is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        assert (await health_of(front)).status_code == 503
        assert front.pid == pid
        await front.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(httpx.ConnectError):
            await health_of(front)
    assert not caplog.records  # it was no death


@pytest.mark.ci
async def test_a_front_that_is_stopped_while_it_starts_ends_too() -> None:
    async with kept() as front:
        await until_another(front, None)
        await front.close()
        assert front.pid is None


async def test_a_front_that_cannot_start_is_a_failure_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with kept(program="penstock.openai.no_such_module") as front:
        await front.wait_for_failure()
        assert front.pid is None
    assert "the OpenAI front ended with code 1 before it took calls, so the server ends" in caplog.text


@pytest.mark.ci
async def test_fronts_that_die_again_and_again_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(openai_front, "MOST_FAILURES", 2)
    async with kept() as front:
        await front.listening()
        failing = asyncio.create_task(front.wait_for_failure())
        last = None
        for _ in range(2):
            assert not failing.done()
            last = await until_another(front, last)
            os.kill(last, signal.SIGKILL)
        await failing
    assert "the OpenAI front was ended by signal 9, 2 times in a row" in caplog.text


async def test_a_defect_ends_the_server_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the server would go on without its front, and nobody would know."""

    def defect(settings: Settings) -> bytes:
        raise RuntimeError("a defect")

    monkeypatch.setattr(pickle, "dumps", defect)
    async with kept() as front:
        await front.wait_for_failure()
        assert front.pid is None
    assert "no OpenAI front can be kept alive, so the server ends" in caplog.text


async def test_a_taken_port_is_told_with_the_flag() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{taken}: .*--openai-port"):
            OpenAIFront(dataclasses.replace(SETTINGS, port=taken))


def test_the_front_is_a_worker_of_penstock_openai() -> None:
    assert worker.__name__ == openai_front.PROGRAM
    assert openai_front.READY == worker.READY
