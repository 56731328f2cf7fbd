"""The random checkpoint: its files, read by the libraries that define the formats."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.flax import load_file
from tokenizers import Tokenizer

from bench.checkpoint import SHAPES, tensor_shapes, write_checkpoint, write_checkpoint_of
from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams
from penstock.runtime.loading.checkpoint import load_config
from tests.support.goldens import GOLDEN

TINY = SHAPES["tiny"]
SIZES = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, kv_cache_bytes=2**20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, TINY, seed=3)
    return folder


def test_parameters_of_qwen3_0_6b():
    # 151936 * 1024 embedding; per layer 2048 * 1024 q, twice 1024 * 1024 k and v, 1024 * 2048 o, 3 times
    # 3072 * 1024 MLP, norms 2 * 1024 + 2 * 128; and the last norm.
    layer = 2048 * 1024 * 2 + 1024 * 1024 * 2 + 3072 * 1024 * 3 + 2 * 1024 + 2 * 128
    sizes = tensor_shapes(SHAPES["qwen3-0.6b"])
    assert len(sizes) == 28 * 11 + 2
    assert sum(int(np.prod(size)) for size in sizes.values()) == 151_936 * 1024 + 28 * layer + 1024


def test_safetensors_reads_it(directory):
    with safe_open(directory / "model.safetensors", framework="flax") as file:
        assert list(file.keys()) == sorted(tensor_shapes(TINY))
        embedding = np.asarray(file.get_tensor("model.embed_tokens.weight"), np.float32)
        norm = np.asarray(file.get_tensor("model.norm.weight"), np.float32)
    assert embedding.shape == (512, 64)
    # of 32768 values, whose mean has a deviation of 0.4 % itself
    assert embedding.std() == pytest.approx(0.02, rel=0.02)
    assert abs(embedding.mean()) < 0.001
    assert norm.mean() == pytest.approx(1.0, abs=0.02)


def test_a_seed_writes_the_same_file(directory, tmp_path):
    for seed in (3, 4):
        write_checkpoint(tmp_path / str(seed), TINY, seed)
    ours = (directory / "model.safetensors").read_bytes()
    assert (tmp_path / "3" / "model.safetensors").read_bytes() == ours
    assert (tmp_path / "4" / "model.safetensors").read_bytes() != ours


@pytest.mark.ci
@pytest.mark.parametrize("length", [40, 100])
def test_a_model_that_copies_repeats_prompts_of_its_length(tmp_path, length):
    """On the kernels in bfloat16 where there are any, as the workloads use it."""
    write_checkpoint(tmp_path, TINY, seed=3, copies=length)
    engine = Engine.from_pretrained(str(tmp_path), SIZES)
    engine.start()
    try:
        drawn = random.Random(length)
        for _ in range(3):
            prompt = drawn.choices(range(TINY.num_words), k=length)
            stopping = StoppingParams(max_tokens=length // 2, ignore_eos=True)
            answer = engine.generate(prompt, sampling=SamplingParams(temperature=0), stopping=stopping)
            assert list(answer.token_ids) == prompt[: length // 2]
    finally:
        engine.shutdown()


def test_tokenizer_goes_there_and_back(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    assert tokenizer.decode(tokenizer.encode("the thing, à propos").ids) == "the thing, à propos"
    assert tokenizer.get_vocab_size() == TINY.num_words + 3
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    assert set(tokenizer.get_vocab().values()) == set(range(TINY.num_words + 3))


@pytest.mark.parametrize(
    ("golden", "decoder"), [("qwen3_5", "model."), ("qwen3_5_vl", "model.language_model.")]
)
def test_the_shape_of_a_config_json(tmp_path, golden, decoder):
    """The tensors are those that transformers wrote for this config.json, but for what reads images."""
    config = json.loads((GOLDEN / golden / "config.json").read_text())
    written = write_checkpoint_of(tmp_path, config)
    ours = load_file(tmp_path / "model.safetensors")
    theirs = {
        name.replace(decoder, "model."): values.shape
        for name, values in load_file(GOLDEN / golden / "model.safetensors").items()
        if ".visual." not in name
    }
    assert {name: values.shape for name, values in ours.items()} == theirs
    assert written == sum(int(np.prod(shape)) for shape in theirs.values())
    words = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    assert words == load_config(tmp_path).vocab_size
