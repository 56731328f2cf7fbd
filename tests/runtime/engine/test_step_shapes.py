"""What the runner says of the programs of its steps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.loop.journal import Entry
from tests.support.collector import Collector, submit
from tests.support.models.toy import toy_engine


def test_a_step_for_which_something_is_compiled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    runner, entries, sink = engine.runner, list[Entry](), Collector()
    engine.journal.read_by(entries.extend)
    dispatch = runner._dispatch

    def compiles_at_step_2(plan: Any, packed: Any) -> Any:
        if plan.step_id == 2:
            jax.jit(lambda x: x * 3 + 7)(np.ones(5, np.float32))
        return dispatch(plan, packed)

    monkeypatch.setattr(runner, "_dispatch", compiles_at_step_2)
    try:
        submit(engine, sink, "r", [1, 2, 3], tokens=6)
        sink.last("r")
        engine.journal.flush()
    finally:
        engine.shutdown()
    records = [entry for entry in entries if isinstance(entry, StepRecord)]
    compiled = {record.step_id: record.shape.compiled for record in records if record.shape is not None}
    assert compiled[2] is True
    assert [step_id for step_id, was_compiled in compiled.items() if was_compiled] == [2]
    assert len(compiled) > 2
    assert all(record.shape is not None and record.shape.tokens >= record.num_tokens for record in records)
