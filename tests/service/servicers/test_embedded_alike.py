"""An engine answers a program that embeds it as it answers a caller over gRPC, in every part of an answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime import (
    ContextParams,
    Engine,
    EngineConfig,
    Regex,
    SamplingParams,
    StoppingParams,
    Tool,
    Truncation,
)
from penstock.runtime.errors import PenstockError
from penstock.service.replies.messages import REASONS
from tests.service.rig import Kept, failure_of, generate, serving
from tests.support.models.compilation_cache import TEST_CACHE

pytestmark = pytest.mark.ci

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = Tool("get_weather", "Get the weather in a city.", PARAMETERS)
TOOL_MESSAGE = {
    "name": TOOL.name,
    "description": TOOL.description,
    "parameters_json": json.dumps(PARAMETERS),
}
QUESTION = {"role": "user", "content": "What's the weather in Paris?"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Its defaults are none of the neutral values."""
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        generation_config={"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    with Engine.from_pretrained("demo", config) as engine:
        yield engine
        assert engine.load().pages_used == 0


@pytest.mark.parametrize(
    ("embedded", "over_grpc"),
    [
        (
            {"sampling": SamplingParams(seed=3), "logprobs": 2, "prompt_logprobs": 1},
            {"sampling": {"seed": 3}, "output": {"logprobs": 2, "prompt_logprobs": 1}},
        ),
        (
            {
                "n": 3,
                "sampling": SamplingParams(
                    temperature=1.3, seed=4, bad_words=["the"], logit_bias={300: -5.0}
                ),
            },
            {
                "sampling": {
                    "n": 3,
                    "temperature": 1.3,
                    "seed": 4,
                    "bad_words": ["the"],
                    "logit_bias": {300: -5.0},
                }
            },
        ),
        (
            {
                "sampling": SamplingParams(seed=5),
                "stopping": StoppingParams(max_tokens=30, min_tokens=8, stop=(" a", "."), include_stop=True),
            },
            {
                "sampling": {"seed": 5},
                "stopping": {"max_tokens": 30, "min_tokens": 8, "stop": [" a", "."], "include_stop": True},
            },
        ),
        (
            {"sampling": SamplingParams(seed=6), "constraint": Regex("[a-f]{3,9}"), "n": 2},
            {"sampling": {"seed": 6, "n": 2}, "constraint": {"regex": "[a-f]{3,9}"}},
        ),
        (
            {
                "prompt": "word " * 300,
                "sampling": SamplingParams(seed=7),
                "context": ContextParams(Truncation.MIDDLE, reserve_tokens=99),
            },
            {
                "prompt": "word " * 300,
                "sampling": {"seed": 7},
                "context": {"truncation": "TRUNCATION_MIDDLE", "reserve_tokens": 99},
            },
        ),
        (
            {"messages": [QUESTION], "tools": [TOOL], "sampling": SamplingParams(temperature=0.0)},
            {"chat": {"messages": [QUESTION], "tools": [TOOL_MESSAGE]}, "sampling": {"temperature": 0.0}},
        ),
        (
            {
                "messages": [QUESTION],
                "tools": [TOOL],
                "tool_choice": "required",
                "sampling": SamplingParams(temperature=1.5, seed=8),
            },
            {
                "chat": {"messages": [QUESTION], "tools": [TOOL_MESSAGE], "tool_choice": "required"},
                "sampling": {"temperature": 1.5, "seed": 8},
            },
        ),
    ],
    ids=["log-probabilities", "outputs", "stops", "grammar", "truncation", "tool", "required call"],
)
async def test_the_same_request_has_the_same_answer(
    engine: Engine, embedded: dict[str, Any], over_grpc: dict[str, Any]
) -> None:
    embedded = {"stopping": StoppingParams(max_tokens=40), **embedded}
    over_grpc = {"stopping": {"max_tokens": 40}, **over_grpc}
    if "messages" in embedded:
        own = engine.chat(embedded.pop("messages"), **embedded)
    else:
        own = engine.generate(embedded.pop("prompt", "Once upon a time"), **embedded)
        over_grpc.setdefault("prompt", "Once upon a time")
    async with serving(Kept(engine)) as rig:
        request = generate(**{"output": {}, **over_grpc})
        request.output.echo_prompt_token_ids = True
        reply = await asyncio.wait_for(rig.inference.Generate(request), 60)
    assert own.prompt.token_ids == tuple(reply.prompt.token_ids)
    assert own.prompt.truncated_tokens == reply.prompt.truncated_tokens
    assert own.usage.prompt_tokens == reply.usage.prompt_tokens
    assert own.usage.completion_tokens == reply.usage.completion_tokens
    assert own.usage.reasoning_tokens == reply.usage.reasoning_tokens
    assert len(own.outputs) == len(reply.outputs)
    for one, other in zip(own.outputs, reply.outputs, strict=True):
        assert (one.index, one.text, one.token_ids) == (other.index, other.text, tuple(other.token_ids))
        assert one.reasoning == other.reasoning
        assert [(c.name, c.arguments_json) for c in one.tool_calls] == [
            (c.name, c.arguments_json) for c in other.tool_calls
        ]
        assert REASONS[one.finish.reason] == other.finish.reason
        assert (one.finish.stop or "") == other.finish.match.stop
        if one.logprobs is not None:
            assert [e.sampled for e in one.logprobs] == pytest.approx(list(other.logprobs.sampled), abs=1e-3)
            assert one.cumulative_logprob == pytest.approx(sum(other.logprobs.sampled), abs=0.05)
    if own.prompt.logprobs is not None:
        first, *rest = reply.prompt.logprobs.sampled
        assert math.isnan(first)
        assert [e.sampled for e in own.prompt.logprobs] == pytest.approx(rest, abs=1e-3)


FORBIDDEN: dict[str, Any] = {"allowed_token_ids": [300], "logit_bias": {300: -math.inf}}


@pytest.mark.parametrize(
    ("prompt", "regex", "told"),
    [("word " * 300, "[a-f]+", "the prompt has .* tokens"), ("a", "(", "sampling.allowed_token_ids: all of")],
)
async def test_of_two_wrong_parts_the_same_one_is_told(
    engine: Engine, prompt: str, regex: str, told: str
) -> None:
    """A prompt, its sampling and its grammar are looked at in one order. None of these can be generated from,
    and each request is wrong in two of the three.
    """
    with pytest.raises(PenstockError, match=told) as refused:
        engine.generate(prompt, sampling=SamplingParams(**FORBIDDEN), constraint=Regex(regex))
    request = generate(prompt, sampling=FORBIDDEN, constraint={"regex": regex})
    async with serving(Kept(engine)) as rig:
        failure = await failure_of(rig.inference.Generate(request))
    assert failure.message == str(refused.value)
