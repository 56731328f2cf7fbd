"""Tensors of GGUF files as safetensors files would have them, a few rows at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.runtime.loading.gguf import tensors
from penstock.runtime.loading.gguf.file import TensorInfo, read_gguf
from penstock.runtime.loading.gguf.model import GgufModel, read_model
from penstock.runtime.loading.quantised.checkpoint import format_for
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.families.mxfp4 import decode
from penstock.runtime.models.layers.attention import Attention
from penstock.runtime.models.linear import LinearFormat, project_float32
from penstock.runtime.models.params import bind, leaf_shapes, load_rules
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.codes import MINIMA_FORMS, NESTED_FORMS, TABLE_FORM, CodeForm, dequantised, rows_of
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.linear import unpack
from tests.support.gguf_models import write_gguf
from tests.support.goldens import GOLDEN

import gguf  # isort: skip

pytestmark = pytest.mark.ci

_RNG = np.random.default_rng(39)
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}


def _stored(path: Path, kind: str, *matrices: np.ndarray) -> tuple[list[TensorInfo], list[np.ndarray]]:
    """Return the tensors in a file, and what the package reads of them."""
    chosen = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    blocks = [gguf.quants.quantize(values.astype(np.float32), chosen) for values in matrices]
    for i, values in enumerate(blocks):
        writer.add_tensor(f"t{i}", values, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path).tensors
    return [found[f"t{i}"] for i in range(len(matrices))], [gguf.quants.dequantize(b, chosen) for b in blocks]


def test_rows_of_pairs_are_turned_back_whatever_is_read_at_once(tmp_path: Path) -> None:
    """What llama.cpp's converter does, undone: 3 heads of 8 channels."""
    weights = _RNG.normal(size=(24, 64))
    turned = weights.reshape(3, 2, 4, 64).swapaxes(1, 2).reshape(24, 64)
    (info,), (values,) = _stored(tmp_path / "m.gguf", "Q8_0", turned)
    expected = values.reshape(3, 4, 2, 64).swapaxes(1, 2).reshape(24, 64)
    tensor = tensors.turned_back(info, 3)
    for begin in range(24):
        for end in range(begin, 25):
            np.testing.assert_array_equal(tensor[begin:end], expected[begin:end])


def test_experts_are_the_matrices_of_a_stack(tmp_path: Path) -> None:
    (info,), (values,) = _stored(tmp_path / "m.gguf", "Q4_0", _RNG.normal(size=(3, 6, 32)))
    apart = tensors.experts_apart(info)
    assert len(apart) == 3
    for expert, tensor in enumerate(apart):
        np.testing.assert_array_equal(tensor[1:5], values[expert, 1:5])
    np.testing.assert_array_equal(tensors.whole(info)[1:3], values[1:3])


def test_codes_are_those_of_the_same_rows(tmp_path: Path) -> None:
    """Of rows in another order and of one matrix of a stack; what was computed of values has none."""
    (info,), (values,) = _stored(tmp_path / "m.gguf", "Q4_0", _RNG.normal(size=(24, 64)))
    tensor = tensors.turned_back(info, 3)
    codes = tensor.codes(slice(3, 9), CodeForm(8, zeros=True))
    assert codes is not None
    np.testing.assert_array_equal(codes.dequantised(), tensor[3:9])
    (stack,), (values,) = _stored(tmp_path / "s.gguf", "Q8_0", _RNG.normal(size=(3, 6, 32)))
    of_one = tensors.experts_apart(stack)[1].codes(slice(2, 5), CodeForm(8))
    assert of_one is not None
    np.testing.assert_array_equal(of_one.dequantised(), values[1, 2:5])
    assert tensor.kept == CodeForm(4)
    assert tensors.whole(stack).kept is None
    assert tensors.less_one(info).codes(slice(0, 2), CodeForm(8)) is None
    assert tensors.experts_apart(stack)[1].codes(slice(2, 5), CodeForm(4)) is None


@pytest.mark.parametrize("parts", [1, 2])
def test_mxfp4_is_that_of_gpt_oss(tmp_path: Path, parts: int) -> None:
    """Decoded by the family, values are those that the package reads; rows of gate and up alternate."""
    infos, values = _stored(tmp_path / "m.gguf", "MXFP4", *_RNG.normal(size=(parts, 3, 6, 64)))
    blocks, scales = tensors.mxfp4([tensors.whole(info) for info in infos])
    assert (blocks.shape, scales.shape) == ((3, 6 * parts, 2, 16), (3, 6 * parts, 2))
    for expert in range(3):
        found = decode([blocks[expert : expert + 1][0], scales[expert : expert + 1][0]]).dequantised()
        for part in range(parts):
            np.testing.assert_array_equal(found[part::parts], values[part][expert])
    assert blocks[0:2].shape == (2, *blocks.shape[1:])


@pytest.mark.parametrize("tensor", ["stored", "stack"])
def test_rows_come_one_after_the_other(tmp_path: Path, tensor: str) -> None:
    (info,), _ = _stored(tmp_path / "m.gguf", "F32", np.ones((2, 3, 4)))
    of: Any = {"stored": tensors.whole(info), "stack": tensors.transposed([tensors.whole(info)])}[tensor]
    with pytest.raises(ValueError, match="one after the other"):
        of[0:2:2]


def test_a_model_in_parts_is_that_of_one_file(tmp_path: Path) -> None:
    """Parts as the package writes them."""
    write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf")
    write_gguf(GOLDEN / "qwen3", tmp_path / "p.gguf", parts=5)
    first, *others = sorted(tmp_path.glob("p-*.gguf"))
    assert others
    one, parts = read_model(tmp_path / "m.gguf"), read_model(first)
    assert parts.config == one.config
    assert set(parts.tensors) == set(one.tensors)
    for name, expected in one.tensors.items():
        np.testing.assert_array_equal(parts.tensors[name][0:9], expected[0:9])


def test_heads_of_a_group_are_side_by_side(tmp_path: Path) -> None:
    """Three groups of two heads with four rows each, behind five other rows: stored are the first heads of
    all groups, and then the second ones.
    """
    names = [(group, head, row) for group in range(3) for head in range(2) for row in range(4)]
    stored = sorted(names, key=lambda name: (name[1], name[0], name[2]))
    labels = [-1.0] * 5 + [float(names.index(name)) for name in stored]
    (rows, columns), _ = _stored(
        tmp_path / "m.gguf", "F32", np.array(labels)[:, None], np.array([labels[5:]])
    )
    turned = tensors.grouped(tensors.whole(rows), 3, 2, 4, from_row=5)
    assert turned[0:29][:, 0].tolist() == [-1.0] * 5 + list(range(24))
    assert turned[7:9][:, 0].tolist() == [2.0, 3.0]
    assert tensors.grouped_columns(tensors.whole(columns), 3, 2, 4)[0:1][0].tolist() == list(range(24))


def _llama(folder: Path, kind: str, kinds: Mapping[str, str] | None = None) -> GgufModel:
    """Return a random Llama with 256 channels as a GGUF file."""
    floats = folder / "floats"
    floats.mkdir()
    fields = json.loads((GOLDEN / "llama" / "config.json").read_text()) | _SIZES
    (floats / "config.json").write_text(json.dumps(fields))
    specs = load_rules(parse_config(fields), "float32").tensors
    values = {spec.name: _RNG.standard_normal(spec.shape).astype(np.float32) for spec in specs}
    save_file(values, floats / "model.safetensors")
    write_gguf(floats, folder / "m.gguf", kind=kind, kinds=kinds)
    return read_model(folder / "m.gguf")


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("Q8_0", CodeForm(8)),
        ("Q4_K", NESTED_FORMS[0]),
        pytest.param("Q4_1", MINIMA_FORMS[0], marks=pytest.mark.ci),
        pytest.param("IQ4_XS", TABLE_FORM, marks=pytest.mark.ci),
        pytest.param("Q6_K", NESTED_FORMS[1], marks=pytest.mark.ci),
    ],
)
def test_a_model_keeps_its_codes_where_the_kernels_compute(tmp_path: Path, kind: str, form: CodeForm) -> None:
    """A checkpoint of Llama with 256 channels: each product is one leaf of codes, of which the values are
    those that the file's tensors read as, and so is the table of embeddings, whose rows are looked up.
    """
    model = _llama(tmp_path, kind)
    rules = partial(load_rules, model.config, "bfloat16")
    linear = format_for(LinearFormat(packed=True), model.tensors, rules)
    path = ("layers", 0, "mlp", "gate_up_proj", "weight")
    kept = dict(linear.kept)
    table = ("embed_tokens", "weight")
    assert kept[path] == kept[table] == form
    assert len([found for found in kept if found[0] == "layers"]) == 4 * len(model.config.layers)
    shapes = leaf_shapes(model.config, "bfloat16", linear)
    leaves: dict[Any, Any] = {
        place: np.zeros(shapes[place].shape, shapes[place].dtype) for place in (path, table)
    }
    for rule in rules(linear).rules:
        if rule.targets[0].path in leaves:
            rule.fill(leaves, model.tensors, 0, rule.num_rows)
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    expected = np.concatenate([model.tensors[name][0:256] for name in names])
    found = dequantised(jnp.asarray(leaves[path]), 256, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(found), expected)
    leaf, ids = leaves[table], jnp.array([63, 7, 0])
    rows = rows_of(jnp.asarray(leaf), ids, 256, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(
        np.asarray(rows), model.tensors["model.embed_tokens.weight"][0:64][[63, 7, 0]]
    )


def _values(leaf: np.ndarray) -> np.ndarray:
    """Return what a leaf of a product of 256 inputs holds."""
    if leaf.dtype != np.uint8:
        return unpack(leaf).astype(np.float32)
    return np.asarray(dequantised(jnp.asarray(leaf), 256, jnp.dtype(jnp.float32)))


def _of_package(file: Path, kinds: Mapping[str, str]) -> list[np.ndarray]:
    """Return what the package makes of the first layer's q, k and v, of these kinds."""
    package = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    found = []
    for part, kind in kinds.items():
        tensor = package[f"blk.0.{part}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if part != "attn_v":  # llama.cpp has the two channels of a rotated pair side by side
            values = values.reshape(-1, 16, 2, 256).swapaxes(1, 2).reshape(-1, 256)
        found.append(values.astype(jnp.bfloat16).astype(np.float32) if kind == "F16" else values)
    return found


@pytest.mark.parametrize(
    ("kinds", "leaves"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), {"q_proj": NESTED_FORMS[0], "v_proj": NESTED_FORMS[1]}),
        (
            ("IQ4_XS", "Q8_0", "Q5_K"),
            {"q_proj": TABLE_FORM, "k_proj": CodeForm(8), "v_proj": NESTED_FORMS[1]},
        ),
        pytest.param(
            ("Q4_1", "F16", "F16"), {"q_proj": MINIMA_FORMS[0], "k_proj": None}, marks=pytest.mark.ci
        ),
        pytest.param(("F16", "F16", "F16"), {"weight": None}, marks=pytest.mark.ci),
    ],
)
def test_q_k_and_v_keep_codes_of_different_kinds(
    tmp_path: Path, kinds: tuple[str, str, str], leaves: dict[str, CodeForm | None]
) -> None:
    """Neighbours of one kind share a leaf. What the leaves hold is what the package makes of the file, and
    the layer multiplies that.
    """
    of_parts = dict(zip(("attn_q", "attn_k", "attn_v"), kinds, strict=True))
    model = _llama(tmp_path, "Q8_0", of_parts)
    rules = partial(load_rules, model.config, "bfloat16")
    linear = format_for(LinearFormat(packed=True), model.tensors, rules)
    layer = ("layers", 0, "self_attn", "qkv_proj")
    shapes = leaf_shapes(model.config, "bfloat16", linear)
    assert sorted(path[-1] for path in shapes if path[: len(layer)] == layer) == sorted(leaves)
    made = {path: np.zeros(shape.shape, shape.dtype) for path, shape in shapes.items()}
    for rule in rules(linear).rules:
        if rule.targets[0].path[: len(layer)] == layer:
            rule.fill(made, model.tensors, 0, rule.num_rows)
    found = [_values(made[*layer, name]) for name in leaves]
    weight = np.concatenate(_of_package(tmp_path / "m.gguf", of_parts))
    np.testing.assert_array_equal(np.concatenate(found), weight)
    if library.available():
        bound = bind(model.config, [jnp.asarray(leaf) for leaf in made.values()], "bfloat16", linear)
        x = _RNG.standard_normal((5, 256)).astype(jnp.bfloat16)
        attention = bound.layers[0].self_attn
        assert isinstance(attention, Attention)
        got = project_float32(attention.qkv_proj, jnp.asarray(x), jnp.int32(5), bound.pools)
        wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
        for outputs in (slice(0, 256), slice(256, 320), slice(320, 384)):
            assert np.abs(got[:, outputs] - wanted[:, outputs]).max() <= 0.08 * wanted[:, outputs].std()


@pytest.mark.ci
def test_each_device_has_its_rows_of_codes_of_different_kinds(tmp_path: Path) -> None:
    kinds = {"attn_q": "Q4_1", "attn_k": "F16", "attn_v": "Q8_0"}
    model, devices = _llama(tmp_path, "Q8_0", kinds), 2
    config = cut(model.config, devices)
    linear = format_for(LinearFormat(packed=True), model.tensors, partial(load_rules, config, "bfloat16"))
    layer = ("layers", 0, "self_attn", "qkv_proj")
    shapes = leaf_shapes(config, "bfloat16", linear)
    made = {path: np.zeros(shape.shape, shape.dtype) for path, shape in shapes.items() if path[:4] == layer}
    assert sorted(path[-1] for path in made) == ["k_proj", "q_proj", "v_proj"]
    for rule in load_rules(config, "bfloat16", linear).rules:
        if rule.targets[0].path in made:
            rule.fill(made, model.tensors, 0, rule.num_rows)
    for name, whole in zip(
        ("q_proj", "k_proj", "v_proj"), _of_package(tmp_path / "m.gguf", kinds), strict=True
    ):
        np.testing.assert_array_equal(np.concatenate([_values(own) for own in made[*layer, name]]), whole)
