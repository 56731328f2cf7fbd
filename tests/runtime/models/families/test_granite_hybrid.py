"""What the config.json of Granite 4 says, what is refused of it, and where its experts are."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models.config import ExpertsConfig, MLPConfig
from penstock.runtime.models.configs.recurrent import MambaConfig
from penstock.runtime.models.params import load_rules
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig
from tests.support.goldens import GOLDEN, check_last_logits
from tests.support.models.configs import attentions, published

TINY = published("granite-4.0-h-tiny")


def mamba(**changes):
    config = parse_config({**TINY, **changes}).layers[0].attention
    assert isinstance(config, MambaConfig)
    return config


def without(*names):
    return {name: value for name, value in TINY.items() if name not in names}


def test_published():
    config = parse_config(TINY)
    assert mamba() == MambaConfig(num_heads=48, head_dim=64, state_dim=128, num_groups=1, num_taps=4)
    is_mamba = [isinstance(layer.attention, MambaConfig) for layer in config.layers]
    assert [layer for layer, is_it in enumerate(is_mamba) if not is_it] == [5, 15, 25, 35]
    attention = attentions(config)[0]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (12, 4, 128)
    assert (attention.rope, attention.scale) == (None, 1 / 128)
    (mlp,) = {layer.mlp for layer in config.layers}
    assert mlp == ExpertsConfig(num_experts=64, per_token=6, intermediate_size=512, shared_size=1024)
    assert (config.embedding_scale, config.logits_scale) == (12.0, 1 / 6)
    assert (config.layers[0].residual_multiplier, config.tie_word_embeddings) == (0.22, True)
    kept = mamba().kept.values
    assert [value.shape for value in kept] == [(3, 3072 + 2 * 128), (48, 128, 64)]


def test_published_tensors():
    """Their names and shapes, as the files of the published checkpoint have them."""
    tensors = {tensor.name: tensor.shape for tensor in load_rules(parse_config(TINY)).tensors}
    layer = "model.layers.0"
    assert {name: shape for name, shape in tensors.items() if name.startswith(f"{layer}.")} == {
        f"{layer}.input_layernorm.weight": (1536,),
        f"{layer}.post_attention_layernorm.weight": (1536,),
        f"{layer}.mamba.A_log": (48,),
        f"{layer}.mamba.D": (48,),
        f"{layer}.mamba.conv1d.bias": (3328,),
        f"{layer}.mamba.conv1d.weight": (3328, 1, 4),
        f"{layer}.mamba.dt_bias": (48,),
        f"{layer}.mamba.in_proj.weight": (3072 + 3328 + 48, 1536),
        f"{layer}.mamba.norm.weight": (3072,),
        f"{layer}.mamba.out_proj.weight": (1536, 3072),
        f"{layer}.shared_mlp.input_linear.weight": (2048, 1536),
        f"{layer}.shared_mlp.output_linear.weight": (1536, 1024),
        f"{layer}.block_sparse_moe.router.layer.weight": (64, 1536),
        f"{layer}.block_sparse_moe.input_linear.weight": (64, 1024, 1536),
        f"{layer}.block_sparse_moe.output_linear.weight": (64, 1536, 512),
    }
    assert tensors["model.layers.5.self_attn.o_proj.weight"] == (1536, 1536)


def test_without_experts():
    config = parse_config({**TINY, "num_local_experts": 0, "num_experts_per_tok": 0})
    assert {layer.mlp for layer in config.layers} == {MLPConfig(intermediate_size=1024)}


def test_without_mamba():
    """As Granite 4.0 micro is published."""
    config = parse_config({**TINY, "layer_types": ["attention"] * 40, "position_embedding_type": "rope"})
    assert not config.cache.has_state
    assert {attention.rope for attention in attentions(config)} == {RopeConfig()}


def test_names_of_layers():
    names = ["linear_attention", "full_attention"] * 20
    config = parse_config({**without("layer_types"), "layers_block_type": names})
    assert len(attentions(config)) == 20
    assert attentions(parse_config(without("layer_types"))) == []
    with pytest.raises(ConfigError, match="layers_block_type: contradicts layer_types"):
        parse_config({**TINY, "layers_block_type": names})
    with pytest.raises(ConfigError, match=r"layer_types: must list one of mamba, .* for each of 40 layers"):
        parse_config({**TINY, "layer_types": ["mamba"]})


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (None, (0.0, math.inf)),
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.0, "Infinity"], (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.001, 0.1], (0.001, 0.1)),
    ],
)
def test_limits_of_time_steps(value, limit):
    assert mamba(time_step_limit=value).step_limit == limit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_step_limit": [1.0, 0.5]}, "time_step_limit: must be two numbers"),
        ({"time_step_limit": [math.nan, 0.5]}, "time_step_limit: must be two numbers"),
        ({"time_step_limit": [0.0]}, "time_step_limit: must be two numbers"),
        ({"mamba_d_head": 32}, "mamba_n_heads: 48 heads of mamba_d_head 32"),
        ({"mamba_n_groups": 5}, "mamba_n_groups: 5 does not divide mamba_n_heads 48"),
        ({"mamba_d_conv": 1}, "mamba_d_conv: must be an integer of at least 2"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok: must be 1 to 64"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi' is not supported"),
        ({"normalization_function": "layernorm"}, "normalization_function: 'layernorm' is not supported"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**TINY, **changes})


def test_head_size_of_old_files():
    assert mamba(mamba_d_head="auto").head_dim == 64


@pytest.mark.ci
def test_experts_beside_the_shared_mlp(tmp_path, make_sequence):
    """A gated MLP is the sum of two that have a part of its channels each. So the golden, whose layers have
    one MLP, must answer the same when experts that are all alike have a part of it. Each has its channels in
    an order of its own, so a mix of two experts' tensors would not go unnoticed.
    """
    golden, count, inner = GOLDEN / "granite_hybrid", 3, 24
    data = json.loads((golden / "config.json").read_text())
    shared = data["shared_intermediate_size"] - inner
    changes = {"num_local_experts": count, "num_experts_per_tok": 2, "intermediate_size": inner}
    changed = {**data, **changes, "shared_intermediate_size": shared}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    rng, tensors = np.random.default_rng(3), load_file(golden / "model.safetensors")
    for layer in range(data["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.shared_mlp"
        experts = f"model.layers.{layer}.block_sparse_moe"
        gate, up = np.split(tensors[f"{mlp}.input_linear.weight"], 2)
        down = tensors[f"{mlp}.output_linear.weight"]
        orders = [rng.permutation(inner) for _ in range(count)]
        stacked = [np.concatenate([gate[order], up[order]]) for order in orders]
        tensors[f"{experts}.input_linear.weight"] = np.stack(stacked)
        tensors[f"{experts}.output_linear.weight"] = np.stack([down[:, order] for order in orders])
        router = rng.standard_normal((count, data["hidden_size"])).astype(np.float32)
        tensors[f"{experts}.router.layer.weight"] = router
        tensors[f"{mlp}.input_linear.weight"] = np.concatenate([gate[inner:], up[inner:]])
        tensors[f"{mlp}.output_linear.weight"] = down[:, inner:]
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "model.safetensors")

    config = load_config(tmp_path)
    sequence = make_sequence(config, load_weights(tmp_path, config, progress=False))
    for case in json.loads((golden / "expected.json").read_text())["cases"]:
        sequence.reset()
        check_last_logits(sequence.feed(case["prompt"]), case)
