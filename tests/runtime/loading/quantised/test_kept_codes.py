"""Codes lie in memory as a checkpoint has them, and stand for the same values."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.loading.quantised.checkpoint import find_weights, format_for
from penstock.runtime.loading.quantised.floats import Blocks, fp8
from penstock.runtime.loading.quantised.integers import torchao
from penstock.runtime.loading.quantised.layers import Layer, QuantisedWeight
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import Source
from penstock.runtime.models.params import leaf_shapes, load_rules
from penstock.runtime.models.quantised import quantised
from penstock.runtime.ops.codes import E2M1, E4M3, E4M3_BY_GROUP, CodeForm, dequantised
from tests.support.goldens import QUANTISED

pytestmark = pytest.mark.ci

LEAF = ("layers", 0, "mlp", "gate_up_proj", "weight")
DOWN = ("layers", 0, "mlp", "down_proj", "weight")
TABLE = ("embed_tokens", "weight")
PARTS = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
INT4 = LinearFormat(packed=True, codes=CodeForm(bits=4, zeros=False))
NATIVE = LinearFormat(packed=True)


def loaded(name: str, linear: LinearFormat) -> tuple[LinearFormat, dict[tuple[str | int, ...], jax.Array]]:
    """Return a golden's format in memory where floats would have `linear`, and its leaves."""
    config, tensors = load_config(QUANTISED / name), find_weights(QUANTISED / name)
    found = format_for(linear, tensors, partial(load_rules, config, "bfloat16"))
    state = load_weights(QUANTISED / name, config, "bfloat16", linear=found, progress=False)
    return found, dict(zip(leaf_shapes(config, "bfloat16", found), jax.tree.leaves(state), strict=True))


def told(name: str) -> np.ndarray:
    """Return the values of the leaf as the files tell them."""
    tensors = find_weights(QUANTISED / name)
    return np.concatenate([tensors[part][0:256] for part in PARTS])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("awq_g64", CodeForm(bits=4, zeros=True)),
        pytest.param("gptq_v1_asym_g32", CodeForm(bits=4, zeros=True), marks=pytest.mark.ci),
        ("gptq_mislabelled_v2_g128", CodeForm(bits=4, zeros=False)),
        pytest.param("gptq_8bit_channel", CodeForm(bits=8, zeros=False), marks=pytest.mark.ci),
        pytest.param("ct_w4a16_asym_g64", CodeForm(bits=4, zeros=True), marks=pytest.mark.ci),
        ("ct_w8a8_int8", CodeForm(bits=8, zeros=False)),
        ("mlx_4bit_g64", CodeForm(bits=4, minima=True)),
        ("ct_mxfp4a16", E2M1),
        pytest.param("ct_fp8_dynamic", E4M3, marks=pytest.mark.ci),
        pytest.param("ct_fp8_static", E4M3, marks=pytest.mark.ci),
    ],
)
def test_the_kernels_codes_stand_for_the_values_of_the_files(name: str, form: CodeForm) -> None:
    linear, leaves = loaded(name, NATIVE)
    assert linear.codes is None
    assert dict(linear.kept)[LEAF] == form
    assert leaves[LEAF].shape == form.shape(512, 128)
    values = dequantised(leaves[LEAF], 128, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(values), told(name))
    # What was not quantised stays so; MLX quantises the table of embeddings, too.
    assert leaves[TABLE].dtype == (jnp.uint8 if name == "mlx_4bit_g64" else jnp.bfloat16)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "awq_g64",
        pytest.param("gptq_mislabelled_v2_g128", marks=pytest.mark.ci),
        pytest.param("gptq_8bit_channel", marks=pytest.mark.ci),
        pytest.param("ct_w8a8_int8", marks=pytest.mark.ci),
        "ct_mxfp4a16",
        pytest.param("ct_fp8_dynamic", marks=pytest.mark.ci),
    ],
)
def test_each_device_keeps_the_codes_of_its_inputs(name: str) -> None:
    """Two devices have 64 inputs each of o_proj, also where 128 share a scale."""
    devices, tensors = 2, find_weights(QUANTISED / name)
    config = cut(load_config(QUANTISED / name), devices)
    linear = format_for(NATIVE, tensors, partial(load_rules, config, "bfloat16"))
    assert ("layers", 0, "self_attn", "o_proj", "weight") in dict(linear.kept)
    shapes = leaf_shapes(config, "bfloat16", linear)
    leaves = {path: np.zeros(shape.shape, shape.dtype) for path, shape in shapes.items()}
    for rule in load_rules(config, "bfloat16", linear).rules:
        rule.fill(leaves, tensors, 0, rule.num_rows)
    whole = tensors["model.layers.0.self_attn.o_proj.weight"][0:128]
    own = leaves["layers", 0, "self_attn", "o_proj", "weight"]
    pieces = [np.asarray(dequantised(jnp.asarray(leaf), 64, jnp.dtype(jnp.float32))) for leaf in own]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["gptq_desc_act_g32", "ct_nvfp4a16", "fp8_block", "bnb_int8", "torchao_int8"]
)
def test_what_no_codes_in_memory_can_hold_is_made_floats(name: str) -> None:
    linear, leaves = loaded(name, NATIVE)
    assert LEAF not in dict(linear.kept)
    assert leaves[LEAF].dtype == jnp.bfloat16


@pytest.mark.ci
def test_scales_of_blocks_stay_with_their_inputs() -> None:
    """down_proj has two blocks of 128 inputs, whole or one on each of two devices; four devices would have
    halves of blocks, and have floats.
    """
    linear, leaves = loaded("ct_fp8_block", NATIVE)
    there = find_weights(QUANTISED / "ct_fp8_block")["model.layers.0.mlp.down_proj.weight"][0:128]
    assert (dict(linear.kept)[DOWN], leaves[DOWN].shape) == (E4M3_BY_GROUP, (8, 256 * 16 + 2 * 64))
    np.testing.assert_array_equal(np.asarray(dequantised(leaves[DOWN], 256, jnp.dtype(jnp.float32))), there)
    for devices, is_kept in ((2, True), (4, False)):
        config, tensors = (
            cut(load_config(QUANTISED / "ct_fp8_block"), devices),
            find_weights(QUANTISED / "ct_fp8_block"),
        )
        kept = format_for(NATIVE, tensors, partial(load_rules, config, "bfloat16"))
        assert (DOWN in dict(kept.kept)) == is_kept
        if is_kept:
            shape = leaf_shapes(config, "bfloat16", kept)[DOWN].shape
            found = np.zeros(shape, np.uint8)
            for rule in load_rules(config, "bfloat16", kept).rules:
                if rule.targets[0].path == DOWN:
                    rule.fill({DOWN: found}, tensors, 0, rule.num_rows)
            pieces = [np.asarray(dequantised(jnp.asarray(own), 128, jnp.dtype(jnp.float32))) for own in found]
            np.testing.assert_array_equal(np.concatenate(pieces, axis=1), there)


@pytest.mark.parametrize(
    ("scale_type", "zero_type", "is_kept"),
    [
        (ml_dtypes.bfloat16, np.int8, True),
        (ml_dtypes.bfloat16, np.int32, False),
        (np.float32, np.int8, False),
    ],
)
def test_torchaos_codes_are_kept_where_float16_has_scales_and_zeros(
    tmp_path: Path, scale_type: type[np.generic], zero_type: type[np.generic], is_kept: bool
) -> None:
    rng = np.random.default_rng(7)
    codes, zeros = rng.integers(-128, 128, (16, 128)), rng.integers(-20, 20, (16, 2))
    scales = (rng.random((16, 2)) + 0.1).astype(scale_type)
    arrays = {
        "q._weight_qdata": codes.astype(np.int8),
        "q._weight_scale": scales,
        "q._weight_zero_point": zeros.astype(zero_type),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    told = json.dumps({"_type": "IntxUnpackedToInt8Tensor", "_data": {"block_size": [1, 64]}})
    found = find_tensors(tmp_path)
    weight = torchao(Layer("q", {name.removeprefix("q."): entry for name, entry in found.items()}, told))
    assert weight.kept == (CodeForm(8, zeros=True) if is_kept else None)
    if is_kept:
        kept = weight.codes(slice(0, 16), CodeForm(8, zeros=True))
        assert kept is not None
        leaf = np.zeros(CodeForm(8, zeros=True).shape(16, 128), np.uint8)
        kept.pack(leaf)
        meant = scales.astype(np.float64).repeat(64, axis=1) * (codes - zeros.repeat(64, axis=1))
        values = dequantised(jnp.asarray(leaf), 128, jnp.dtype(jnp.float32))
        np.testing.assert_array_equal(np.asarray(values), meant)


def of_fp8(folder: Path, codes: np.ndarray, scales: np.ndarray, blocks: Blocks) -> QuantisedWeight:
    """Make a layer in FP8 as a file has it."""
    arrays = {"q.weight": codes.view(ml_dtypes.float8_e4m3fn), "q.weight_scale": scales}
    save_file(arrays, folder / "model.safetensors")
    found = find_tensors(folder)
    layer = Layer("q", {name.removeprefix("q."): entry for name, entry in found.items()})
    return fp8(layer, blocks, scale="weight_scale")


def test_halves_of_coarse_groups_keep_their_scale(tmp_path: Path) -> None:
    """256 inputs share a scale, and each of four devices has 128 of 512 inputs, as its part in memory."""
    rng = np.random.default_rng(5)
    codes, scales = rng.integers(0, 0x7F, (16, 512)).astype(np.uint8), rng.random((16, 2)).astype(np.float32)
    weight = of_fp8(tmp_path, codes, scales, Blocks(1, 256))
    assert weight.kept == E4M3_BY_GROUP
    source = Source("q.weight", (16, 512), columns=slice(384, 512))
    found = source.codes(weight, 0, 16, E4M3_BY_GROUP)
    assert found is not None
    meant = codes[:, 384:].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[:, 1:]
    np.testing.assert_array_equal(found.dequantised(), meant)


@pytest.mark.parametrize("scale", [2.0**120, -(2.0**127)])
def test_scales_that_make_infinite_values_are_refused_where_codes_are_kept(
    tmp_path: Path, scale: float
) -> None:
    """The kernels would make no numbers of codes that are 0."""
    codes, scales = np.zeros((16, 64), np.uint8), np.full((16, 1), scale, np.float32)
    weight = of_fp8(tmp_path, codes, scales, Blocks(1, None))
    with pytest.raises(ConfigError, match=r"q\.weight_scale and its codes make values that are infinite"):
        weight.codes(slice(0, 16), E4M3)


def test_leaves_of_one_model_may_differ() -> None:
    """A layer that is not quantised stays in floats beside others that are."""
    tensors = dict(find_weights(QUANTISED / "awq_g64"))
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name][0 : tensors[name].shape[0]]
    config = load_config(QUANTISED / "awq_g64")
    kept = dict(format_for(NATIVE, tensors, partial(load_rules, config, "bfloat16")).kept)
    assert DOWN not in kept
    assert kept[LEAF] == CodeForm(bits=4, zeros=True)


@pytest.mark.parametrize("linear", [LinearFormat(), LinearFormat(packed=True, int8=True)])
def test_codes_are_kept_only_for_kernels_and_not_in_int8(linear: LinearFormat) -> None:
    assert loaded("awq_g64", linear)[0] == linear


@pytest.mark.parametrize(("name", "zeros"), [("awq_g64", True), ("gptq_mislabelled_v2_g128", False)])
def test_int4_keeps_codes_of_4_bits(name: str, zeros: bool) -> None:
    linear, leaves = loaded(name, INT4)
    assert linear.codes == CodeForm(bits=4, zeros=zeros)
    values = dequantised(leaves[LEAF], 128, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(values), told(name))
    assert leaves[TABLE].dtype == jnp.int8


@pytest.mark.parametrize("name", ["gptq_desc_act_g32", "gptq_8bit_channel"])
def test_int4_quantises_other_weights_anew(name: str) -> None:
    linear, leaves = loaded(name, INT4)
    assert linear.codes == CodeForm(bits=4, zeros=False)
    there = told(name)
    error = np.abs(np.asarray(dequantised(leaves[LEAF], 128, jnp.dtype(jnp.float32))) - there)
    assert 0 < error.mean() < 0.15 * np.abs(there).mean()


def test_floats_become_codes_of_8_bits_within_half_a_step() -> None:
    """An update sends floats to a model whose codes have 8 bits."""
    weight = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    weight[0, :32] = 0
    codes = quantised(weight, CodeForm(bits=8))
    steps = np.repeat(np.abs(weight).reshape(16, 2, 32).max(axis=2) / 127, 32, axis=1)
    assert (np.abs(codes.dequantised() - weight) <= steps * 0.501).all()
