"""`Engine.embed`, `Engine.score` and hidden states of generated tokens, on models computed by hand.

The toy model's hidden state after some tokens is (their sum, their number).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.runtime import AsyncEngine, Engine, Pooling, SamplingParams, StoppingParams
from penstock.runtime.errors import DuplicateRequestId, InvalidRequest, PromptTooLong, UnsupportedFeature
from penstock.runtime.loop.interface import InFlightPolicy
from tests.support.models.table import random_tables, table_engine
from tests.support.models.toy import toy_engine
from tests.support.models.witness import log_softmax


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = toy_engine(max_queued_requests=3)
    yield engine
    assert engine.load().pages_used == 0
    assert engine.compiles_after_warmup == 0
    engine.shutdown()


def test_embeddings_by_hand(engine: Engine) -> None:
    inputs = [(1, 2, 3), (4,)]
    last = engine.embed(inputs, normalize=False)
    assert last.dtype == np.float32
    np.testing.assert_array_equal(last, [[6, 3], [4, 1]])
    mean = engine.embed(inputs, pooling="mean", normalize=False)
    assert mean.tolist() == [pytest.approx([(1 + 3 + 6) / 3, 2]), [4, 1]]
    units = [[x / math.hypot(x, y), y / math.hypot(x, y)] for x, y in ((6, 3), (4, 1))]
    assert engine.embed(inputs).tolist() == [pytest.approx(unit) for unit in units]
    np.testing.assert_array_equal(engine.embed(inputs, dimensions=1), [[1], [1]])
    assert engine.embed([]).shape == (0, 2)


def test_more_inputs_than_the_queue_takes(engine: Engine) -> None:
    inputs = [tuple(range(1, 2 + i % 30)) for i in range(40)]
    expected = [[sum(each), len(each)] for each in inputs]
    np.testing.assert_array_equal(engine.embed(inputs, normalize=False), expected)


async def test_coroutines_get_the_same(engine: Engine) -> None:
    eager = AsyncEngine(engine)
    inputs = [(1, 2, 3), (4,)]
    np.testing.assert_array_equal(await eager.embed(inputs, normalize=False), [[6, 3], [4, 1]])
    assert await eager.score((1, 2), [(3,), (4, 5)]) == engine.score((1, 2), [(3,), (4, 5)])
    with pytest.raises(InvalidRequest, match="dimensions"):
        await eager.embed(inputs, dimensions=3)


async def test_a_cancelled_task_ends_what_it_reads(engine: Engine) -> None:
    eager = AsyncEngine(engine)
    await asyncio.wrap_future(engine.pause(InFlightPolicy.KEEP))
    reading = asyncio.create_task(eager.embed([(1, 2)] * 40, request_id="mine"))
    async with asyncio.timeout(60):
        while not engine.load().num_waiting:  # noqa: ASYNC110 -- another thread makes it true
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        while engine.load().num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.wrap_future(engine.resume())
    async with asyncio.timeout(60):
        while True:  # the id is free once the thread has ended
            with contextlib.suppress(DuplicateRequestId):
                np.testing.assert_array_equal(
                    await eager.embed([(4,)], normalize=False, request_id="mine"), [[4, 1]]
                )
                break


def test_what_is_wrong_is_named(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"inputs\[1\].*at most 127 tokens, not 200"):
        engine.embed([(1,), (2,) * 200])
    cut = engine.embed([(1,) * 100 + (2,) * 100], truncation="left", normalize=False)
    np.testing.assert_array_equal(cut, [[27 + 200, 127]])
    for wrong in ({"pooling": "median"}, {"dimensions": 3}, {"truncation": "down"}):
        with pytest.raises(InvalidRequest, match="must be"):
            engine.embed([(1,)], **wrong)
    with pytest.raises(InvalidRequest, match=r"inputs\[1\].*inputs\[2\]"):
        engine.embed([(1,), (), ()])
    with pytest.raises(TypeError, match="inputs"):
        engine.embed((1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option"):
        engine.embed([(1,)], seed=1)  # type: ignore[call-arg]
    with pytest.raises(UnsupportedFeature):
        engine.embed(["text"])
    with pytest.raises(UnsupportedFeature):
        engine.embed([(1,)], priority=1)
    with pytest.raises(PromptTooLong):
        engine.score((1,) * 100, [(2,) * 50])
    engine.active_ids.take("r")
    with pytest.raises(DuplicateRequestId):
        engine.embed([(1,)], request_id="r")
    engine.active_ids.release("r")
    again = engine.embed([(1,)], request_id="r", pooling=Pooling.MEAN, dimensions=1)
    np.testing.assert_array_equal(again, [[1]])


def test_scores_by_hand() -> None:
    tables = random_tables(5)
    engine = table_engine(tables)
    try:
        prompt, continuations = (3, 4, 5), [(6,), (7, 8, 9)]
        for _ in range(2):  # the second time the prompt comes from the cache
            scores = engine.score(prompt, continuations)
            for one, tokens in zip(scores, continuations, strict=True):
                known = [*prompt, *tokens]
                expected = [log_softmax(tables.logits(known[:i]))[known[i]] for i in range(3, len(known))]
                assert one.token_ids == tokens
                assert one.logprobs == pytest.approx(expected, rel=1e-5, abs=1e-5)
                assert one.total == pytest.approx(sum(expected), rel=1e-5)
        assert engine.score(prompt, []) == []
    finally:
        engine.shutdown()


def test_hidden_states_of_generated_tokens(engine: Engine) -> None:
    stopping = StoppingParams(max_tokens=4, ignore_eos=True)
    result = engine.generate(
        (1, 2), sampling=SamplingParams(temperature=0), stopping=stopping, hidden_states=True, n=2
    )
    for output in result.outputs:
        known = [1, 2]
        expected = []
        for token in output.token_ids:
            expected.append([sum(known), len(known)])
            known.append(token)
        assert output.hidden_states is not None
        np.testing.assert_array_equal(output.hidden_states, expected)
    plain = engine.generate((1, 2), stopping=stopping)
    assert plain.outputs[0].hidden_states is None
