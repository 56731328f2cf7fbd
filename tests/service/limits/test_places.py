"""Places in the queue: requests that are being prepared count, and a full queue says when to come back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.runtime.errors import QueueFull
from penstock.service.limits.admission import Places
from penstock.service.requests import generate as generate_module
from tests.service.codecs import byte_codec
from tests.service.fake import FakeEngine
from tests.service.rig import failure_of, fake, generate, serving, until


@pytest.fixture
def engine() -> Any:
    engine = FakeEngine(max_num_seqs=2, max_queued_requests=3, hold=True)
    engine.start()
    yield engine
    engine.shutdown()


def test_what_is_prepared_has_places_in_rows_and_queue(engine: Any) -> None:
    places = Places(engine, clock=lambda: 0.0)
    with places.taken(3), places.taken(2):
        assert places.preparing == 5
        with pytest.raises(QueueFull) as caught, places.taken(1):
            pass
        assert caught.value.limit == 3
        assert caught.value.retry_after_s is not None
    assert places.preparing == 0


def test_no_request_may_have_more_outputs_than_the_queue(engine: Any) -> None:
    places = Places(engine)
    with pytest.raises(QueueFull), places.taken(4):
        pass


def test_whatever_is_raised_gives_the_places_back(engine: Any) -> None:
    places = Places(engine)
    with pytest.raises(KeyError), places.taken(3):
        raise KeyError
    assert places.preparing == 0


def test_the_engine_refuses_with_the_measured_time(engine: Any) -> None:
    now = 0.0
    places = Places(engine, clock=lambda: now)
    with places.taken(2):
        pass
    for _ in range(100):
        now += 0.5
        places.left(1)
        with places.taken(1):
            pass
    with pytest.raises(QueueFull) as caught, places.taken(1):
        raise QueueFull(3)
    assert caught.value.retry_after_s == pytest.approx(0.5, rel=0.1)
    assert f"; retry in {caught.value.retry_after_s:.2g} s" in str(caught.value)


async def test_requests_whose_prompts_are_tokenized_fill_the_queue(monkeypatch) -> None:
    """While the thread that tokenizes is blocked, only as many requests are accepted as rows and queue have
    room for.
    """
    monkeypatch.setattr(generate_module, "INLINE_CHARS", 0)
    gate = threading.Semaphore(0)
    engine = fake(codec=byte_codec(), max_num_seqs=1, max_queued_requests=2)
    monkeypatch.setattr(
        engine.text, "encode", lambda text, **_: gate.acquire(timeout=60) and [*text.encode()]
    )
    async with serving(engine) as rig:
        try:
            calls = [asyncio.ensure_future(rig.inference.Generate(generate("y"))) for _ in range(3)]
            await until(lambda: rig.server.admission.active_work == 3)
            failure = await failure_of(rig.inference.Generate(generate("y")))
            assert (failure.reason, dict(failure.info.metadata)) == ("QUEUE_FULL", {"limit": "2"})
            assert failure.retry_after_s == 1.0, "nothing has ended yet, so nothing is measured"
            waiting = set(calls)
            while waiting:  # one by one: the engine takes two before it has given the first its row
                gate.release()
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                assert [(await call).outputs[0].text for call in done] == ["z"] * len(done)
        finally:
            gate.release(len(calls) + 1)
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"


async def test_the_full_queue_tells_later_times_to_later_callers() -> None:
    engine = fake(hold=True, max_num_seqs=1, max_queued_requests=4)
    async with serving(engine) as rig:
        calls = [asyncio.ensure_future(rig.inference.Generate(generate("x"))) for _ in range(5)]
        await until(lambda: len(engine.seen) == 5)
        engine.step(3)  # after "y", "z" and the end token the first request is done, and the pace is known
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        calls.append(asyncio.ensure_future(rig.inference.Generate(generate("x"))))
        await until(lambda: len(engine.seen) == 6)
        times = [
            (await failure_of(rig.inference.Generate(generate("x")))).retry_after_s or 0 for _ in range(3)
        ]
        assert 0.1 <= times[0] < times[1] < times[2] <= 60
        engine.release()
        await asyncio.gather(*calls)
