"""What is wrong with a quantised checkpoint ends in a ConfigError that names the field or the tensor."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.quantised.checkpoint import find_weights
from penstock.runtime.loading.quantised.config import read_quantisation
from penstock.runtime.loading.quantised.layers import QuantisedWeight
from tests.support.goldens import GOLDEN, QUANTISED

NAMES = sorted(folder.name for folder in QUANTISED.iterdir())
LAYER = "model.layers.0.self_attn.q_proj"
Header = dict[str, dict[str, Any]]
TOLD = '{"_type": "Int8Tensor", "_data": {"block_size": [128, 128]}}'
"""What another of torchao's files might say of a weight."""


def parted(data: bytes) -> tuple[Header, bytes]:
    """Parse a safetensors file as its header and its data."""
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def entries(header: Header) -> list[dict[str, Any]]:
    """Return what a header says of the tensors."""
    return [entry for name, entry in header.items() if name != "__metadata__"]


def joined(header: Header, data: bytes) -> bytes:
    """Make a safetensors file of these parts."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def written(folder: Path, name: str, change: Callable[[dict[str, Any]], None] = lambda config: None) -> Path:
    """Make a copy of a golden, in which the quantisation's config is changed."""
    shutil.copytree(QUANTISED / name, folder / name)
    file = folder / name / "config.json"
    config = json.loads(file.read_text())
    change(config.get("quantization_config") or config["quantization"])
    file.write_text(json.dumps(config))
    return folder / name


def changed(folder: Path, change: Callable[[Header, bytearray], None]) -> Path:
    """Return the same folder, in whose tensors something is changed. Data of tensors that are left out stays,
    under a name that no model knows.
    """
    file = folder / "model.safetensors"
    header, data = parted(file.read_bytes())
    places = {tuple(entry["data_offsets"]) for entry in entries(header)}
    raw = bytearray(data)
    change(header, raw)
    kept = {tuple(entry["data_offsets"]) for entry in entries(header)}
    for i, (begin, end) in enumerate(sorted(places - kept)):
        header[f"rest.{i}"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    file.write_bytes(joined(header, bytes(raw)))
    return folder


def values_of(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the values of all quantised weights."""
    return {
        name: tensor[0 : tensor.shape[0]]
        for name, tensor in find_weights(folder).items()
        if isinstance(tensor, QuantisedWeight)
    }


def group(**weights: Any) -> Callable[[dict[str, Any]], None]:
    """Make a change of what compressed-tensors' config says of weights."""
    return lambda told: told["config_groups"]["group_0"]["weights"].update(weights)


def field(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Make a change of fields."""
    return lambda told: told.update(fields)


FIELDS: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("awq_g64", field(bits=3), "bits: 3 is not supported"),
    ("awq_g64", field(bits=8), "bits: 8 is not supported"),
    ("awq_g64", field(bits="4"), "bits: must be an integer"),
    ("awq_g64", field(group_size=-2), "group_size: must be an integer of at least 1"),
    ("awq_g64", field(version="gemv"), "version: 'gemv' is not supported"),
    ("awq_g64", field(zero_point=False), "zero_point: False is not supported"),
    ("awq_g64", field(modules_to_not_convert="lm_head"), "modules_to_not_convert: must be a list"),
    ("awq_g64", field(rotation="hadamard"), "rotation: 'hadamard' is not supported"),
    ("awq_g64", field(quant_method="modelopt"), "quant_method: 'modelopt' is not supported"),
    ("awq_g64", field(quant_method=["awq"]), "quant_method: "),
    ("gptq_v2_asym_g64", field(bits=2), "bits: 2 is not supported"),
    ("gptq_v2_asym_g64", field(checkpoint_format="marlin"), "checkpoint_format: 'marlin'"),
    ("gptq_v2_asym_g64", field(pack_dtype="int16"), "pack_dtype: 'int16'"),
    ("gptq_v2_asym_g64", field(desc_act=1), "desc_act: must be true or false"),
    ("gptq_v2_asym_g64", field(dynamic={"(": {}}), r"dynamic.(: is no regular expression"),
    ("gptq_v2_asym_g64", field(dynamic={"a": {"bits": 5}}), "dynamic.a.bits: 5 is not supported"),
    ("gptq_v2_asym_g64", field(dynamic={"a": {"rank": 5}}), "dynamic.a.rank: 5 is not supported"),
    ("ct_w4a16_asym_g64", group(num_bits=3), "weights.num_bits: 3 is not supported"),
    ("ct_w4a16_asym_g64", group(type="float"), "weights.symmetric: must be true for floats"),
    ("ct_w4a16_asym_g64", group(strategy="block"), "weights.strategy: 'block' is not supported for 4 bits"),
    ("ct_w4a16_asym_g64", group(dynamic=True), "weights.dynamic: True is not supported"),
    ("ct_w4a16_asym_g64", group(lattice="e8"), "weights.lattice: 'e8' is not supported"),
    ("ct_w4a16_asym_g64", field(format="marlin-24"), "format: 'marlin-24' is not supported"),
    ("ct_w4a16_asym_g64", field(format="int-quantized"), "weights.num_bits: 4 of the type 'int'"),
    ("ct_w4a16_asym_g64", field(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
    ("ct_w4a16_asym_g64", field(transform_config={"a": 1}), "transform_config: "),
    ("ct_w4a16_asym_g64", field(config_groups={}), "config_groups: names no group"),
    ("ct_w4a16_asym_g64", field(config_groups={"a": 1}), "config_groups.a: must be an object"),
    ("ct_w4a16_asym_g64", field(config_groups={"a": {"targets": ["Conv1d"]}}), "targets: 'Conv1d'"),
    ("ct_mxfp4a16", group(group_size=64), "weights.num_bits: 4 of the type 'float' and group_size 64"),
    ("ct_fp8_block", group(block_structure="128"), "weights.block_structure: must be two sizes"),
    (
        "ct_w8a8_int8",
        lambda told: told["config_groups"]["group_0"].update(output_activations={"a": 1}),
        "output",
    ),
    ("fp8_block", field(fmt="e5m2"), "fmt: 'e5m2' is not supported"),
    ("fp8_block", field(weight_block_size=[128]), "weight_block_size: must be two sizes"),
    ("fp8_block", field(weight_block_size=[128, 0]), "weight_block_size: must be two sizes"),
    ("fp8_block", field(activation_scheme="block"), "activation_scheme: 'block'"),
    ("bnb_nf4", field(load_in_8bit=True), "load_in_4bit: or load_in_8bit must be true"),
    ("bnb_nf4", field(bnb_4bit_quant_storage="bfloat16"), "bnb_4bit_quant_storage: 'bfloat16'"),
    ("mlx_4bit_g64", field(mode="mxfp4"), "mode: 'mxfp4' is not supported"),
    ("mlx_4bit_g64", field(bits=6), "bits: 6 is not supported"),
    ("mlx_4bit_g64", field(lm_head=3), "lm_head: 3 is not supported"),
]


@pytest.mark.parametrize(("name", "change", "said"), FIELDS)
def test_a_config_that_is_not_understood_is_refused_by_its_field(
    tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        find_weights(written(tmp_path, name, change))
    assert "config.json cannot be served" in str(refused.value)
    assert said in str(refused.value)


def rename(**names: str) -> Callable[[Header, bytearray], None]:
    """Give tensors of the layer other endings."""

    def change(header: Header, data: bytearray) -> None:
        for old, new in names.items():
            header[f"{LAYER}.{new}"] = header.pop(f"{LAYER}.{old}")

    return change


def told(ending: str, **fields: Any) -> Callable[[Header, bytearray], None]:
    """Change what the header says of one tensor."""
    return lambda header, data: header[f"{LAYER}.{ending}"].update(fields)


def filled(ending: str, value: Any, dtype: str, at: int = 0) -> Callable[[Header, bytearray], None]:
    """Write one value into a tensor."""

    def change(header: Header, data: bytearray) -> None:
        begin = header[f"{LAYER}.{ending}"]["data_offsets"][0]
        raw = np.array(value, dtype).tobytes()
        data[begin + at * len(raw) : begin + (at + 1) * len(raw)] = raw

    return change


TENSORS: list[tuple[str, Callable[[Header, bytearray], None], str, str]] = [
    ("awq_g64", rename(qweight="x"), "", "is quantised, with qzeros, but has no qweight"),
    ("awq_g64", rename(qzeros="x"), "", "has no qzeros"),
    ("awq_g64", rename(scales="x"), "", "has no scales"),
    (
        "awq_g64",
        rename(qweight="weight", qzeros="x", scales="y"),
        "weight",
        "says that the layer is quantised",
    ),
    ("awq_g64", told("qweight", shape=[64, 32]), "qzeros", "has shape [2, 16], expected [1, 32]"),
    ("awq_g64", told("qweight", dtype="U32"), "qweight", "has dtype U32, expected I32"),
    ("awq_g64", told("qweight", shape=[2048]), "qweight", "has shape [2048], which is no matrix"),
    ("awq_g64", told("scales", dtype="I16"), "scales", "has dtype I16, expected F32 or BF16 or F16"),
    ("awq_g64", filled("scales", np.nan, "f2", 5), "scales", "infinite or no numbers"),
    ("awq_g64", filled("scales", np.inf, "f2", 255), "scales", "infinite or no numbers"),
    ("awq_g64", filled("scales", 0, "f2", 7), "scales", "has a scale of 0 where weights are not 0"),
    ("gptq_desc_act_g32", filled("g_idx", 9, "i4", 3), "g_idx", "names groups from 0 to 9 of 4"),
    ("gptq_desc_act_g32", filled("g_idx", -1, "i4", 3), "g_idx", "names groups from -1 to 3 of 4"),
    ("gptq_desc_act_g32", told("g_idx", shape=[64, 2]), "g_idx", "has shape [64, 2], expected [128]"),
    ("gptq_desc_act_g32", rename(g_idx="x"), "", "has no g_idx"),
    ("gptq_v1_asym_g32", filled("qzeros", -1, "i4", 2), "qzeros", "stands for 0 or for 16"),
    ("gptq_mislabelled_v2_g128", filled("qzeros", 0x77777778, "i4", 1), "qzeros", "has other zeros than 8"),
    ("gptq_v2_asym_g64", filled("scales", np.nan, "f2", 5), "scales", "infinite or no numbers"),
    ("ct_w4a16_asym_g64", filled("weight_shape", 129, "i8", 1), "weight_shape", "says [128, 129]"),
    ("ct_w4a16_asym_g64", filled("weight_shape", 1 << 60, "i8", 0), "weight_shape", "says [115"),
    ("ct_w4a16_asym_g64", filled("weight_shape", -8, "i8", 1), "weight_shape", "says [128, -8]"),
    ("ct_w4a16_asym_g64", rename(weight_shape="x"), "", "has no weight_shape"),
    ("ct_w4a16_asym_g64", rename(weight_zero_point="x"), "", "has no weight_zero_point"),
    ("ct_w4a16_asym_g64", told("weight_scale", shape=[2, 128]), "weight_scale", "expected [128, 2]"),
    ("ct_w8a8_int8", rename(weight_scale="x"), "", "is quantised, with weight, but has no weight_scale"),
    ("ct_w8a8_int8", filled("weight_scale", 0x7F80, "u2"), "weight_scale", "infinite or no numbers"),
    ("ct_fp8_dynamic", filled("weight", 0x7F, "u1", 99), "weight", "has values that are no numbers"),
    ("ct_fp8_dynamic", rename(weight_scale="x"), "", "has no weight_scale"),
    ("fp8_block", rename(weight_scale_inv="weight_scale"), "", "has no weight_scale_inv"),
    ("fp8_block", told("weight_scale_inv", shape=[2, 1]), "weight_scale_inv", "expected [1, 2]"),
    ("fp8_block", filled("weight_scale_inv", 0, "f4"), "weight_scale_inv", "has a scale of 0"),
    ("ct_mxfp4a16", filled("weight_scale", 255, "u1", 9), "weight_scale", "scales that are no numbers"),
    ("ct_nvfp4a16", filled("weight_global_scale", 0, "f4"), "weight_global_scale", "is 0, by which"),
    ("ct_nvfp4a16", filled("weight_scale", 0x7F, "u1", 9), "weight_scale", "infinite or no numbers"),
    ("bnb_nf4", filled("weight.absmax", np.nan, "f4", 3), "weight.absmax", "infinite or no numbers"),
    ("bnb_nf4", filled("weight.quant_map", np.inf, "f4", 3), "weight.quant_map", "infinite"),
    ("bnb_nf4", rename(**{"weight.quant_map": "x"}), "", "has no weight.quant_map"),
    ("bnb_nf4", rename(**{"weight.quant_state.bitsandbytes__nf4": "x"}), "", "has no weight.quant_state"),
    ("bnb_nf4", filled("weight.quant_state.bitsandbytes__nf4", 0xFF, "u1", 9), "nf4", "cannot be read"),
    ("bnb_nf4_double", rename(**{"weight.nested_absmax": "x"}), "", "has no weight.nested_absmax"),
    ("bnb_int8", filled("weight_format", 1, "u1"), "weight_format", "is [1]; only 0, rows"),
    ("bnb_int8", rename(SCB="x"), "", "has no SCB"),
    ("torchao_int8", rename(_weight_scale="x"), "", "has no _weight_scale"),
    ("torchao_int8", told("_weight_scale", shape=[1, 128]), "_weight_scale", "expected [128, 1]"),
    ("torchao_int8", filled("_weight_scale", np.nan, "f4"), "_weight_scale", "infinite or no numbers"),
    ("mlx_4bit_g64", rename(biases="x"), "", "has no biases"),
    ("mlx_4bit_g64", filled("biases", np.nan, "f2", 3), "biases", "infinite or no numbers"),
]


@pytest.mark.parametrize(("name", "change", "ending", "said"), TENSORS)
def test_tensors_that_are_wrong_are_named_with_their_file(
    tmp_path: Path, name: str, change: Callable[[Header, bytearray], None], ending: str, said: str
) -> None:
    folder = changed(written(tmp_path, name), change)
    with pytest.raises(ConfigError) as refused:
        values_of(folder)
    assert str(folder / "model.safetensors") in str(refused.value)
    assert LAYER in str(refused.value)
    assert ending in str(refused.value)
    assert said in str(refused.value)


CONTRADICTIONS: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("awq_g64", field(modules_to_not_convert=["q_proj"]), "says that the layer is not"),
    ("fp8_block", field(ignored_layers=[LAYER]), "says that the layer is not"),
    ("ct_w8a8_int8", field(ignore=["lm_head", "re:.*q_proj"]), "says that the layer is not"),
    ("gptq_v2_asym_g64", field(dynamic={"-:.*q_proj": {}}), "says that the layer is not"),
    ("mlx_4bit_g64", field(**{LAYER: False}), "says that the layer is not"),
    ("gptq_v2_asym_g64", field(group_size=32), "qzeros has shape [2, 16], expected [4, 16]"),
    ("gptq_v2_asym_g64", field(bits=8), "qzeros has shape [2, 16], expected [1, 32]"),
    ("gptq_desc_act_g32", field(desc_act=False), "g_idx has groups whose inputs lie apart"),
    ("awq_g64", field(group_size=100), "has 128 inputs, which groups of 100 do not divide"),
    ("ct_w4a16_asym_g64", group(symmetric=True), "weight_zero_point is there, but symmetric is true"),
    ("ct_w8a16_channel", group(num_bits=4), "weight_shape says [128, 128]"),
]


@pytest.mark.parametrize(("name", "change", "said"), CONTRADICTIONS)
def test_a_config_that_contradicts_its_tensors_is_refused(
    tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        values_of(written(tmp_path, name, change))
    assert f"model.safetensors: tensor {LAYER}." in str(refused.value)
    assert said in str(refused.value)


def test_a_config_of_quantised_layers_needs_some(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "qwen3", tmp_path / "floats")
    file = tmp_path / "floats" / "config.json"
    told = json.loads((QUANTISED / "awq_g64" / "config.json").read_text())["quantization_config"]
    (tmp_path / "floats" / "quant_config.json").write_text(json.dumps(told))
    assert not values_of(tmp_path / "floats")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": told}))
    with pytest.raises(
        ConfigError, match=r"config.json says that layers are quantised \(awq\), but no tensor"
    ):
        find_weights(tmp_path / "floats")


def test_a_scale_of_0_is_right_where_all_weights_are_0(tmp_path: Path) -> None:
    """The middle of 4 bits is 8, of which eight make a word of 32 bits."""

    def change(header: Header, data: bytearray) -> None:
        filled("weight_scale", 0, "u2")(header, data)
        for word in range(128 // 8):
            filled("weight_packed", np.uint32(0x88888888), "u4", word)(header, data)

    folder = changed(written(tmp_path, "ct_w4a16_actorder_g32"), change)
    # The first output has four groups, of which the first has no scale: all its codes are 0.
    assert not values_of(folder)[f"{LAYER}.weight"][0].any()


def mutated(data: bytes, header_too: bool, draw: st.DataObject) -> bytes:
    """Make a file with a few bytes changed, a field of its header changed, or its end cut off."""
    kind = draw.draw(st.sampled_from(("bytes", "header", "cut") if header_too else ("bytes",)))
    length = struct.unpack("<Q", data[:8])[0]
    if kind == "cut":
        return data[: draw.draw(st.integers(0, len(data) - 1))]
    if kind == "bytes":
        raw = bytearray(data)
        for _ in range(draw.draw(st.integers(1, 8))):
            first = 0 if header_too and draw.draw(st.booleans()) else 8 + length
            raw[draw.draw(st.integers(first, len(raw) - 1))] = draw.draw(st.integers(0, 255))
        return bytes(raw)
    header, rest = parted(data)
    if draw.draw(st.booleans()):
        told = header["__metadata__"]
        told[draw.draw(st.sampled_from(sorted(told)))] = draw.draw(
            st.sampled_from(("", "{}", "[]", "[[", TOLD))
        )
        return joined(header, rest)
    name = draw.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    entry = header[name]
    size = st.sampled_from((0, 1, 2, 7, 64, 128, 256, 1 << 31, 1 << 62, -1))
    match draw.draw(st.sampled_from(("dtype", "shape", "name", "drop"))):
        case "dtype":
            entry["dtype"] = draw.draw(
                st.sampled_from(("I32", "U32", "F32", "F8_E5M2", "F8_E4M3", "U8", "I8"))
            )
        case "shape":
            entry["shape"] = (
                draw.draw(st.lists(size, max_size=3)) if draw.draw(st.booleans()) else entry["shape"][::-1]
            )
        case "name":
            ending = draw.draw(
                st.sampled_from(("weight", "qweight", "weight_scale", "weight.absmax", "g_idx"))
            )
            header[f"{LAYER}.{ending}"] = header.pop(name)
        case "drop":
            del header[name]
    return joined(header, rest)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes]]:
    """Each golden in a folder of its own, and its tensors' file."""
    root = tmp_path_factory.mktemp("fuzzed")
    for name in NAMES:
        shutil.copytree(QUANTISED / name, root / name)
    return {name: (root / name, (root / name / "model.safetensors").read_bytes()) for name in NAMES}


def attack(fuzzed: dict[str, tuple[Path, bytes]], draw: st.DataObject) -> None:
    """Read a mutated file. Whatever it holds, it ends in finite values or in a ConfigError."""
    folder, data = fuzzed[draw.draw(st.sampled_from(NAMES))]
    (folder / "model.safetensors").write_bytes(mutated(data, draw.draw(st.booleans()), draw))
    try:
        values = values_of(folder)
    except ConfigError:
        return
    assert all(np.isfinite(each).all() for each in values.values())


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_mutated_file_ends_in_values_or_an_error(
    fuzzed: dict[str, tuple[Path, bytes]], draw: st.DataObject
) -> None:
    attack(fuzzed, draw)


@pytest.mark.sweep
@given(st.data())
@settings(max_examples=1500, deadline=None)
def test_many_mutated_files_end_in_values_or_an_error(
    fuzzed: dict[str, tuple[Path, bytes]], draw: st.DataObject
) -> None:
    attack(fuzzed, draw)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(),
    st.sampled_from(("int", "float", "group", "re:(", "Linear", "gptq", "pack-quantized", "x")),
)
FLAT = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
JSON = st.one_of(FLAT, st.dictionaries(st.sampled_from(("a", "weights", "bits")), FLAT))


@given(st.sampled_from(NAMES), st.data())
@settings(max_examples=200, deadline=None)
def test_a_config_with_any_value_in_any_field_is_read_or_refused(name: str, draw: st.DataObject) -> None:
    """Also one field within a group of compressed-tensors."""
    config = json.loads((QUANTISED / name / "config.json").read_text())
    told = config.get("quantization_config") or config["quantization"]
    groups = told.get("config_groups", {}).get("group_0", {})
    place = draw.draw(st.sampled_from([place for place in (told, groups, groups.get("weights")) if place]))
    place[draw.draw(st.sampled_from(sorted(place)))] = draw.draw(JSON)
    try:
        quantisation = read_quantisation(QUANTISED / name, config)
    except ConfigError:
        return
    assert quantisation is None or quantisation.may_be_plain("lm_head") in (True, False)
