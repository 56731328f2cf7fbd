"""What config.json of models with Mamba-2 mixers say: Mamba 2, Bamba, Falcon-H1, Nemotron-H."""

import json
import math
from typing import Any

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import MLPConfig
from penstock.runtime.models.configs.recurrent import MambaConfig
from penstock.runtime.models.params import load_rules
from penstock.runtime.models.registry import parse_config
from tests.support.goldens import GOLDEN

MAMBA2, BAMBA, FALCON_H1, NEMOTRON_H = (
    json.loads((GOLDEN / name / "config.json").read_text())
    for name in ("mamba2", "bamba", "falcon_h1", "nemotron_h")
)
BLOCKS = ["linear_attention", "mlp", "full_attention", "mlp"]


def parts(config, layer=0):
    """Return the parts of a layer, whose types need no proof."""
    one: Any = config.layers[layer]
    return one


def kinds(config):
    """For each layer its kind, and whether it has an MLP."""
    return [(type(layer.attention).__name__[:5], layer.mlp is not None) for layer in config.layers]


def test_what_mamba2_leaves_out():
    config = parse_config(
        {
            "architectures": ["Mamba2ForCausalLM"],
            "vocab_size": 512,
            "hidden_size": 4096,
            "num_hidden_layers": 3,
        }
    )
    mixer = MambaConfig(num_heads=128, head_dim=64, state_dim=128, num_groups=8, num_taps=4)
    assert [(layer.attention, layer.mlp) for layer in config.layers] == [(mixer, None)] * 3
    assert (config.max_position_embeddings, config.rms_norm_eps) == (262144, 1e-5)
    assert config.cache.paged == ()


def test_what_published_files_have_besides():
    """Those of Mamba-Codestral, and of Nemotron-H."""
    besides = {
        "intermediate_size": 96,
        "norm_before_gate": True,
        "rms_norm": True,
        "time_step_init_scheme": "random",
        "time_step_scale": 1.0,
    }
    assert parse_config(MAMBA2 | besides) == parse_config(MAMBA2)
    same = {"rms_norm_eps": 1e-5, "time_step_rank": 256}
    assert parse_config(NEMOTRON_H | same) == parse_config(NEMOTRON_H)


def test_bamba_attends_in_the_layers_that_it_lists():
    assert kinds(parse_config(BAMBA)) == [("Mamba", True)] * 2 + [("Atten", True), ("Mamba", True)]
    assert kinds(parse_config({**BAMBA, "attn_layer_indices": None})) == [("Mamba", True)] * 4
    rotated = parse_config({**BAMBA, "rope_parameters": None, "attn_rotary_emb": 6})
    assert parts(rotated, 2).attention.rotary_dim == 6


def test_the_multipliers_of_falcon_h1():
    layer = parts(parse_config({**FALCON_H1, "attention_in_multiplier": 0.5}))
    assert layer.attention.scale == pytest.approx(16**-0.5 * 0.7 * 0.5**2)
    assert layer.residual_multiplier == pytest.approx(0.9 * 0.5)
    assert (layer.beside_multiplier, layer.mlp_multiplier) == (0.6, 0.6)
    assert layer.beside.multipliers == pytest.approx((0.4, 0.56, 0.72, 0.88, 0.64))
    assert layer.mlp == MLPConfig(intermediate_size=112, gate_multiplier=0.8)
    normed = parse_config({**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False})
    assert (layer.beside.normed, parts(normed).beside.normed) == (False, True)
    assert "model.layers.0.mamba.norm.weight" in {tensor.name for tensor in load_rules(normed).tensors}


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_block_type": BLOCKS},
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
        {"layers_block_type": None, "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4},
    ],
)
def test_the_blocks_of_nemotron_h(fields):
    config = parse_config({**NEMOTRON_H, **fields})
    assert config == parse_config(NEMOTRON_H)
    assert kinds(config) == [("Mamba", True), ("Atten", True)]
    assert parts(config).attention.step_limit == (0.001, math.inf)
    assert parts(config, 1).attention.rope is None


def test_blocks_without_an_mlp_have_numbers_too():
    config = parse_config({**NEMOTRON_H, "layers_block_type": None, "hybrid_override_pattern": "MM*-M"})
    assert kinds(config) == [("Mamba", False), ("Mamba", False), ("Atten", True), ("Mamba", False)]
    names = {tensor.name for tensor in load_rules(config).tensors}
    assert {f"backbone.layers.{block}.norm.weight" for block in range(5)} <= names
    assert {"backbone.layers.2.mixer.q_proj.weight", "backbone.layers.3.mixer.up_proj.weight"} <= names
    assert "backbone.layers.4.mixer.in_proj.weight" in names


@pytest.mark.parametrize(
    ("data", "fields", "what"),
    [
        (MAMBA2, {"head_dim": 32}, r"num_heads: 6 heads of mamba_d_head 32 are not expand \* hidden_size 96"),
        (MAMBA2, {"n_groups": 5}, "n_groups: 5 does not divide"),
        (MAMBA2, {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        (MAMBA2, {"rms_norm": False}, "rms_norm: False"),
        (BAMBA, {"mlp_bias": True}, "mlp_bias: True"),
        (BAMBA, {"attn_layer_indices": [4]}, "attn_layer_indices: must list numbers"),
        (FALCON_H1, {"mamba_rms_norm": True}, "mamba_norm_before_gate: true is not supported"),
        (FALCON_H1, {"attention_bias": True}, "attention_bias: True"),
        (FALCON_H1, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers: must be 5 finite numbers"),
        (FALCON_H1, {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers: must be 2 finite numbers"),
        (FALCON_H1, {"mamba_d_ssm": 90}, "mamba_n_heads: 6 heads of mamba_d_head 16 are not mamba_d_ssm 90"),
        (NEMOTRON_H, {"layers_block_type": [*BLOCKS, "moe"]}, "layers_block_type: names experts"),
        (NEMOTRON_H, {"layers_block_type": ["mlp", *BLOCKS]}, "layers_block_type: must list"),
        (NEMOTRON_H, {"layers_block_type": ["linear_attention", "x"]}, "layers_block_type: must list"),
        (NEMOTRON_H, {"num_hidden_layers": 3}, "num_hidden_layers: 3 is not supported; supported: 4"),
        (NEMOTRON_H, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: 1"),
        (NEMOTRON_H, {"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu'"),
        (NEMOTRON_H, {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06 is not supported; supported: 1e-05"),
    ],
)
def test_what_is_refused(data, fields, what):
    with pytest.raises(ConfigError, match=what):
        parse_config({**data, **fields})
