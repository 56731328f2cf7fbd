"""A model in which only some layers have a sliding window makes the same tokens whether its layers share one
page table or have one for each group: in chunks, among others, from the prefix cache, after preemptions, and
as forks.

The witness is an engine for which all layers are one group, so that no page is ever given back. It serves one
request at a time, without a prefix cache, and attends over the same windows.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime import Engine, EngineConfig
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.ops.native import library
from penstock.runtime.requests.request import Request, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.batch import Answer, answer, answers
from tests.support.collector import long
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.tiny import SHAPE, tiny_tensors, write_tiny
from tests.support.suite.drawing import few

WINDOW, PAGE = 40, 16
VALUES = PAGE * 2 * SHAPE.num_kv_heads * SHAPE.head_dim
"""Numbers in a page of one layer."""
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_prefill_chunk=32,
    page_size=PAGE,
    max_model_len=512,
    compilation_cache=TEST_CACHE,
    show_progress=False,
)
PROMPTS = tuple(
    tuple(random.Random(size).choices(range(10, 300), k=size)) for size in (200, 150, 37, 100, 260)
)
"""Some are longer than the window, and some shorter."""


def asked(prompts: Sequence[tuple[int, ...]], n: int = 1) -> list[Request]:
    """Return the outputs of the prompts. Their tokens depend on all logits."""
    return [
        output
        for i, prompt in enumerate(prompts)
        for output in outputs_of(
            Request(f"r{i}", prompt, ResolvedSampling(temperature=0.7, seed=i), long(60), logprobs=0), n
        )
    ]


@pytest.fixture(
    scope="module",
    params=few(["bfloat16", "float32"], [], ci=["bfloat16"], shared="engines of groups"),
    autouse=True,
)
def dtype(request: pytest.FixtureRequest) -> str:
    """Native kernels compute the model in bfloat16, and XLA computes it in float32."""
    if request.param == "bfloat16" and not library.available():
        pytest.skip("no native library on this machine")
    return str(request.param)


def options(dtype: str) -> EngineConfig:
    """Make options: the kernels and XLA read the cache by different parts of a step's metadata."""
    return dataclasses.replace(CONFIG, dtype=dtype, native="auto" if dtype == "bfloat16" else "off")


def write_model(directory: Path, **fields: Any) -> str:
    """Make a checkpoint whose first layer has a window, and whose second has none."""
    file = write_tiny(directory, tiny_tensors(0)) / "config.json"
    types = ["sliding_attention", "full_attention"]
    fields |= {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": types}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return str(directory)


@pytest.fixture(scope="module")
def witness(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One group for all layers. Its checkpoint names another longest context, which changes nothing else,
    because modules of equal configurations are shared.
    """
    model = write_model(tmp_path_factory.mktemp("witness"), max_position_embeddings=2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheSpec, "windows", (None,))
        patch.setattr(CacheSpec, "group_of", (0, 0))
        config = dataclasses.replace(options(dtype), prefix_cache_pages=0)
        engine = Engine.from_pretrained(model, config)
        engine.start()
    assert len(engine.runner.device.num_pages) == 1
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def engine(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yield an engine with fewer pages than the requests need, so some requests are preempted."""
    model = write_model(tmp_path_factory.mktemp("grouped"))
    width = {"bfloat16": 2, "float32": 4}[dtype]
    config = dataclasses.replace(options(dtype), kv_cache_bytes=76 * VALUES * width)
    engine = Engine.from_pretrained(model, config)
    # 38 pages of both layers would fit. Four rows use 5 pages each for the window, and two chunks use 3 each;
    # half of the 12 that are left are for prefixes.
    assert engine.runner.device.num_pages == (44, 32)
    assert (engine.info.num_pages, engine.config.kv_cache_bytes) == (76, 76 * VALUES * width)
    engine.start()
    yield engine
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def expect(made: Sequence[Answer], expected: Sequence[Answer], dtype: str) -> None:
    """Expect the same tokens and, by native kernels, the same bits."""
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.tokens == theirs.tokens
        logprobs, others = ([entry.sampled for entry in one.logprobs] for one in (ours, theirs))
        assert logprobs == (others if dtype == "bfloat16" else pytest.approx(others, rel=1e-4, abs=1e-5))


def test_in_chunks_among_others_and_after_preemptions(engine: Engine, witness: Engine, dtype: str) -> None:
    """None of the prompts is in the prefix cache yet. In the second round all of them are, as far as their
    pages were not needed for others.
    """
    expected = [answer(witness, request) for request in asked(PROMPTS)]
    made = answers(engine, asked(PROMPTS), together=True)
    expect(made, expected, dtype)
    assert sum(one.preemptions for one in made) > 0
    expect([answer(engine, request) for request in asked(PROMPTS)], expected, dtype)


def test_a_prefix_goes_on_from_its_last_window(engine: Engine, witness: Engine, dtype: str) -> None:
    """Where the windows before are not needed any more, the longest prefix that is cached in both groups is
    used. A prompt that leaves another one in its middle finds no window there, or the one of its own.
    """
    first = PROMPTS[0]
    prompts = (first, (*first, 5, 6, 7), (*first[:100], 5), (*first[:120], 6), (*first[:110], 7))
    for request in asked(prompts):
        made, expected = answer(engine, request), answer(witness, request)
        expect([made], [expected], dtype)
        if request.request_id == "r1":
            assert made.cached_prompt_tokens == len(first) // PAGE * PAGE


def test_forks_share_the_window_of_a_long_prompt(engine: Engine, witness: Engine, dtype: str) -> None:
    """Each output but the first begins behind all of the prompt but its last token."""
    requests = asked([PROMPTS[4][::-1]], 3)
    made = answers(engine, requests, together=True)
    alone = [dataclasses.replace(request, fork_of=None) for request in requests]
    expect(made, [answer(witness, request) for request in alone], dtype)
    assert [one.cached_prompt_tokens for one in made] == [0, 259, 259]
