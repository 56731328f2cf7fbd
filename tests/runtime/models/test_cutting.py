"""What each device of a mesh has of a model's weights, compared with slices of the checkpoint's tensors that
are written down here; and which numbers of devices are refused.
"""

import dataclasses

import numpy as np
import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.cutting import cut, sizes_that_work
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.params import leaf_shapes, load_rules
from tests.support.goldens import GOLDEN, NAMES, WITH_PICTURES


def leaves_of(name, devices, linear=PLAIN):
    """The leaves of a golden that is cut over devices, and the checkpoint's tensors in float32."""
    directory = GOLDEN / name
    config, tensors = cut(load_config(directory), devices), find_tensors(directory)
    shapes = leaf_shapes(config, "float32", linear)
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
    for rule in load_rules(config, "float32", linear).rules:
        assert rule.fill(leaves, tensors, 0, rule.num_rows) == []
    arrays = {name: np.asarray(tensor[0 : tensor.shape[0]], np.float32) for name, tensor in tensors.items()}
    return {"/".join(map(str, path)): leaf for path, leaf in leaves.items()}, arrays


@pytest.mark.parametrize(("devices", "kv_heads"), [(2, ((0,), (1,))), (4, ((0,), (0,), (1,), (1,)))])
def test_heads_and_inner_channels_are_cut_and_heads_of_keys_repeat(devices, kv_heads):
    """qwen3 has 4 heads of queries and 2 of keys, each of 32 channels, and 112 inner channels."""
    leaves, tensors = leaves_of("qwen3", devices)
    layer = "model.layers.0"
    q, k, v, o = (tensors[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkvo")
    gate, up, down = (tensors[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    heads, inner = 4 // devices, 112 // devices
    for device in range(devices):
        mine = slice(device * heads * 32, (device + 1) * heads * 32)
        keys = np.concatenate([np.arange(32) + 32 * head for head in kv_heads[device]])
        qkv = np.concatenate([q[mine], k[keys], v[keys]])
        np.testing.assert_array_equal(leaves["layers/0/self_attn/qkv_proj/weight"][device], qkv)
        np.testing.assert_array_equal(leaves["layers/0/self_attn/o_proj/weight"][device], o[:, mine])
        some = slice(device * inner, (device + 1) * inner)
        both = np.concatenate([gate[some], up[some]])
        np.testing.assert_array_equal(leaves["layers/0/mlp/gate_up_proj/weight"][device], both)
        np.testing.assert_array_equal(leaves["layers/0/mlp/down_proj/weight"][device], down[:, some])


def test_a_bias_of_a_sum_is_on_the_first_device_alone():
    """gpt_oss has biases everywhere; that of o_proj would be added once by each device."""
    leaves, tensors = leaves_of("gpt_oss", 2)
    bias, vectors = tensors["model.layers.0.self_attn.o_proj.bias"], leaves["vectors"]
    places = [
        [at for at in range(vectors.shape[1]) if np.array_equal(vectors[device, at : at + len(bias)], bias)]
        for device in range(2)
    ]
    (at,) = places[0]
    assert places[1] == []
    np.testing.assert_array_equal(vectors[1, at : at + len(bias)], 0)
    sinks = tensors["model.layers.0.self_attn.sinks"]
    for device, mine in enumerate((sinks[:2], sinks[2:])):
        assert any(np.array_equal(vectors[device, i : i + 2], mine) for i in range(vectors.shape[1]))


def test_int8_scales_are_those_of_a_device_s_own_part():
    """The largest of each row's own 56 inner channels becomes 127."""
    leaves, tensors = leaves_of("qwen3", 2, LinearFormat(int8=True))
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    for device, some in enumerate((slice(0, 56), slice(56, 112))):
        mine = leaves["layers/0/mlp/down_proj/weight"][device]
        assert np.abs(mine).max(axis=1).tolist() == [127] * 48
        scales = np.abs(down[:, some]).max(axis=1) / 127
        np.testing.assert_allclose(mine * scales[:, None], down[:, some], atol=scales.max() * 0.51)


@pytest.mark.parametrize("name", [*NAMES, *WITH_PICTURES])
def test_every_family_can_be_cut(name):
    """`load_rules` proves that each leaf of each device is filled once, and that every tensor is read."""
    config = load_config(GOLDEN / name)
    for devices in (2, 4):
        rules = load_rules(cut(config, devices), "float32").rules
        assert {target.at[0] for rule in rules for target in rule.targets} == set(range(devices))


def test_what_does_not_divide_is_refused_with_the_sizes_that_work():
    config = load_config(GOLDEN / "qwen3")
    with pytest.raises(ConfigError, match="tensor_parallel_size") as told:
        cut(config, 3)
    for part in ("Qwen3ForCausalLM", "num_attention_heads are 4", "intermediate_size) are 112", "1, 2, 4"):
        assert part in str(told.value)
    assert sizes_that_work(config) == [1, 2, 4]


def test_one_device_changes_nothing():
    config = load_config(GOLDEN / "qwen3")
    assert cut(config, 1) is config
    assert dataclasses.replace(cut(config, 2), whole=None) != config
