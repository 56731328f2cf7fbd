"""Adapters on the native kernels: an answer has the same bits in any company, and without an adapter it has
those of an engine that has none.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams
from penstock.runtime.adapters.interface import AdapterTensors
from penstock.runtime.errors import ConfigError
from penstock.runtime.ops.native import library
from tests.support import goldens
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.toy import toy_engine

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="no native library on this machine"),
    pytest.mark.users_xla,
]
CONFIG = EngineConfig(
    tensor_parallel_size=goldens.CONFIG.tensor_parallel_size,
    max_num_seqs=4,
    max_model_len=256,
    max_num_batched_tokens=64,
    prefix_cache_pages=0,
    compilation_cache=TEST_CACHE,
    show_progress=False,
)
PROMPTS = [[5, 6, 7], list(range(20, 120)), [9] * 17]
Answer = tuple[list[int], list[float]]


def random_adapter(engine: Engine, seed: int) -> AdapterTensors:
    """Make an adapter of rank 8 of all linear layers."""
    rng = np.random.default_rng(seed)
    layers = [
        (name.removesuffix(".weight"), shape)
        for name, _, shape in engine.tensor_specs()
        if ".layers." in name and len(shape) == 2
    ]
    tensors: list[tuple[str, NDArray[np.generic]]] = []
    for name, (out_size, in_size) in layers:
        a, b = rng.standard_normal((8, in_size)), rng.standard_normal((out_size, 8))
        tensors += [
            (f"base_model.model.{name}.lora_A.weight", (a * in_size**-0.5).astype(np.float32)),
            (f"base_model.model.{name}.lora_B.weight", (b * 0.1).astype(np.float32)),
        ]
    return AdapterTensors({"peft_type": "LORA", "r": 8, "lora_alpha": 8}, tensors)


def answers(engine: Engine, asked: list[tuple[int, str | None]], threads: int) -> list[Answer]:
    def one(each: tuple[int, str | None]) -> Answer:
        prompt, adapter = each
        made = engine.generate(
            PROMPTS[prompt],
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=12, ignore_eos=True),
            logprobs=0,
            adapter=adapter,
        )
        return list(made.token_ids), [each.sampled for each in made.logprobs or ()]

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, asked))


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param("none", marks=pytest.mark.ci),
        pytest.param("int8", marks=pytest.mark.sweep),
        pytest.param("int4", marks=pytest.mark.sweep),
    ],
)
def test_bits_depend_on_no_neighbour(quantization: str) -> None:
    config = dataclasses.replace(CONFIG, quantization=quantization)
    asked = [(i, adapter) for i in range(len(PROMPTS)) for adapter in (None, "one", "two")]
    with Engine.from_pretrained("demo", config) as engine:
        plain = answers(engine, [(i, None) for i in range(len(PROMPTS))], 1)
    with Engine.from_pretrained("demo", dataclasses.replace(config, max_adapters=2)) as engine:
        assert engine.info.batch_invariant
        for seed, name in enumerate(("one", "two")):
            engine.adapters.load(name, random_adapter(engine, seed))
        alone = answers(engine, asked, 1)
        assert answers(engine, asked * 2, 9) == alone * 2
        assert engine.compiles_after_warmup == 0
    assert alone[::3] == plain
    for i in range(len(PROMPTS)):
        none, one, two = alone[3 * i : 3 * i + 3]
        assert len({tuple(none[1]), tuple(one[1]), tuple(two[1])}) == 3


def test_models_and_machines_that_take_none() -> None:
    with pytest.raises(ConfigError, match="max_adapters: this model takes no adapters"):
        toy_engine(start=False, max_adapters=1)
