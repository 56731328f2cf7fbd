"""PyTorch's tokens and logits, through the whole server: gRPC, scheduler, paged cache, compiled programs.

For each family and prompt: the whole prefill at once, and in chunks of some sizes; alone, and packed with
the other prompts at other chunk boundaries, over a KV cache that is too small for all, so that some are
preempted and resumed; with the prefix cache, and without it; as several outputs that fork; with attention by
the native kernels, and in XLA. A sweep takes chunks of every size, from 1 to the prompt's length.

Tokens equal PyTorch's; logits agree to 1e-4 relative, seen as log-probabilities (the contract's form): those
of the sampled tokens, and the differences within the top 8 after the prompt, which are logit differences.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest

from penstock.runtime.engine import Engine
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.ops.native import library
from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import Rig, serving, until
from tests.support.chunks import set_chunk
from tests.support.goldens import GOLDEN, KINDS, NAMES, ROWS, small_config
from tests.support.suite.drawing import few

Cases = list[dict[str, Any]]
PAGE_SIZES = {"xla": 8, "native": 16}
"""Who computes attention, by the size of pages: the native kernels do not take pages of 8 tokens."""
ALWAYS = (("native", "qwen3"),)
"""What `make test` serves: a family that only attends."""
CI = (("xla", "qwen3_5"),)
"""What CI always serves, too: a family with recurrent layers, with XLA's attention."""
SERVED = (*product(["native"], (name for name in NAMES if name not in ROWS)), *product(["xla"], KINDS))
"""The native kernels serve all families but those that are data, which weights/test_fresh.py serves, and
XLA's attention one for each kind of attention and cache.
"""
ALL_SIZES = ("qwen3", "mistral_swa")
"""What is served in chunks of every size."""


def cases_of(name: str) -> Cases:
    cases: Cases = json.loads((GOLDEN / name / "expected.json").read_text())["cases"]
    return cases


@asynccontextmanager
async def served(name: str, *, page_size: int) -> AsyncIterator[tuple[Rig, Engine]]:
    """Run a server of a golden in float32."""
    engine = Engine.from_pretrained(str(GOLDEN / name), small_config(name, page_size=page_size))
    async with serving(engine) as rig:
        yield rig, engine
        assert engine.compiles_after_warmup == 0
        assert engine.load().pages_used == 0


async def ask(
    rig: Rig, case: dict[str, Any], *, n: int = 1, bypass: bool = False
) -> inference_pb2.GenerateResponse:
    reply: inference_pb2.GenerateResponse = await rig.inference.Generate(
        inference_pb2.GenerateRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=case["prompt"]),
            sampling=types_pb2.SamplingParams(temperature=0, n=n),
            stopping=types_pb2.StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True),
            output=types_pb2.OutputOptions(logprobs=8, text=False),
            cache=types_pb2.CacheOptions(bypass_prefix_cache=bypass),
        )
    )
    assert len(reply.outputs) == n
    for output in reply.outputs:
        check(output, case)
    return reply


def check(output: inference_pb2.Output, case: dict[str, Any]) -> None:
    assert list(output.token_ids) == case["tokens"]
    np.testing.assert_allclose(output.logprobs.sampled, case["logprobs"], rtol=1e-4)
    expected_ids, expected_logits = zip(*case["last_logits_top"], strict=True)
    top = output.logprobs.top[0].candidates
    assert [c.token_id for c in top] == list(expected_ids)
    shift = case["logprobs"][0] - expected_logits[0]  # log-probability minus logit is one constant for all
    np.testing.assert_allclose([c.logprob - shift for c in top], expected_logits, rtol=1e-4)


async def check_chunks(rig: Rig, engine: Engine, cases: Cases, size: int | None) -> None:
    """Every case alone, then all of them packed, in chunks of this size."""
    set_chunk(engine, size)
    for case in cases:
        if size is None or size <= len(case["prompt"]):
            engine.flush_prefix_cache()  # otherwise each prompt would be computed only once
            await ask(rig, case)
    engine.flush_prefix_cache()
    # Six requests over four rows: they start, end and are chunked at different steps. The second three share
    # the pages of the first three.
    await asyncio.gather(*(ask(rig, case) for case in [*cases, *reversed(cases)]))


async def check_preempted(rig: Rig, engine: Engine, name: str, cases: Cases) -> None:
    """Two long and two middling requests, which share nothing. If all layers have a window, or none
    has pages, they fit.
    """
    set_chunk(engine, None)
    engine.flush_prefix_cache()
    before = engine.metrics().totals.preemptions
    await asyncio.wrap_future(engine.pause())
    asked = [ask(rig, case, bypass=True) for case in [cases[2], cases[2], cases[1], cases[1]]]
    answers = asyncio.gather(*asked)
    await until(lambda: engine.load().num_waiting == len(asked))
    await asyncio.wrap_future(engine.resume())
    await answers
    cache = load_config(GOLDEN / name).cache
    fits = None not in cache.windows or not cache.paged
    assert fits or engine.metrics().totals.preemptions > before


async def check_sharing(rig: Rig, engine: Engine, name: str, cases: Cases) -> None:
    """Check what the prefix cache finds, what it is kept from, and what forks share. With recurrent state,
    all that share begin behind a snapshot of it, at the last page of the prompt.
    """
    set_chunk(engine, None)
    engine.flush_prefix_cache()
    longest = max(cases, key=lambda case: len(case["prompt"]))
    assert (await ask(rig, longest)).usage.cached_prompt_tokens == 0
    page_size, last = engine.info.page_size, len(longest["prompt"]) - 1
    assert (await ask(rig, longest)).usage.cached_prompt_tokens == last - last % page_size > 0
    assert (await ask(rig, longest, bypass=True)).usage.cached_prompt_tokens == 0
    for case in cases:
        await ask(rig, case, n=2)
        before, last = engine.metrics().totals.prefix_hit_tokens, len(case["prompt"]) - 1
        # Both outputs are queued before the first one runs: it could end before the second one comes.
        await asyncio.wrap_future(engine.pause())
        asked = asyncio.create_task(ask(rig, case, n=2, bypass=True))
        await until(lambda: engine.load().num_waiting == 2)
        await asyncio.wrap_future(engine.resume())
        await asked
        shared = last - last % page_size if load_config(GOLDEN / name).cache.has_state else last
        assert engine.metrics().totals.prefix_hit_tokens == before + shared


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("attention", "name"), few(SERVED, ALWAYS, CI))
async def test_every_schedule_gives_pytorchs_tokens(attention: str, name: str) -> None:
    if attention == "native" and not library.available():
        pytest.skip("no native library on this machine")
    page_size = PAGE_SIZES[attention]
    cases = cases_of(name)
    async with served(name, page_size=page_size) as (rig, engine):
        for size in (None, 1, 7, page_size):
            await check_chunks(rig, engine, cases, size)
        await check_preempted(rig, engine, name, cases)
        await check_sharing(rig, engine, name, cases)


@pytest.mark.sweep
@pytest.mark.timeout(900)  # minutes on a busy machine: some 600 requests per family
@pytest.mark.parametrize("name", ALL_SIZES)
async def test_chunks_of_every_size(name: str) -> None:
    cases = cases_of(name)
    async with served(name, page_size=8) as (rig, engine):
        for size in range(1, max(len(case["prompt"]) for case in cases) + 1):
            await check_chunks(rig, engine, cases, size)
