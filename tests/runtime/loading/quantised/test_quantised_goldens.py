"""Quantised checkpoints read as the weights that other projects' own code made of them.

tests/golden/quantised has tiny checkpoints in the layouts that are published. `expected.json` names the
package that dequantised each, and has of every weight the sums in float64, and the first and last values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.quantised.checkpoint import find_weights, without_empty_biases
from penstock.runtime.loading.quantised.layers import QuantisedWeight
from penstock.runtime.models.load_rules import Tensor
from penstock.runtime.models.params import load_rules
from tests.support.goldens import QUANTISED

FORMS = {
    "awq_g64": "AWQ, 4 bits, groups of 64 with zeros",
    "bnb_int8": "bitsandbytes, 8 bits, a scale for each output",
    "bnb_nf4": "bitsandbytes nf4, 4 bits, groups of 64",
    "bnb_nf4_double": "bitsandbytes nf4, 4 bits, groups of 64",
    "ct_fp8_block": "FP8, 8 bits, blocks of 128 x 128",
    "ct_fp8_dynamic": "FP8, 8 bits, a scale for each output",
    "ct_fp8_static": "FP8, 8 bits, one scale",
    "ct_mxfp4a16": "MXFP4, 4 bits, groups of 32",
    "ct_nvfp4a16": "NVFP4, 4 bits, groups of 16",
    "ct_w4a16_actorder_g32": "compressed-tensors, 4 bits, groups of 32, in an order of their own",
    "ct_w4a16_asym_g64": "compressed-tensors, 4 bits, groups of 64 with zeros",
    "ct_w8a16_channel": "compressed-tensors, 8 bits, a scale for each output",
    "ct_w8a8_int8": "compressed-tensors, 8 bits, a scale for each output",
    "fp8_block": "FP8, 8 bits, blocks of 128 x 128",
    "gptq_8bit_channel": "GPTQ, 8 bits, a scale for each output",
    "gptq_desc_act_g32": "GPTQ, 4 bits, groups of 32, in an order of their own",
    "gptq_mislabelled_v2_g128": "GPTQ, 4 bits, groups of 128",
    "gptq_v1_asym_g32": "GPTQ, 4 bits, groups of 32 with zeros",
    "gptq_v2_asym_g64": "GPTQ, 4 bits, groups of 64 with zeros",
    "mlx_4bit_g64": "MLX, 4 bits, groups of 64 with zeros",
    "torchao_int8": "torchao, 8 bits, a scale for each output with zeros",
    "torchao_intx4_g32": "torchao, 8 bits, groups of 32 with zeros",
}
"""What each golden's layers are, for people."""


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((QUANTISED / name / "expected.json").read_text())
    return found


def rows_of(tensor: Tensor, size: int) -> np.ndarray:
    """Read the tensor, so many rows at a time."""
    count = tensor.shape[0]
    return np.concatenate([tensor[begin : min(begin + size, count)] for begin in range(0, count, size)])


def test_every_golden_is_compared() -> None:
    assert sorted(FORMS) == sorted(folder.name for folder in QUANTISED.iterdir())


@pytest.mark.parametrize("name", FORMS)
def test_weights_equal_the_witness_to_the_last_bit(name: str) -> None:
    tensors, weights = find_weights(QUANTISED / name), expected(name)["weights"]
    quantised = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, QuantisedWeight)}
    assert sorted(quantised) == sorted(f"{layer}.weight" for layer in weights)
    assert {tensor.form for tensor in quantised.values()} == {FORMS[name]}
    for layer, told in weights.items():
        tensor = tensors[f"{layer}.weight"]
        values = rows_of(tensor, 37)  # neither whole words nor whole blocks
        assert list(values.shape) == told["shape"]
        np.testing.assert_array_equal(values, rows_of(tensor, 1000))
        wide = values.astype(np.float64)
        flat = wide.ravel()
        got = [wide.sum(), np.abs(wide).sum(), *flat[:4], *flat[-4:]]
        theirs = [told["sum"], told["abs_sum"], *told["head"], *told["tail"]]
        if name == "bnb_int8":  # it multiplies twice, by a scale and by 1 / 127
            np.testing.assert_allclose(got[1:], theirs[1:], rtol=2e-7)
        else:
            assert got == theirs


def test_torchaos_int4_by_hand(tmp_path: Path) -> None:
    """A byte has two codes in two's complement, the first in the low half. Scales, and what is added, have
    the outputs as columns.
    """
    values = {"qdata": [[0x71, 0x8F], [0x20, 0xF3]], "scale": [[0.5, 2.0], [1.0, 0.25]]}
    arrays = {name: np.array(rows) for name, rows in values.items()}
    tensors: dict[str, np.ndarray] = {
        "a._weight_qdata": arrays["qdata"].astype(np.uint8),
        "a._weight_scale": arrays["scale"].astype(np.float32),
        "a._weight_zero_point": np.array([[10, 20], [30, 40]], np.float16),
    }
    told = {"_type": "Int4Tensor", "_data": {"block_size": [1, 2], "shape": [2, 4]}}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"a.weight": json.dumps(told)})
    config = {"quantization_config": {"quant_method": "torchao", "quant_type": "int4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_hand = [[10 + 0.5, 10 + 7 * 0.5, 30 - 1, 30 - 8], [20, 20 + 2 * 2, 40 + 3 * 0.25, 40 - 0.25]]
    np.testing.assert_array_equal(find_weights(tmp_path)["a.weight"][0:2], np.array(by_hand, np.float32))


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    """Make a GPTQ checkpoint whose config is in the file that older tools write."""
    shutil.copytree(QUANTISED / "gptq_v2_asym_g64", tmp_path / "old")
    file = tmp_path / "old" / "config.json"
    config = json.loads(file.read_text())
    told = config.pop("quantization_config")
    del told["quant_method"]
    file.write_text(json.dumps(config))
    (tmp_path / "old" / "quantize_config.json").write_text(json.dumps(told))
    return tmp_path / "old"


def test_a_config_in_a_file_of_its_own_is_read(old_file: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    there = find_weights(QUANTISED / "gptq_v2_asym_g64")[name]
    np.testing.assert_array_equal(rows_of(find_weights(old_file)[name], 64), rows_of(there, 64))


@pytest.mark.parametrize(("value", "is_left_out"), [(0, True), (1, False)])
def test_biases_of_0_that_the_model_does_not_have_are_left_out(
    tmp_path: Path, value: int, is_left_out: bool
) -> None:
    """AutoGPTQ writes a bias for every layer that it quantises."""
    shutil.copytree(QUANTISED / "gptq_v2_asym_g64", tmp_path / "biased")
    name = "model.layers.0.mlp.up_proj.bias"
    tensors = load_file(tmp_path / "biased" / "model.safetensors")
    biased = tensors | {name: np.full(256, value, np.float16)}
    save_file(biased, tmp_path / "biased" / "model.safetensors")
    rules = load_rules(load_config(tmp_path / "biased"))
    found = without_empty_biases(find_weights(tmp_path / "biased"), rules)
    assert (name not in found) == is_left_out
