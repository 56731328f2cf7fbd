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
from penstock.service.threads.lanes import Lanes
from tests.service.rig import failure_of, fake, generate, serving, stream, until


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
