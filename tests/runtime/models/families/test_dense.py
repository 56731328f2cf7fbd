"""Dense families that are data: what their config.json leaves out, and what it must not say.

The defaults are those of transformers' configuration classes, read there.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import AttentionConfig, MLPConfig, ModelConfig
from penstock.runtime.models.layers.attention import alibi_slopes
from penstock.runtime.models.registry import parse_config
from tests.support.goldens import GOLDEN

LEAST: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "intermediate_size": 100,
    "max_position_embeddings": 2048,
}
GPT: dict[str, Any] = {"vocab_size": 512, "n_embd": 4096, "n_layer": 4, "n_head": 32, "n_positions": 2048}


OTHER_NAMES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM"), GPT),
    "BloomForCausalLM": {"vocab_size": 512, "hidden_size": 4096, "n_layer": 4, "n_head": 32},
    "MptForCausalLM": {"vocab_size": 512, "d_model": 4096, "n_layers": 4, "n_heads": 32},
}


def least(architecture: str, **fields: Any) -> ModelConfig:
    base = OTHER_NAMES.get(architecture, LEAST)
    return parse_config({"architectures": [architecture], **base, **fields})


def of_layer(config: ModelConfig, layer: int = 0) -> tuple[AttentionConfig, MLPConfig]:
    attention, mlp = config.layers[layer].attention, config.layers[layer].mlp
    assert isinstance(attention, AttentionConfig)
    assert isinstance(mlp, MLPConfig)
    return attention, mlp


def rotation(attention: AttentionConfig) -> tuple[float, int] | None:
    """Return the base and the number of rotated channels."""
    return None if attention.rope is None else (attention.rope.theta, attention.rotary_dim)


@pytest.mark.parametrize(
    ("architecture", "heads", "turned", "biases", "eps", "tied"),
    [
        ("ApertusForCausalLM", (32, 128), (1.2e7, 128), (False, False, False), 1e-5, False),
        ("ArceeForCausalLM", (32, 128), (1e4, 128), (False, False, False), 1e-5, False),
        ("BloomForCausalLM", (32, 128), None, (True, True, True), 1e-5, True),
        ("CohereForCausalLM", (32, 128), (5e5, 128), (False, False, False), 1e-5, True),
        ("Cohere2ForCausalLM", (32, 128), (1e4, 128), (False, False, False), 1e-5, True),
        ("Ernie4_5ForCausalLM", (2, 128), (5e5, 128), (False, False, False), 1e-5, True),
        ("Exaone4ForCausalLM", (32, 128), (1e4, 128), (False, False, False), 1e-5, False),
        ("FalconForCausalLM", (1, 128), (1e4, 128), (False, False, False), 1e-5, True),
        ("GemmaForCausalLM", (16, 256), (1e4, 256), (False, False, False), 1e-6, True),
        ("GlmForCausalLM", (2, 128), (1e4, 64), (True, False, False), 1.5625e-7, False),
        ("Glm4ForCausalLM", (2, 128), (1e4, 64), (True, False, False), 1.5625e-7, False),
        ("GPT2LMHeadModel", (32, 128), None, (True, True, True), 1e-5, True),
        ("GPTBigCodeForCausalLM", (1, 128), None, (True, True, True), 1e-5, True),
        ("GPTJForCausalLM", (32, 128), (1e4, 64), (False, False, True), 1e-5, False),
        ("GPTNeoXForCausalLM", (32, 128), (1e4, 32), (True, True, True), 1e-5, False),
        ("HunYuanDenseV1ForCausalLM", (32, 128), (1e4, 128), (False, False, False), 1e-5, False),
        ("MptForCausalLM", (32, 128), None, (False, False, False), 1e-5, True),
        ("NemotronForCausalLM", (32, 128), (1e4, 64), (False, False, False), 1e-5, False),
        ("OlmoForCausalLM", (32, 128), (1e4, 128), (False, False, False), 1e-5, False),
        ("OPTForCausalLM", (32, 128), None, (True, True, True), 1e-5, True),
        ("PhiForCausalLM", (32, 128), (1e4, 64), (True, True, True), 1e-5, False),
        ("StableLmForCausalLM", (32, 128), (1e4, 32), (False, False, False), 1e-5, False),
        ("Starcoder2ForCausalLM", (2, 128), (1e4, 128), (True, True, True), 1e-5, True),
    ],
)
def test_what_is_left_out(
    architecture: str,
    heads: tuple[int, int],
    turned: tuple[float, int] | None,
    biases: tuple[bool, bool, bool],
    eps: float,
    tied: bool,
) -> None:
    """heads: of keys, and their size. turned: base and channels. biases: of queries, output, and MLP."""
    config = least(architecture)
    attention, mlp = of_layer(config)
    assert (attention.num_kv_heads, attention.head_dim) == heads
    assert rotation(attention) == turned
    assert (attention.qkv_bias, attention.o_bias, mlp.bias) == biases
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (eps, tied)


@pytest.mark.parametrize(
    ("architecture", "fields", "what"),
    [
        ("FalconForCausalLM", {"alibi": True}, "alibi: True is not supported"),
        ("GPT2LMHeadModel", {"n_inner": 0}, "n_inner: must be an integer"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("GPTJForCausalLM", {"rotary_dim": 7}, "rotary_dim: must be even"),
        ("GPTJForCausalLM", {"activation_function": "swish"}, "activation_function: 'swish'"),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before: False"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 512}, "word_embed_proj_dim: 512"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm: True"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
        ("ArceeForCausalLM", {"hidden_act": "silu"}, "hidden_act: 'silu'"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Cohere2ForCausalLM", {"position_embedding_type": "rope_gpt_neox"}, "position_embedding_type"),
        ("Cohere2ForCausalLM", {"use_parallel_block": False}, "use_parallel_block: False"),
        ("Starcoder2ForCausalLM", {"norm_type": "rms_norm"}, "norm_type: 'rms_norm'"),
        ("ApertusForCausalLM", {"qk_norm": False}, "qk_norm: False"),
        ("ApertusForCausalLM", {"post_norm": True}, "post_norm: True"),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
        ("MptForCausalLM", {"no_bias": False}, "no_bias: False"),
        ("MptForCausalLM", {"logit_scale": 0.5}, "logit_scale: 0.5"),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, "attn_config.alibi: False"),
        ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln: True"),
        ("MptForCausalLM", {"attn_config": {"rope": True}}, "attn_config.rope: True"),
        ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "use_qk_norm: False"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla: True"),
        ("HunYuanDenseV1ForCausalLM", {"num_experts": 4}, "num_experts: 4"),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": "x"}},
            "rope_scaling: alpha must be a finite number",
        ),
    ],
)
def test_what_is_refused(architecture: str, fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        least(architecture, **fields)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("ApertusForCausalLM", {"qk_norm": True, "post_norm": False}),
        (
            "Cohere2ForCausalLM",
            {
                "layer_switch": 4,
                "order_of_interleaved_layers": "local_attn_first",
                "position_embedding_type": "rope_gptj",
                "rotary_pct": 1.0,
                "use_embedding_sharing": True,
                "use_gated_activation": True,
                "use_parallel_block": True,
                "use_parallel_embedding": True,
            },
        ),
        ("FalconForCausalLM", {"auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}}),
        (
            "GPTBigCodeForCausalLM",
            {"inference_runner": 0, "pad_key_length": True, "validate_runner_input": True},
        ),
        ("BloomForCausalLM", {"offset_alibi": 100, "pretraining_tp": 4, "seq_length": 2048, "n_inner": None}),
        ("MptForCausalLM", {"attn_config": {"attn_impl": "triton", "alibi": True}, "init_device": "cpu"}),
        (
            "HunYuanDenseV1ForCausalLM",
            {
                "cla_share_factor": 2,
                "eod_token_id": 3,
                "moe_topk": 1,
                "use_qk_norm": True,
                "norm_type": "rms",
            },
        ),
        ("OPTForCausalLM", {"activation_dropout": 0.0}),
        (
            "Starcoder2ForCausalLM",
            {
                "activation_function": "gelu_pytorch_tanh",
                "attention_softmax_in_fp32": True,
                "layer_norm_epsilon": 1e-5,
                "mlp_type": "default",
                "norm_type": "layer_norm",
                "rms_norm_eps": 1e-5,
                "scale_attention_softmax_in_fp32": True,
                "scale_attn_weights": True,
            },
        ),
    ],
)
def test_fields_of_published_files_that_transformers_does_not_read(
    architecture: str, fields: dict[str, Any]
) -> None:
    assert least(architecture, **fields) == least(architecture)


@pytest.mark.parametrize("architecture", ["Exaone4ForCausalLM", "Cohere2ForCausalLM"])
def test_only_layers_with_a_window_are_rotated(architecture: str) -> None:
    attentions = [of_layer(least(architecture, sliding_window=64), layer)[0] for layer in range(4)]
    assert [attention.window for attention in attentions] == [64, 64, 64, None]
    assert [attention.rope is not None for attention in attentions] == [True, True, True, False]


def test_exaone_without_windows_rotates_all_layers() -> None:
    config = least("Exaone4ForCausalLM", sliding_window=None)
    assert {
        (of_layer(config, layer)[0].window, rotation(of_layer(config, layer)[0])) for layer in range(4)
    } == {(None, (1e4, 128))}
    full = least("Exaone4ForCausalLM", sliding_window=64, layer_types=["full_attention"] * 4)
    assert {rotation(of_layer(full, layer)[0]) for layer in range(4)} == {None}
    letters = least("Exaone4ForCausalLM", sliding_window=64, sliding_window_pattern="LG")
    assert [of_layer(letters, layer)[0].window for layer in range(4)] == [64, None, 64, None]


@pytest.mark.parametrize(("size", "turned"), [(256, 64), (176, 60), (44, 30), (64, 64)])
def test_gptj_turns_as_many_channels_as_its_file_says(size: int, turned: int) -> None:
    attention = of_layer(least("GPTJForCausalLM", n_embd=32 * size, rotary_dim=turned))[0]
    assert (attention.head_dim, attention.rotary_dim) == (size, turned)


def test_a_context_of_hunyuan_is_extended_by_another_base() -> None:
    """The file says "dynamic", but the base depends on no length: theta * alpha^(128 / 126)."""
    scaling = {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "type": "dynamic",
    }
    rope = of_layer(least("HunYuanDenseV1ForCausalLM", rope_scaling=scaling))[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor) == ("default", 1.0)
    assert rope.theta == pytest.approx(11_158_839.9, rel=1e-6)
    plain = of_layer(least("HunYuanDenseV1ForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0}))[
        0
    ].rope
    assert plain is not None
    assert (plain.kind, plain.theta) == ("dynamic", 1e4)


@pytest.mark.parametrize(
    ("heads", "powers"),
    [(4, [2, 4, 6, 8]), (8, [1, 2, 3, 4, 5, 6, 7, 8]), (6, [2, 4, 6, 8, 1, 3]), (1, [8])],
)
def test_the_slopes_of_alibi(heads: int, powers: list[int]) -> None:
    """Each is 2 to minus so much; transformers' BLOOM and MPT have the same ones."""
    np.testing.assert_allclose(alibi_slopes(heads, 8.0), 2.0 ** -np.array(powers), rtol=1e-7)


def test_mpt_may_bound_its_products_and_scale_its_scores() -> None:
    attention = of_layer(least("MptForCausalLM", attn_config={"clip_qkv": 6, "softmax_scale": 0.5}))[0]
    assert (attention.clip, attention.scale, attention.alibi) == (6.0, 0.5, 8.0)


def test_the_forms_of_falcon() -> None:
    """7B has one head of keys and one norm; 40B has groups and two norms; 1B-like ones have neither."""
    assert least("FalconForCausalLM").layers[0].norms == "parallel_shared"
    larger = least("FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=8)
    assert (of_layer(larger)[0].num_kv_heads, larger.layers[0].norms) == (8, "parallel")
    one_norm = least("FalconForCausalLM", new_decoder_architecture=True, num_ln_in_parallel_attn=1)
    assert one_norm.layers[0].norms == "parallel_shared"
    serial = least("FalconForCausalLM", multi_query=False, parallel_attn=False)
    assert (of_layer(serial)[0].num_kv_heads, serial.layers[0].norms) == (32, "pre")


def test_older_names_of_fields_are_read_too() -> None:
    data = json.loads((GOLDEN / "gpt_neox_serial" / "config.json").read_text())
    del data["rope_parameters"]
    older = parse_config({**data, "rotary_pct": 0.5, "rotary_emb_base": 10_000})
    assert older == parse_config(json.loads((GOLDEN / "gpt_neox_serial" / "config.json").read_text()))
