"""MXFP4: decoded as the format's specification says, and loaded by the rules of gpt-oss."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.loading.quantised.checkpoint import format_for
from penstock.runtime.models import params
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.families.mxfp4 import decode
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.codes import CodeForm, dequantised
from penstock.runtime.ops.native import library
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
    np.testing.assert_array_equal(decode([blocks, scales]).dequantised(), expected)


def test_all_values_are_those_of_the_format():
    """ml_dtypes has E2M1 and E8M0 of its own."""
    low, high = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    blocks = (low | high << 4).reshape(16, 1, 16)
    scales = np.arange(100, 116, dtype=np.uint8).reshape(16, 1)
    fours = np.stack([low, high], axis=-1).reshape(16, 32).astype(np.uint8)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    expected = fours.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * powers
    np.testing.assert_array_equal(decode([blocks, scales]).dequantised(), expected)


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
        matrices = [decode(pair).dequantised() for pair in zip(blocks, scales, strict=True)]
        meant[name.removesuffix("_blocks")] = np.stack([matrix.T for matrix in matrices])
    first, second = filled(quantized, tensors), filled(floats, meant)
    assert first.keys() == second.keys()
    for path, leaf in first.items():
        np.testing.assert_array_equal(leaf, second[path])
    gate_up = first["layers", 0, "mlp", "experts", "gate_up_proj", "weight"]
    np.testing.assert_array_equal(gate_up[2, 5], meant["model.layers.0.mlp.experts.gate_up_proj"][2, :, 10])


@pytest.mark.ci
def test_experts_stay_in_four_bits_and_a_quarter_where_the_kernels_compute_them():
    """Their bytes mean what the tensors do, in a model and on each of two devices."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 2, "num_experts_per_tok": 2}
    small = {"num_hidden_layers": 1, "layer_types": None, "vocab_size": 64, "num_attention_heads": 8}
    config = parse_config({**published("gpt-oss-20b"), **sizes, **small, "experts_per_token": None})
    rng = np.random.default_rng(2)
    tensors = {
        spec.name: rng.integers(120, 130, spec.shape).astype(np.uint8)
        if spec.dtype == np.uint8
        else np.zeros(spec.shape, np.float32)
        for spec in params.load_rules(config, "float32").tensors
    }
    native = LinearFormat(packed=True)
    for devices in (1, 2):
        own = cut(config, devices)
        linear = format_for(native, tensors, partial(params.load_rules, own, "bfloat16"))
        leaves = filled(own, tensors, linear, "bfloat16")
        for part, inputs in (("gate_up_proj", 128), ("down_proj", 256 // devices)):
            leaf = leaves["layers", 0, "mlp", "experts", part, "weight"]
            assert leaf.nbytes == 2 * 128 * 256 * (2 if part == "gate_up_proj" else 1) * 4.25 / 8
            names = [f"model.layers.0.mlp.experts.{part}_{kind}" for kind in ("blocks", "scales")]
            values = decode([tensors[name][1] for name in names]).dequantised()
            on_devices = leaf.reshape(devices, 2, -1, leaf.shape[-1])[:, 1]
            found = [
                np.asarray(dequantised(jnp.asarray(one), inputs, jnp.dtype(jnp.float32)))
                for one in on_devices
            ]
            if part == "down_proj":
                np.testing.assert_array_equal(np.concatenate(found, axis=1), values)
            else:  # a device has its half of the gate's rows, and then of up's
                gate, up = values[0::2], values[1::2]
                halves = [np.split(one, 2) for one in found]
                np.testing.assert_array_equal(np.concatenate([half[0] for half in halves]), gate)
                np.testing.assert_array_equal(np.concatenate([half[1] for half in halves]), up)


def test_int4_makes_integers_of_what_the_small_floats_mean():
    """Bytes of integers cannot hold MXFP4's codes. The values are 0 to 3, and the largest one becomes -8, so
    that a step between integers is 3 / 8.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 2}
    small = {"num_hidden_layers": 1, "layer_types": None, "vocab_size": 64, "num_attention_heads": 8}
    config = parse_config({**published("gpt-oss-20b"), **sizes, **small, "experts_per_token": None})
    rng = np.random.default_rng(4)
    tensors = {
        spec.name: (rng.integers(0, 6, spec.shape) | rng.integers(0, 6, spec.shape) << 4).astype(np.uint8)
        if spec.name.endswith("_blocks")
        else np.full(spec.shape, 127, np.uint8)
        if spec.dtype == np.uint8
        else np.zeros(spec.shape, np.float32)
        for spec in params.load_rules(config, "float32").tensors
    }
    int4 = LinearFormat(packed=True, codes=CodeForm(bits=4))
    linear = format_for(int4, tensors, partial(params.load_rules, config, "bfloat16"))
    leaf = filled(config, tensors, linear, "bfloat16")["layers", 0, "mlp", "experts", "down_proj", "weight"][
        1
    ]
    names = [f"model.layers.0.mlp.experts.down_proj_{kind}" for kind in ("blocks", "scales")]
    meant = decode([tensors[name][1] for name in names]).dequantised()
    found = np.asarray(dequantised(jnp.asarray(leaf), 64, jnp.dtype(jnp.float32)))
    assert np.abs(found - meant).max() < 3 / 8


@pytest.mark.ci
@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
def test_a_model_whose_experts_stay_so_has_the_logits_of_floats(make_sequence):
    """To the bit those of the same model in bfloat16 on the kernels, and nearly those of XLA in float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 16, "num_experts_per_tok": 2}
    small = {"num_hidden_layers": 2, "layer_types": None, "vocab_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "experts_per_token": None}
    config = parse_config({**published("gpt-oss-20b"), **sizes, **small, **heads})
    rng, floats = np.random.default_rng(3), LinearFormat(packed=True)
    tensors = {
        spec.name: rng.integers(0, 256, spec.shape).astype(np.uint8)
        if spec.name.endswith("_blocks")
        else rng.integers(120, 124, spec.shape).astype(np.uint8)
        if spec.dtype == np.uint8
        else (rng.standard_normal(spec.shape) * (0.2 if len(spec.shape) > 1 else 1)).astype(np.float32)
        for spec in params.load_rules(config, "float32").tensors
    }
    kept = format_for(floats, tensors, partial(params.load_rules, config, "bfloat16"))
    assert len(kept.kept) == 4
    found = {}
    for name, linear, dtype in (
        ("kept", kept, "bfloat16"),
        ("floats", floats, "bfloat16"),
        ("xla", PLAIN, "float32"),
    ):
        leaves = filled(config, tensors, linear, dtype)
        state = params.state_of(
            config, {path: jnp.asarray(leaf) for path, leaf in leaves.items()}, dtype, linear
        )
        found[name] = make_sequence(config, state, dtype, linear).feed(list(range(3, 33)))
    np.testing.assert_array_equal(found["kept"], found["floats"])
    assert np.abs(found["kept"] - found["xla"]).max() < 0.05 * np.ptp(found["xla"])


def test_scales_that_are_no_numbers_are_refused_by_the_tensors():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 2}
    small = {"num_hidden_layers": 1, "layer_types": None, "vocab_size": 64, "num_attention_heads": 8}
    config = parse_config({**published("gpt-oss-20b"), **sizes, **small, "experts_per_token": None})
    (rule, *_) = [rule for rule in params.load_rules(config, "float32").rules if rule.decode is not None]
    tensors = {source.name: np.full(source.shape, 127, np.uint8) for source in rule.sources}
    leaves = {target.path: np.zeros((2, 128, 64), np.float32) for target in rule.targets}
    assert rule.fill(leaves, tensors, 0, 4) == []
    tensors[rule.sources[1].name][:] = 255
    assert rule.fill(leaves, tensors, 0, 4) == [source.name for source in rule.sources]


def filled(config, tensors, linear=PLAIN, dtype="float32"):
    """Return the leaves, filled in two runs of rows."""
    shapes = params.leaf_shapes(config, dtype, linear)
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
    for rule in params.load_rules(config, dtype, linear).rules:
        middle = rule.num_rows // 2 // rule.unit * rule.unit
        for begin, end in ((0, middle), (middle, rule.num_rows)):
            if begin < end:
                rule.fill(leaves, tensors, begin, end)
    return leaves
