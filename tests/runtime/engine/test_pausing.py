"""A pause frees memory of the device and a resume restores it. Tokens stay the formula's, and nothing is
compiled again. The CPU stands in for an accelerator whose weights are moved to host memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from penstock.runtime import Engine
from penstock.runtime.inprocess.async_engine import AsyncEngine
from penstock.runtime.loading.served_model import ServedModel
from penstock.runtime.loop.interface import InFlightPolicy, InFlightReport, Paused
from tests.support.collector import GREEDY_PARAMS, Collector, at_gate, long, submit
from tests.support.models.hybrid import hybrid_model, hybrid_tokens
from tests.support.models.toy import toy_backend, toy_engine, toy_model, toy_tokens

TOKENS = 40


def engine_of(model: ServedModel, *, host_memory: str | None = "pinned_host") -> Engine:
    return toy_engine(model, backend=dataclasses.replace(toy_backend(), host_memory=host_memory))


def bytes_of(tree: object) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(tree))


def memory_kinds(engine: Engine) -> set[str | None]:
    return {leaf.sharding.memory_kind for leaf in engine.runner.device.leaves}


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        pytest.param(toy_model, toy_tokens, id="pages"),
        pytest.param(hybrid_model, hybrid_tokens, id="pages and state by slot", marks=pytest.mark.ci),
    ],
)
def test_a_paused_engine_goes_on_with_the_same_tokens(
    model: Callable[[], ServedModel], tokens: Callable[..., list[int]]
) -> None:
    engine = engine_of(model())
    try:
        device = engine.runner.device
        num_bytes = bytes_of(device.kv), bytes_of(device.leaves)
        cache = jax.tree.leaves(device.kv)
        gate, sink = at_gate(engine, tokens=TOKENS), Collector()
        pausing = engine.pause(InFlightPolicy.RECOMPUTE, free_kv_cache=True, offload_weights=True)
        gate.open()
        assert pausing.result(60) == Paused(InFlightReport(recomputed=1), sum(num_bytes))
        assert engine.is_paused
        assert all(array.is_deleted() for array in cache)
        assert memory_kinds(engine) == {"pinned_host"}
        again = engine.pause(InFlightPolicy.RECOMPUTE, free_kv_cache=True, offload_weights=True)
        assert again.result(60).freed_bytes == 0
        submit(engine, sink, "late", [2, 3], tokens=TOKENS)
        engine.resume().result(60)
        assert memory_kinds(engine) == {"device"}
        assert bytes_of(device.kv) == num_bytes[0]
        gate.sink.last("held")
        sink.last("late")
        assert gate.sink.tokens("held") == list(tokens((1,), TOKENS))
        assert sink.tokens("late") == list(tokens((2, 3), TOKENS))
        assert engine.compiles_after_warmup == 0
    finally:
        engine.shutdown()


def test_weights_that_are_not_on_the_device_can_be_updated() -> None:
    """The new weights come to the device with the resume, and requests then run on them."""
    engine = engine_of(toy_model())
    try:
        gate = at_gate(engine, tokens=TOKENS)
        pausing = engine.pause(InFlightPolicy.KEEP, offload_weights=True)
        gate.open()
        assert pausing.result(60) == Paused(InFlightReport(kept=1), 4)
        made = gate.sink.tokens("held")
        tensors = {"offset": np.full((1,), 5, np.float32)}
        engine.update_weights(tensors, label="five", in_flight=InFlightPolicy.KEEP).result(60)
        assert memory_kinds(engine) == {"pinned_host"}
        engine.resume().result(60)
        gate.sink.last("held")
        # The toy model's KV does not depend on its weight, so the KV that was kept is that of the new weights
        # too.
        rest = toy_tokens([1, *made], TOKENS - len(made), offset=5)
        assert gate.sink.tokens("held") == [*made, *rest]
        assert engine.compiles_after_warmup == 0
    finally:
        engine.shutdown()


def test_on_a_cpu_weights_are_in_host_memory_already() -> None:
    engine = toy_engine()
    try:
        assert engine.pause(offload_weights=True).result(60) == Paused(InFlightReport())
        assert memory_kinds(engine) == {"device"}
        engine.resume().result(60)
        made = engine.generate([1], sampling=GREEDY_PARAMS, stopping=long(9)).token_ids
        assert list(made) == toy_tokens([1], 9)
    finally:
        engine.shutdown()


def test_a_coroutine_can_pause_and_resume() -> None:
    engine = toy_engine()

    async def main() -> None:
        asynchronous = AsyncEngine(engine)
        num_bytes = bytes_of(engine.runner.device.kv)
        paused = await asynchronous.pause(InFlightPolicy.ABORT, free_kv_cache=True)
        assert paused == Paused(InFlightReport(), num_bytes)
        generating = asyncio.create_task(asynchronous.generate([1], sampling=GREEDY_PARAMS, stopping=long(9)))
        await asyncio.sleep(0)
        assert not generating.done()
        await asynchronous.resume()
        assert list((await generating).token_ids) == toy_tokens([1], 9)

    try:
        asyncio.run(main())
    finally:
        engine.shutdown()
