"""A refused request is forgotten when its refusal has left, and not only at Python's next garbage collection,
which may be long after: some requests have megabytes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from penstock.runtime import errors
from penstock.service.rpcs.interceptors import Undecoded
from penstock.service.threads.lanes import Lanes
from tests.service.rig import failure_of, fake, generate, serving, stream, until
from tests.service.updatable import updatable
from tests.service.weights_rig import fake_tensors, push, steps


class Thing:
    """Stands for what a request holds."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_what_an_error_went_through(no_collector: None) -> None:
    things: list[weakref.ref[Thing]] = []

    def submit(*_: Any) -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        raise errors.UnknownModel("a", "b") from ValueError(thing)

    engine: Any = fake()
    engine.submit = submit
    async with serving(engine) as rig:
        for call in (rig.inference.Generate(generate("a")), rig.inference.Stream(stream("a")).read()):
            assert (await failure_of(call)).reason == "UNKNOWN_MODEL"
        await until(lambda: len(things) == 2 and not any(thing() for thing in things))


async def test_what_failed_in_a_thread(no_collector: None) -> None:
    lanes = Lanes()

    def work(thing: Thing) -> None:
        raise ValueError(thing)

    thing = Thing()
    seen = weakref.ref(thing)
    try:
        await lanes.convert(partial(work, thing), 1 << 20)
    except ValueError:
        pass
    else:
        raise AssertionError("it must fail")
    del thing
    await until(lambda: seen() is None)
    lanes.close()


@pytest.mark.parametrize("how", ["refused at its begin", "spoiled", "no commit", "left", "committed"])
async def test_an_upload(no_collector: None, how: str) -> None:
    """However it ends, nothing of it is kept: neither the upload, nor the bytes of its messages."""
    engine: Any = updatable()
    kept: list[weakref.ref[Any]] = []
    open_it = engine.updater.begin

    def begin_seen(options: Any, sent: Any) -> Any:
        upload = open_it(options, sent)
        kept.append(weakref.ref(upload._upload))
        return upload

    engine.updater.begin = begin_seen
    messages = steps(fake_tensors(1))
    if how == "refused at its begin":
        messages[0].begin.expected_generation = 9
    elif how == "spoiled":
        messages[2].chunk.offset = 1
    elif how == "no commit":
        messages.pop()
    received: list[weakref.ref[Any]] = []
    decode = Undecoded.decode

    def decode_seen(step: Undecoded) -> Any:
        received.append(weakref.ref(step))
        return decode(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Undecoded, "decode", decode_seen)
        async with serving(engine) as rig:
            if how == "left":
                call = rig.inference.UpdateWeights()
                await call.write(messages[0])
                await call.write(messages[1])
                await until(lambda: "write" in engine.updater.events)
                call.cancel()
            elif how == "committed":
                await push(rig, messages)
            else:
                await failure_of(push(rig, messages))
            await until(lambda: bool(received) and not any(one() for one in received))
            await until(lambda: not any(one() for one in kept))
