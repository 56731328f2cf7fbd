"""A server that speculates, with the demo model: what is told of what lookup proposed, and that it changes no
token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.v1 import control_pb2, telemetry_pb2, types_pb2
from tests.service.rig import Kept, Rig, collect, generate, serving, stream
from tests.support.models.compilation_cache import TEST_CACHE

pytestmark = pytest.mark.ci

PROMPT = "Tom said: the red ball is in the big box. " * 8
"""A text that repeats itself, which the model goes on to do."""
GREEDY = {"sampling": {"temperature": 0}, "stopping": {"max_tokens": 200, "ignore_eos": True}}
SAMPLED = {
    "sampling": {"temperature": 0.4, "seed": 5, "n": 2},
    "stopping": {"max_tokens": 100, "ignore_eos": True},
}
MOST = 6


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """Of steps that take long for their tokens, so that proposals pay."""
    config = EngineConfig(
        speculation="lookup",
        max_proposed_tokens=MOST,
        max_decode_steps=1,
        overlap=False,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        kv_cache_bytes=8 << 20,
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    loaded = Engine.from_pretrained("demo", config)
    loaded.start()
    yield Kept(loaded)
    assert loaded.compiles_after_warmup == 0
    assert loaded.load().pages_used == 0
    loaded.shutdown()


async def both(rig: Rig, **fields: Any) -> tuple[list[list[int]], list[types_pb2.Usage]]:
    """Return the tokens of Generate's outputs, which Stream also sends, and the usage of either."""
    reply = await asyncio.wait_for(rig.inference.Generate(generate(PROMPT, **fields)), 120)
    messages = await collect(rig.inference.Stream(stream(PROMPT, **fields)))
    tokens = [list(output.token_ids) for output in reply.outputs]
    deltas = [message.delta for message in messages if message.HasField("delta")]
    streamed = [[t for d in deltas if d.index == i for t in d.token_ids] for i in range(len(tokens))]
    assert streamed == tokens
    return tokens, [reply.usage, messages[-1].summary.usage]


@pytest.mark.parametrize(("options", "least"), [(GREEDY, 1), (SAMPLED, 0)], ids=["greedy", "sampled"])
async def test_usage_tells_what_was_proposed_and_no_token_changes(
    engine: Any, options: dict[str, Any], least: int
) -> None:
    """What pays is learned from the times of steps, so a busy machine may need a few requests until something
    is proposed; of sampled text perhaps nothing is.
    """
    async with serving(engine) as rig:
        expected, usages = await both(rig, max_proposed_tokens=0, **options)
        assert not any(usage.proposed_tokens or usage.accepted_tokens for usage in usages)
        accepted = 0
        for _ in range(10):
            found, usages = await both(rig, **options)
            assert found == expected
            assert all(0 <= usage.accepted_tokens <= usage.proposed_tokens for usage in usages)
            accepted += sum(usage.accepted_tokens for usage in usages)
            if accepted >= least:
                break
        assert accepted >= least


async def test_text_that_a_grammar_leaves_no_choice_about_is_proposed(engine: Any) -> None:
    """Nothing of it stood anywhere before, so without the grammar next to nothing would be accepted. No token
    changes.
    """
    options = {
        "constraint": {"regex": "Once upon a time there was a little girl who had a very kind friend"},
        "sampling": {"temperature": 0},
        "cache": {"bypass_prefix_cache": True},
    }
    async with serving(engine) as rig:
        expected, _ = await both(rig, max_proposed_tokens=0, **options)
        accepted = 0
        for _ in range(10):
            found, usages = await both(rig, **options)
            assert found == expected
            accepted = max(accepted, *(usage.accepted_tokens for usage in usages))
            if accepted > 4:
                break
        assert accepted > 4


async def test_the_server_tells_of_its_proposer_and_counts_as_usage_does(engine: Any) -> None:
    async with serving(engine) as rig:
        info = await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert (info.proposer, info.max_proposed_tokens) == ("lookup", MOST)
        rig.engine.metrics()
        before = await totals(rig)
        _, usages = await both(rig, **GREEDY)
        rig.engine.metrics()  # what the engine has told so far is counted then
        after = await totals(rig)
    proposed = after.proposed_tokens - before.proposed_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    assert proposed == sum(usage.proposed_tokens for usage in usages)
    assert accepted == sum(usage.accepted_tokens for usage in usages)


async def totals(rig: Rig) -> telemetry_pb2.LoadTotals:
    watch = rig.control.WatchLoad(telemetry_pb2.WatchLoadRequest())
    try:
        report: control_pb2.WatchLoadResponse = await watch.read()
        return report.totals
    finally:
        watch.cancel()
