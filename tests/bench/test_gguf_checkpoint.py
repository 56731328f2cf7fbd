"""The random GGUF file, read by the package `gguf` and by the loader."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.checkpoint import SHAPES as CHECKPOINTS
from bench.checkpoint import tensor_shapes
from bench.checkpoint import write_checkpoint as write_safetensors
from penstock.runtime.loading.gguf.model import read_model
from penstock.runtime.models.registry import parse_config
from tests.support import gguf_package  # noqa: F401 -- skips tests where the package is missing

import gguf  # isort: skip
from bench.gguf_checkpoint import (  # isort: skip
    SHAPES,
    gguf_name,
    has_more_bits,
    matrices,
    rope_divisors,
    vectors,
    write,
    write_checkpoint,
)

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, TINY, seed=3)
    return path


def test_sizes_of_llama_3_1_8b():
    # 128256 * 4096 embeddings and head; per layer 4096 * 4096 q and o, 1024 * 4096 k and v, 3 times
    # 14336 * 4096 MLP, and 2 * 4096 norms; the last norm. As published: 8.03 billion.
    shape = SHAPES["8b"]
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14_336 * 4096 + 2 * 4096
    expected = 2 * 128_256 * 4096 + 32 * layer + 4096
    found = sum(np.prod(size) for _, size, _ in matrices(shape))
    norms = sum(values.size for name, values in vectors(shape) if "norm" in name)
    assert found + norms == expected == 8_030_261_248
    # Of a published Q4_K_M of 8B, 33 matrices are Q6_K: the head, and two of each of 16 layers.
    assert [kind for _, _, kind in matrices(shape)].count("Q6_K") == 33
    assert [layer for layer in range(32) if has_more_bits(layer, 32)] == [
        0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31,
    ]  # fmt: skip


def test_the_package_reads_it(file):
    reader = gguf.GGUFReader(file)
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == {
        **{name: kind for name, _, kind in matrices(TINY)},
        **{name: "F32" for name, _ in vectors(TINY)},
    }
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.0.") and tensor.tensor_type.name != "F32":
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert values.std() == pytest.approx(0.02, rel=0.05), tensor.name
            assert abs(values.mean()) < 0.001, tensor.name


def test_the_loader_reads_it(file):
    model = read_model(file)
    assert model.config.architecture == "LlamaForCausalLM"
    assert model.config.vocab_size == TINY.vocab_size
    assert model.stored.startswith("GGUF: Q4_K, Q6_K")
    assert model.text is not None
    assert model.text.decode(model.text.encode("the thing, à propos")) == "the thing, à propos"
    assert model.config.eos_token_ids == (TINY.num_words + 2,)


def test_frequencies_are_divided_as_llama_3_1_does():
    """By transformers' modeling_rope_utils: waves shorter than 2048 tokens stay, and those longer than 8192
    are divided by 8.
    """
    divisors = rope_divisors(128)
    waves = 2 * np.pi * 500_000 ** (np.arange(0, 128, 2) / 128)
    assert (divisors[waves < 2048] == 1).all()
    assert (divisors[waves > 8192] == 8).all()
    between = (waves > 2048) & (waves < 8192)
    smooth = (8192 / waves[between] - 1) / 3
    expected = 1 / ((1 - smooth) / 8 + smooth)
    np.testing.assert_allclose(divisors[between], expected, rtol=1e-6)


def test_a_seed_writes_the_same_file(file, tmp_path):
    for seed in (3, 4):
        write(tmp_path / str(seed), TINY, seed)
    assert (tmp_path / "3").read_bytes() == file.read_bytes()
    assert (tmp_path / "4").read_bytes() != file.read_bytes()


def test_a_checkpoint_becomes_a_file_of_the_same_weights(tmp_path):
    write_safetensors(tmp_path, CHECKPOINTS["tiny"], copies=20)
    file = tmp_path / "copies.gguf"
    assert write_checkpoint(tmp_path, file) == sum(
        map(math.prod, tensor_shapes(CHECKPOINTS["tiny"]).values())
    )
    model, config = read_model(file), json.loads((tmp_path / "config.json").read_text())
    assert model.config.architecture == "Qwen3ForCausalLM"
    assert model.config.layers == parse_config(config).layers
    stored = load_file(tmp_path / "model.safetensors")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert found.keys() == set(map(gguf_name, stored))
    for name, values in stored.items():
        tensor = found[gguf_name(name)]
        made = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(made, values.astype(np.float32), name)
