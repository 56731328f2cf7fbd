"""A thread that hangs is noticed, logged and reported to probes; one that only waits, or is slow, is not."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from typing import Any

import pytest

from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.loop.interface import Pulse
from penstock.runtime.loop.journal import Noted
from penstock.service.lifecycle import watchdog as watchdog_module
from penstock.service.lifecycle.watchdog import Stillness, Watchdog, stack_of
from penstock.service.server import LIVENESS, READINESS
from tests.service.lifecycle.test_health import NOT_SERVING, SERVING
from tests.service.rig import WAIT_S, collect, fake, generate, joined, serving, stream, until
from tests.support.models.toy import toy_engine
from tests.support.otlp import Recorder

LIMIT_S = 0.3


async def until_health(rig: Any, status: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while [await rig.health_of(name) for name in READINESS] != [status] * 3:  # noqa: ASYNC110 -- a probe
            await asyncio.sleep(0.02)


async def test_an_engine_that_hangs_is_not_ready_until_it_moves_again(monkeypatch, caplog):
    """The device does not return from a step. Waiting requests are served when it does."""
    engine = toy_engine(start=False)
    works, entered, gate = ModelRunner.wait, threading.Event(), threading.Event()

    def the_device_is_away(runner: ModelRunner, pending: Any) -> Any:
        entered.set()
        assert gate.wait(2 * WAIT_S)
        return works(runner, pending)

    async with serving(engine, watchdog_s=LIMIT_S) as rig:
        monkeypatch.setattr(ModelRunner, "wait", the_device_is_away)
        call = asyncio.ensure_future(
            rig.inference.Generate(generate(prompt_token_ids={"ids": [1]}, stopping={"max_tokens": 3}))
        )
        await until(entered.is_set)
        await until_health(rig, NOT_SERVING)
        assert await rig.health_of(LIVENESS) == SERVING
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert any("the engine's thread has work" in text and "the_device_is_away" in text for text in told)
        gate.set()
        await until_health(rig, SERVING)
        assert (await asyncio.wait_for(call, WAIT_S)).usage.completion_tokens == 3
    assert "the engine's thread moves again" in caplog.text


@pytest.mark.ci
async def test_an_engine_that_hangs_does_not_hold_up_the_stop(monkeypatch, caplog):
    monkeypatch.setattr(watchdog_module, "LIMIT_S", 0.3)
    engine = toy_engine(start=False)
    works, entered, gate = ModelRunner.wait, threading.Event(), threading.Event()

    def the_device_is_away(runner: ModelRunner, pending: Any) -> Any:
        entered.set()
        assert gate.wait(4 * WAIT_S)
        return works(runner, pending)

    async with serving(engine, grace_s=0.1) as rig:
        monkeypatch.setattr(ModelRunner, "wait", the_device_is_away)
        call = asyncio.ensure_future(rig.inference.Generate(generate(prompt_token_ids={"ids": [1]})))
        await until(entered.is_set)
        try:
            assert not await asyncio.wait_for(rig.server.stop(), 2 * WAIT_S)
            assert rig.server.engine_hangs
        finally:
            gate.set()
        await asyncio.wait({call})
        assert call.exception() is not None
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert any("the engine hangs" in text and "the_device_is_away" in text for text in told)


async def test_a_lock_that_nobody_gives_back_does_not_hold_up_the_stop(monkeypatch):
    monkeypatch.setattr(watchdog_module, "LIMIT_S", 0.3)
    engine = toy_engine(start=False)
    async with serving(engine, grace_s=0.1) as rig:
        with engine.guard.lock:
            assert not await asyncio.wait_for(rig.server.stop(), 2 * WAIT_S)
        assert rig.server.engine_hangs


async def test_a_lock_that_nobody_gives_back_does_not_hold_up_the_last_spans(monkeypatch):
    monkeypatch.setattr(watchdog_module, "LIMIT_S", 0.3)
    engine, recorder = toy_engine(start=False), Recorder()
    async with serving(engine, grace_s=0.1, tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate(prompt_token_ids={"ids": [1]}))
        with engine.guard.lock:
            engine.journal.write(Noted(0, None))  # whatever there is to read, readers are called for it
            assert not await asyncio.wait_for(rig.server.stop(), 2 * WAIT_S)
        assert rig.server.engine_hangs
    assert recorder.named("text_completion toy")


async def test_requests_that_wait_without_a_step_count_as_hanging():
    async with serving(fake(hold=True), watchdog_s=LIMIT_S) as rig:
        parts = asyncio.create_task(collect(rig.inference.Stream(stream("a"))))
        await until_health(rig, NOT_SERVING)
        rig.engine.release()
        await until_health(rig, SERVING)
        assert joined(await parts).outputs[0].text.endswith("z")


async def test_an_engine_without_work_does_not_hang(caplog):
    looks = itertools.count()
    told: list[bool] = []
    engine = fake()
    async with serving(engine) as rig:
        await rig.inference.Generate(generate("y"))
        await until(lambda: not engine.pulse().has_work)
        num_looks = 0

        def pulse() -> Pulse:
            nonlocal num_looks
            num_looks = next(looks)
            return engine.pulse()

        # Not the server's own watchdog, which would watch the request as well: on a busy machine that takes
        # long.
        watchdog = Watchdog(0.1, pulse, told.append)
        watchdog.start()
        await until(lambda: num_looks > 20)
        watchdog.stop()
    assert not told
    assert "did nothing" not in caplog.text


async def test_an_event_loop_that_hangs_is_named_in_the_log(caplog):
    told = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the event loop has not run" in record.getMessage():
                told.set()

    log = logging.getLogger("penstock.service.lifecycle.watchdog")
    listener = Listener()
    log.addHandler(listener)
    try:
        async with serving(watchdog_s=LIMIT_S):
            assert told.wait(WAIT_S)  # this blocks the event loop
            await until(lambda: "the event loop runs again" in caplog.text)
    finally:
        log.removeHandler(listener)
    assert "test_an_event_loop_that_hangs_is_named_in_the_log" in caplog.text


@pytest.mark.parametrize("watchdog_s", [0, LIMIT_S])
async def test_its_thread_ends_with_the_server(watchdog_s):
    def watchdogs() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "penstock-watchdog"]

    before = set(watchdogs())  # watchdogs of other tests, which are about to end
    async with serving(watchdog_s=watchdog_s):
        own = set(watchdogs()) - before
        assert len(own) == bool(watchdog_s)
    await until(lambda: not any(thread.is_alive() for thread in own))


def test_what_stands_still():
    stillness = Stillness(10, now_s=0)
    assert not stillness.look(1, progress=7, should_move=True)
    assert not stillness.look(11, progress=7, should_move=True), "ten seconds are not more than ten"
    assert stillness.look(11.5, progress=7, should_move=True)
    assert not stillness.look(12, progress=8, should_move=True), "it moves again"
    assert not stillness.look(30, progress=8, should_move=False), "it has no work"
    assert not stillness.look(39, progress=8, should_move=True), "it has had work for nine seconds"
    stillness.excuse(40)
    assert not stillness.look(50, progress=8, should_move=True)
    assert stillness.look(51, progress=8, should_move=True)
    stillness.excuse(70)
    assert stillness.look(71, progress=8, should_move=True), "nobody looked, and still it has not moved"
    assert not stillness.look(72, progress=9, should_move=True)


def test_the_stack_of_a_thread_that_is_gone():
    assert stack_of(None) == stack_of(-1) == "(there is no such thread)"
    assert "test_the_stack_of_a_thread_that_is_gone" in stack_of(threading.get_ident())
