"""What the config.json of Qwen3-Next and Qwen3.5 say, what is refused of them, and where their checkpoints
have the parameters.
"""

from typing import Any

import numpy as np
import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import AttentionConfig, ExpertsConfig, MLPConfig, RouterConfig
from penstock.runtime.models.configs.recurrent import DeltaNetConfig
from penstock.runtime.models.registry import family_of, parse_config
from penstock.runtime.ops.cache_spec import SlotState
from tests.support.models.configs import attentions, published

NEXT = published("Qwen3-Next-80B-A3B-Instruct")
# The text models of what is published with an encoder of images.
DENSE = {**published("Qwen3.5-0.8B")["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
EXPERTS = {**published("Qwen3.5-35B-A3B")["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"]}
SHARED = ExpertsConfig(
    num_experts=512, per_token=10, intermediate_size=512, shared_size=512, shared_gate=True
)


def nets(config: Any) -> list[int]:
    return [index for index, layer in enumerate(config.layers) if isinstance(layer.attention, DeltaNetConfig)]


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}


def test_published_qwen3_next():
    config = parse_config(NEXT)
    assert nets(config) == [layer for layer in range(48) if layer % 4 != 3]
    assert config.layers[0].attention == DeltaNetConfig(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, num_taps=4
    )
    kept = config.cache.layers[0]
    assert isinstance(kept, SlotState)
    assert [value.shape for value in kept.values] == [(3, 8192), (32, 128, 128)]
    attention = attentions(config)[0]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 2, 256)
    assert (attention.output_gate, attention.qk_norm, attention.rotary_dim) == (True, "head", 64)
    assert attention.rope is not None
    assert attention.rope.theta == 1e7
    assert (config.norm_offset, config.rms_norm_eps, config.tie_word_embeddings) == (1.0, 1e-6, False)
    assert {layer.mlp for layer in config.layers} == {SHARED}


def test_published_qwen3_5():
    dense = parse_config(DENSE)
    assert nets(dense) == [layer for layer in range(24) if layer % 4 != 3]
    assert {layer.mlp for layer in dense.layers} == {MLPConfig(intermediate_size=3584)}
    assert dense.tie_word_embeddings
    assert attentions(dense)[0].rotary_dim == 64
    experts = parse_config(EXPERTS).layers[0].mlp
    assert isinstance(experts, ExpertsConfig)
    assert (experts.num_experts, experts.per_token, experts.shared_gate) == (256, 8, True)
    assert experts.router == RouterConfig(normalize=True)


@pytest.mark.parametrize("data", [NEXT, DENSE, EXPERTS])
def test_defaults(data):
    """What is absent is what transformers' configuration classes have."""
    fields = {name for name in data if name.startswith("linear_")} | {"head_dim", "layer_types"}
    fields |= {"rms_norm_eps", "moe_intermediate_size", "num_experts", "num_experts_per_tok"}
    fields |= {"shared_expert_intermediate_size", "partial_rotary_factor", "norm_topk_prob"}
    assert parse_config(without(data, *fields)) == parse_config({**data, "linear_num_value_heads": 32})


@pytest.mark.parametrize(("name", "text"), [("Qwen3.5-0.8B", DENSE), ("Qwen3.5-35B-A3B", EXPERTS)])
def test_the_text_model_is_the_same_with_an_encoder_of_images(name, text):
    config = parse_config(published(name))
    assert config.vision is not None
    assert config.layers == parse_config(text).layers
    assert config.names.decoder == "model.language_model."
    assert config.names.stacked == (text is EXPERTS)


def test_which_layers_attend():
    names = ["linear_attention", "full_attention"] * 24
    assert nets(parse_config({**NEXT, "layer_types": names})) == list(range(0, 48, 2))
    assert len(nets(parse_config({**NEXT, "full_attention_interval": 2}))) == 24
    with pytest.raises(ConfigError, match="layer_types: sliding_attention is not supported"):
        parse_config({**NEXT, "layer_types": ["sliding_attention"] * 48})


def test_which_layers_have_experts():
    config = parse_config({**NEXT, "mlp_only_layers": [1], "decoder_sparse_step": 2})
    dense = [layer for layer, ours in enumerate(config.layers) if isinstance(ours.mlp, MLPConfig)]
    assert dense == sorted({1, *range(0, 48, 2)})
    router = parse_config({**NEXT, "norm_topk_prob": False}).layers[0].mlp
    assert isinstance(router, ExpertsConfig)
    assert not router.router.normalize


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("linear_num_value_heads", 24),
        ("linear_conv_kernel_dim", 1),
        ("attn_output_gate", False),
        ("output_gate_type", "sigmoid"),
        ("model_type", "qwen3"),
        ("hidden_act", "gelu"),
    ],
)
def test_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        parse_config({**DENSE, field: value})


def rows_of(config: Any, part: str, num_rows: int) -> tuple[str, list[int]]:
    """Return the tensor that has a part of the first net, and which rows of it."""
    stored = family_of(config.architecture).stored(config)
    (source,) = stored(("layers", 0, "self_attn", part, "weight"), (num_rows, 2)).sources
    total = source.shape[0]
    return source.name, source.read(np.repeat(np.arange(total), 2).reshape(total, 2), 0, num_rows)[
        :, 0
    ].tolist()


def test_rows_of_interleaved_tensors():
    """Each key head has its query, key, values and gates; then the next one has. Two key heads of 2 channels,
    with two value heads of 1 channel each.
    """
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 2}
    config = parse_config({**NEXT, **sizes, "linear_value_head_dim": 1})
    name = "model.layers.0.linear_attn."
    qkv = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13]
    assert rows_of(config, "in_proj_qkv", 12) == (f"{name}in_proj_qkvz.weight", qkv)
    assert rows_of(config, "in_proj_z", 4) == (f"{name}in_proj_qkvz.weight", [6, 7, 14, 15])
    assert rows_of(config, "in_proj_b", 4) == (f"{name}in_proj_ba.weight", [0, 1, 4, 5])
    assert rows_of(config, "in_proj_a", 4) == (f"{name}in_proj_ba.weight", [2, 3, 6, 7])


def test_queries_and_gates_of_a_head_lie_side_by_side():
    config = parse_config({**DENSE, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1})
    assert isinstance(config.layers[3].attention, AttentionConfig)
    stored = family_of(config.architecture).stored(config)
    for part, rows in (("q_proj", [*range(8), *range(16, 24)]), ("q_gate", [*range(8, 16), *range(24, 32)])):
        (source,) = stored(("layers", 3, "self_attn", part, "weight"), (16, 2)).sources
        assert (source.name, source.shape) == ("model.layers.3.self_attn.q_proj.weight", (32, 2))
        assert list(source.order or ()) == rows
