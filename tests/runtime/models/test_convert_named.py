"""Replacing weights by name: everything is checked and converted before anything is touched."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.runtime.checkpoint import convert_named, load_config
from penstock.runtime.errors import CheckpointError
from penstock.runtime.models.params import param_specs

UP = "model.layers.1.mlp.up_proj.weight"


def named(directory):
    return load_config(directory), load_file(directory / "model.safetensors")


def test_convert_named_is_complete_converted_and_its_own(golden_root):
    config, tensors = named(golden_root / "qwen2")
    arrays = convert_named(config, tensors, partial=False, dtype="bfloat16")
    specs = param_specs(config)
    assert set(arrays) == {spec.path for spec in specs}
    for spec in specs:
        np.testing.assert_array_equal(arrays[spec.path], tensors[spec.hf_name].astype(jnp.bfloat16))
    same = convert_named(config, tensors, partial=False, dtype="float32")
    assert not any(np.shares_memory(same[spec.path], tensors[spec.hf_name]) for spec in specs)


def test_convert_named_partial(golden_root):
    config, tensors = named(golden_root / "qwen2")
    some = {UP: tensors[UP]}
    assert set(convert_named(config, some, partial=True)) == {("layers", 1, "mlp", "up_proj", "weight")}
    with pytest.raises(CheckpointError, match=r"missing \(26\)"):
        convert_named(config, some, partial=False)


@pytest.mark.parametrize("partial", [True, False])
def test_convert_named_lists_everything_wrong(golden_root, partial):
    config, tensors = named(golden_root / "qwen2")
    del tensors["model.norm.weight"]
    tensors["ghost"] = tensors[UP]
    tensors[UP] = tensors[UP][1:]
    with pytest.raises(CheckpointError) as caught:
        convert_named(config, tensors, partial=partial)
    assert caught.value.missing == (() if partial else ("model.norm.weight",))
    assert caught.value.extra == ("ghost",)
    assert caught.value.mismatched == (f"{UP} has shape [111, 48], expected [112, 48]",)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_, jnp.float8_e4m3fn])
def test_convert_named_takes_floats_of_16_bits_or_more(golden_root, dtype):
    config, tensors = named(golden_root / "qwen2")
    with pytest.raises(CheckpointError, match=rf"{UP} has dtype {np.dtype(dtype)}"):
        convert_named(config, {UP: tensors[UP].astype(dtype)}, partial=True)


def test_convert_named_lists_every_overflow(golden_root):
    config, tensors = named(golden_root / "qwen2")
    tensors = {name: np.array(t) for name, t in tensors.items()}
    for name in (UP, "model.norm.weight"):
        tensors[name].flat[0] = 1e9
    with pytest.raises(CheckpointError) as caught:
        convert_named(config, tensors, partial=False, dtype="float16")
    assert len(caught.value.mismatched) == 2


def test_convert_named_takes_no_tied_head_by_itself(golden_root):
    config, tensors = named(golden_root / "qwen3")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): lm_head\.weight"):
        convert_named(config, head, partial=True)
    assert len(convert_named(config, {**tensors, **head}, partial=False)) == len(tensors)
