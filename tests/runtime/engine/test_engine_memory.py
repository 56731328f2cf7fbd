"""When an engine has ended, for whatever reason, it leaves nothing on the device, and nothing of Python's."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest

from penstock.runtime.errors import EngineFailure
from penstock.runtime.execution.runner import ModelRunner
from tests.support.collector import GREEDY_PARAMS, at_gate, long
from tests.support.models.toy import toy_engine


class PanicException(BaseException):
    """Stands for pyo3's exception of this name: a panic in Rust, which `except Exception` does not catch."""


def test_a_closed_engine_leaves_nothing_that_python_never_collects() -> None:
    """A start freezes what is there. A program may start one engine after another."""
    before = gc.get_freeze_count()
    engine = toy_engine()
    engine.shutdown()
    assert gc.get_freeze_count() <= before


def num_live() -> int:
    gc.collect()
    return len(jax.live_arrays())


@pytest.mark.parametrize("breaks", [None, "execute_async", "wait"])
def test_nothing_is_left_on_the_device_after_shutdown(
    breaks: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds although the engine, and the error it died of, are still referenced."""
    before = num_live()
    engine = toy_engine()
    try:
        engine.generate([1, 2, 3], sampling=GREEDY_PARAMS, stopping=long(9))
        engine.update_weights({"offset": np.ones((1,), np.float32)}, label="new").result(60)
        gate = at_gate(engine)
        if breaks is not None:
            works = getattr(ModelRunner, breaks)

            def panic(runner: ModelRunner, step: object) -> None:
                logits_and_the_like = works(runner, step)
                raise PanicException(f"after {type(logits_and_the_like).__name__}")

            monkeypatch.setattr(ModelRunner, breaks, panic)
        gate.open()
        last = gate.sink.last("held")
        assert (last.error is None) == (breaks is None)
        assert num_live() > before
    finally:
        engine.shutdown()
    assert (engine.failure is None) == (breaks is None)
    assert last.error is None or isinstance(last.error, EngineFailure)
    assert num_live() == before
