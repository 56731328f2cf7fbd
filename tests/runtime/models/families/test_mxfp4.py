"""MXFP4: decoded as the format's specification says, and loaded by the rules of gpt-oss."""

import dataclasses

import ml_dtypes
import numpy as np

from penstock.runtime.models import params
from penstock.runtime.models.families.mxfp4 import decode
from penstock.runtime.models.registry import parse_config
from tests.support.models.configs import published, with_mlp


def test_values_computed_by_hand():
    """0x2 is 1.0, 0xF is -6.0, 0x1 is 0.5, 0x9 is -0.5; the scales 127, 130 and 126 mean 1, 8 and 1/2."""
    blocks = np.zeros((2, 2, 16), np.uint8)
    blocks[0, 0, 0] = 0xF2  # the lower half comes first
    blocks[0, 1, 15] = 0x91
    blocks[1, 0, 1] = 0x7A
    scales = np.array([[127, 130], [126, 127]], np.uint8)
    expected = np.zeros((2, 64), np.float32)
    expected[0, :2] = 1.0, -6.0
    expected[0, 62:] = 0.5 * 8, -0.5 * 8
    expected[1, 2:4] = -1.0 / 2, 6.0 / 2
    np.testing.assert_array_equal(decode([blocks, scales]), expected)


def test_all_values_are_those_of_the_format():
    """ml_dtypes has E2M1 and E8M0 of its own."""
    low, high = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    blocks = (low | high << 4).reshape(16, 1, 16)
    scales = np.arange(100, 116, dtype=np.uint8).reshape(16, 1)
    fours = np.stack([low, high], axis=-1).reshape(16, 32).astype(np.uint8)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    expected = fours.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * powers
    np.testing.assert_array_equal(decode([blocks, scales]), expected)


def test_a_checkpoint_in_mxfp4_loads_as_the_floats_that_it_means():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3, "num_experts_per_tok": 2}
    small = {"num_hidden_layers": 1, "layer_types": None, "vocab_size": 64, "num_attention_heads": 8}
    quantized = parse_config({**published("gpt-oss-20b"), **sizes, **small, "experts_per_token": None})
    floats = with_mlp(quantized, stored_as="floats")
    assert dataclasses.replace(quantized, layers=floats.layers) == floats
    rng = np.random.default_rng(1)
    tensors = {}
    for spec in params.load_rules(quantized, "float32").tensors:
        if spec.dtype == np.uint8:
            high = 256 if spec.name.endswith("_blocks") else 140
            tensors[spec.name] = rng.integers(high - 100, high, spec.shape).astype(np.uint8)
        else:
            tensors[spec.name] = rng.standard_normal(spec.shape).astype(np.float32)
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = meant.pop(name), meant.pop(name.replace("_blocks", "_scales"))
        matrices = [decode(pair) for pair in zip(blocks, scales, strict=True)]
        meant[name.removesuffix("_blocks")] = np.stack([matrix.T for matrix in matrices])
    first, second = filled(quantized, tensors), filled(floats, meant)
    assert first.keys() == second.keys()
    for path, leaf in first.items():
        np.testing.assert_array_equal(leaf, second[path])
    gate_up = first["layers", 0, "mlp", "experts", "gate_up_proj", "weight"]
    np.testing.assert_array_equal(gate_up[2, 5], meant["model.layers.0.mlp.experts.gate_up_proj"][2, :, 10])


def filled(config, tensors):
    """The leaves, filled in two runs of rows."""
    shapes = params.leaf_shapes(config, "float32")
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
    for rule in params.load_rules(config, "float32").rules:
        for begin, end in ((0, rule.num_rows // 2), (rule.num_rows // 2, rule.num_rows)):
            rule.fill(leaves, tensors, begin, end)
    return leaves
