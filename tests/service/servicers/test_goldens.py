"""PyTorch's tokens and logits, through the whole server: gRPC, scheduler, paged cache, compiled programs.

For each architecture and prompt: the whole prefill at once, and chunks of some sizes (the sweep: of every
size from 1 to the prompt's length); alone, and packed with the other prompts at other chunk boundaries.
Tokens equal PyTorch's; logits agree to 1e-4 relative, seen as log-probabilities (the contract's form): those
of the sampled tokens, and the differences within the top 8 after the prompt, which are logit differences.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.runtime.engine import Engine
from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import Rig, serving
from tests.support.chunks import set_chunk
from tests.support.goldens import CONFIG, GOLDEN, NAMES


async def ask(rig: Rig, case: dict[str, Any]) -> inference_pb2.Output:
    reply: inference_pb2.GenerateResponse = await rig.inference.Generate(
        inference_pb2.GenerateRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=case["prompt"]),
            sampling=types_pb2.SamplingParams(temperature=0),
            stopping=types_pb2.StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True),
            output=types_pb2.OutputOptions(logprobs=8, text=False),
        )
    )
    return reply.outputs[0]


def check(output: inference_pb2.Output, case: dict[str, Any]) -> None:
    assert list(output.token_ids) == case["tokens"]
    np.testing.assert_allclose(output.logprobs.sampled, case["logprobs"], rtol=1e-4)
    expected_ids, expected_logits = zip(*case["last_logits_top"], strict=True)
    top = output.logprobs.top[0].candidates
    assert [c.token_id for c in top] == list(expected_ids)
    shift = case["logprobs"][0] - expected_logits[0]  # log-probability minus logit is one constant for all
    np.testing.assert_allclose([c.logprob - shift for c in top], expected_logits, rtol=1e-4)


def some_sizes(longest: int) -> Sequence[int]:
    """One token at a time, an odd size below a page, a page, and all but one token."""
    return sorted({1, 7, 16, longest - 1})


@pytest.mark.timeout(900)  # minutes on a busy machine: some 600 requests per architecture with every size
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "sizes_of",
    [
        pytest.param(some_sizes, id="some sizes"),
        pytest.param(lambda longest: range(1, longest + 1), marks=pytest.mark.sweep, id="every size"),
    ],
)
async def test_chunk_sizes_alone_and_packed(name: str, sizes_of: Callable[[int], Sequence[int]]) -> None:
    cases = json.loads((GOLDEN / name / "expected.json").read_text())["cases"]
    engine = Engine.from_pretrained(str(GOLDEN / name), CONFIG)
    async with serving(engine) as rig:
        longest = max(len(case["prompt"]) for case in cases)
        for size in (None, *sizes_of(longest)):
            set_chunk(engine, size)
            for case in cases:
                if size is None or size <= len(case["prompt"]):
                    engine.flush_prefix_cache()  # otherwise each prompt would be computed only once
                    check(await ask(rig, case), case)
            engine.flush_prefix_cache()
            # Six requests over four rows: they start, end and are chunked at different steps. The second
            # three share the pages of the first three.
            packed = [*cases, *reversed(cases)]
            for output, case in zip(
                await asyncio.gather(*(ask(rig, c) for c in packed)), packed, strict=True
            ):
                check(output, case)
        assert engine.compiles_after_warmup == 0
        assert engine.load().pages_used == 0
