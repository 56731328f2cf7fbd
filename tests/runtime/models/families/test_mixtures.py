"""What config.json of models with experts say, in the forms in which they are published."""

import dataclasses
import json

import pytest
from flax import nnx

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import ExpertsConfig, MLPConfig, QueryScaling, RouterConfig
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.params import abstract_model
from penstock.runtime.models.registry import parse_config
from tests.support.goldens import GOLDEN
from tests.support.models.configs import attentions, one_layer, published, windows

MIXTRAL, QWEN2, QWEN3 = (published(n) for n in ("Mixtral-8x7B-v0.1", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B"))
GLM, GPT_OSS = published("GLM-4.5-Air"), published("gpt-oss-20b")
LLAMA4, MINIMAX = (
    json.loads((GOLDEN / name / "config.json").read_text()) for name in ("llama4", "minimax_m2")
)

PACKABLE = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32}


def mlps(config):
    return [layer.mlp for layer in config.layers]


def test_published_mixtral():
    config = parse_config(MIXTRAL)
    assert one_layer(config).mlp == ExpertsConfig(num_experts=8, per_token=2, intermediate_size=14336)
    assert (one_layer(config).attention.qkv_bias, config.rms_norm_eps) == (False, 1e-5)
    assert windows(config) == (None,) * 32
    assert set(windows(parse_config({**MIXTRAL, "sliding_window": 64}))) == {64}


def test_published_qwen2():
    config = parse_config(QWEN2)
    assert one_layer(config).mlp == ExpertsConfig(
        num_experts=60,
        per_token=4,
        intermediate_size=1408,
        router=RouterConfig(normalize=False),
        shared_size=5632,
        shared_gate=True,
    )
    attention = one_layer(config).attention
    assert (attention.qkv_bias, attention.o_bias, attention.qk_norm) == (True, False, "none")
    assert windows(config) == (None,) * 24
    some = parse_config({**QWEN2, "use_sliding_window": True, "max_window_layers": 3})
    assert windows(some) == (32768, None, 32768) + (None,) * 21


def test_published_qwen3():
    config = parse_config(QWEN3)
    assert one_layer(config).mlp == ExpertsConfig(num_experts=128, per_token=8, intermediate_size=768)
    assert one_layer(config).attention.qk_norm == "head"
    newer = {name: value for name, value in QWEN3.items() if name != "num_experts"}
    assert parse_config({**newer, "num_local_experts": 128}) == config
    assert set(windows(parse_config({**QWEN3, "use_sliding_window": True, "sliding_window": 64}))) == {64}


def test_some_layers_of_qwen_have_no_experts():
    config = parse_config({**QWEN3, "mlp_only_layers": [1], "decoder_sparse_step": 2})
    kinds = [isinstance(mlp, ExpertsConfig) for mlp in mlps(config)]
    assert kinds == [layer % 2 == 1 and layer != 1 for layer in range(48)]
    assert mlps(config)[0] == MLPConfig(intermediate_size=6144)


def test_published_glm():
    config = parse_config(GLM)
    assert mlps(config)[0] == MLPConfig(intermediate_size=10944)
    experts = ExpertsConfig(
        num_experts=128,
        per_token=8,
        intermediate_size=1408,
        router=RouterConfig(score="sigmoid", correction=True),
        shared_size=1408,
    )
    assert set(mlps(config)[1:]) == {experts}
    attention = attentions(config)[0]
    assert (attention.rotary_dim, attention.qkv_bias, attention.o_bias) == (64, True, False)
    assert attention.qk_norm == "none"
    no_share = {name: value for name, value in GLM.items() if name != "partial_rotary_factor"}
    assert parse_config(no_share) == config
    assert attentions(parse_config({**GLM, "use_qk_norm": True}))[0].qk_norm == "head"


def test_minimax():
    config = parse_config(MINIMAX)
    attention = one_layer(config).attention
    assert (attention.rotary_dim, attention.qk_norm) == (8, "all")
    older = {name: value for name, value in MINIMAX.items() if name != "rope_parameters"}
    published_also = {
        "attn_type_list": [1, 1],
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    assert parse_config({**older, "rope_theta": 5_000_000, **published_also}) == config


def test_published_gpt_oss():
    config = parse_config(GPT_OSS)
    experts = one_layer(config).mlp
    assert (experts.num_experts, experts.per_token, experts.activation, experts.limit) == (
        32,
        4,
        "gpt_oss",
        7,
    )
    assert (experts.bias, experts.router.bias, experts.stored_as) == (True, True, "mxfp4")
    attention = one_layer(config).attention
    assert (attention.sinks, attention.qkv_bias, attention.o_bias) == (True, True, True)
    assert windows(config) == (128, None) * 12
    assert config.dtype == "bfloat16"
    assert not attention.rope.truncate
    left_out = ("layer_types", "sliding_window", "rope_scaling", "swiglu_limit", "attention_bias")
    assert parse_config({k: v for k, v in GPT_OSS.items() if k not in left_out}) == config
    floats = parse_config({**GPT_OSS, "quantization_config": None})
    assert (one_layer(floats).mlp.stored_as, floats.dtype) == ("floats", None)


def test_llama4():
    config = parse_config(LLAMA4)
    attention = attentions(config)
    assert [a.chunk for a in attention] == [32, 32, 32, None]
    assert [a.rope is None for a in attention] == [False, False, False, True]
    assert [a.qk_norm for a in attention] == ["l2_after"] * 3 + ["none"]
    assert [a.query_scaling for a in attention] == [None] * 3 + [QueryScaling(0.1, 8192.0, shift=1)]
    assert [isinstance(mlp, ExpertsConfig) for mlp in mlps(config)] == [False, True, False, True]
    left_out = ("moe_layers", "no_rope_layers", "layer_types", "floor_scale", "attn_scale", "use_qk_norm")
    assert parse_config({k: v for k, v in LLAMA4.items() if k not in left_out}) == config
    assert parse_config({**LLAMA4, "attn_temperature_tuning": 4}) == config
    untuned = parse_config({**LLAMA4, "attn_temperature_tuning": False, "use_qk_norm": False})
    assert {(a.query_scaling, a.qk_norm) for a in attentions(untuned)} == {(None, "none")}


@pytest.mark.parametrize(
    "base",
    [
        MIXTRAL,
        QWEN2,
        QWEN3,
        GLM,
        GPT_OSS,
        {**LLAMA4, **PACKABLE, "intermediate_size_mlp": 128},
        {**MINIMAX, **PACKABLE, "head_dim": 128},
    ],
    ids=lambda base: base["model_type"],
)
@pytest.mark.parametrize("int8", [False, True])
def test_published_sizes_are_native(base, int8):
    """Four layers, so that every kind occurs. Sizes of goldens that kernels do not take are replaced."""
    config = parse_config(base)
    first = config.layers[:2] if len(config.layers) < 5 else (config.layers[0], config.layers[-1])
    config = dataclasses.replace(config, layers=(*first, *config.layers[-2:]))
    graphdef, state = abstract_model(config, "bfloat16", LinearFormat(packed=True, int8=int8))
    assert nnx.merge(graphdef, state).is_native


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (MIXTRAL, "num_experts_per_tok", 9),
        (MIXTRAL, "num_local_experts", 0),
        (MIXTRAL, "hidden_act", "gelu"),
        (MIXTRAL, "shared_expert_intermediate_size", 64),
        (QWEN3, "num_local_experts", 64),  # contradicts num_experts
        (QWEN3, "mlp_only_layers", [48]),
        (QWEN3, "mlp_only_layers", 3),
        (QWEN3, "decoder_sparse_step", 0),
        (QWEN2, "layer_types", ["sliding_attention"] * 24),
        (QWEN2, "norm_topk_prob", "yes"),
        (GLM, "n_group", 3),
        (GLM, "topk_group", 2),
        (GLM, "n_shared_experts", 0),
        (MINIMAX, "rotary_dim", 17),
        (MINIMAX, "scoring_func", "softmax"),
        (MINIMAX, "attn_type_list", [0, 1]),
        (MINIMAX, "shared_intermediate_size", 64),
        (MINIMAX, "quantization_config", {"quant_method": "fp8"}),
        (GPT_OSS, "swiglu_alpha", 1.0),
        (GPT_OSS, "experts_per_token", 3),
        (GPT_OSS, "hidden_size", 2848 + 16),
        (GPT_OSS, "sliding_window", None),
        (LLAMA4, "no_rope_layers", [1, 2, 1, 0]),
        (LLAMA4, "no_rope_layers", [1]),
        (LLAMA4, "moe_layers", [4]),
        (LLAMA4, "attention_chunk_size", None),
        (LLAMA4, "floor_scale", 0),
    ],
)
def test_refused_by_name(base, field, value):
    with pytest.raises(ConfigError) as caught:
        parse_config({**base, field: value})
    named = "quantization_config" if field == "hidden_size" else field
    assert f"{named}: " in str(caught.value)


def test_other_quantizations_of_gpt_oss_are_refused_by_name():
    for name, value in (("quant_method", "gptq"), ("modules_to_not_convert", ["lm_head"]), ("bits", 4)):
        changed = {**GPT_OSS["quantization_config"], name: value}
        with pytest.raises(ConfigError, match=rf"quantization_config\.{name}: "):
            parse_config({**GPT_OSS, "quantization_config": changed})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dots1", {"scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
        (
            "ernie4_5_moe",
            {
                "auto_map": {"AutoConfig": "configuration_ernie4_5_moe.Ernie4_5_MoeConfig"},
                "moe_capacity": [64, 64, 64],
                "moe_gate": "topk",
                "moe_use_aux_free": True,
                "num_nextn_predict_layers": 1,
            },
        ),
    ],
)
def test_fields_of_published_files_that_transformers_does_not_read(name, fields):
    data = json.loads((GOLDEN / name / "config.json").read_text())
    assert parse_config({**data, **fields}) == parse_config(data)


HUNYUAN, PHIMOE, DEEPSEEK2 = (
    json.loads((GOLDEN / name / "config.json").read_text())
    for name in ("hunyuan_moe", "phimoe", "deepseek_v2")
)


def test_hunyuan_says_the_same_for_each_layer():
    lists = {"moe_topk": [2, 2], "moe_intermediate_size": [112, 112], "num_shared_expert": [1, 1]}
    assert parse_config({**HUNYUAN, **lists, "use_mixed_mlp_moe": True}) == parse_config(HUNYUAN)
    assert one_layer(parse_config(HUNYUAN)).mlp == ExpertsConfig(
        num_experts=4, per_token=2, intermediate_size=112, shared_size=112
    )


def test_phimoe_has_temperatures_of_its_own_for_long_contexts():
    scaling = {
        "type": "longrope",
        "short_factor": [1.0] * 6,
        "long_factor": [2.0] * 6,
        "short_mscale": 1.25,
        "long_mscale": 1.25,
        "original_max_position_embeddings": 256,
    }
    data = {name: value for name, value in PHIMOE.items() if name != "rope_parameters"}
    attention = one_layer(parse_config({**data, "rope_scaling": scaling})).attention
    assert (attention.rope.kind, attention.rope.attention_factor) == ("longrope", 1.25)
    with pytest.raises(ConfigError, match=r"rope_scaling.long_mscale: 1.5 is not supported"):
        parse_config({**data, "rope_scaling": {**scaling, "long_mscale": 1.5}})
    published_name = parse_config({**PHIMOE, "architectures": ["PhiMoEForCausalLM"]})
    assert published_name.layers == parse_config(PHIMOE).layers


def test_deepseek_v2_without_groups():
    greedy = {**DEEPSEEK2, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax"}
    router = mlps(parse_config(greedy))[1].router
    assert router == RouterConfig(normalize=False, scale=2.0, in_group=1)
    assert mlps(parse_config(DEEPSEEK2))[1].router == dataclasses.replace(router, num_groups=2)


@pytest.mark.parametrize(
    ("data", "fields", "what"),
    [
        (HUNYUAN, {"moe_topk": [2, 1]}, "moe_topk: must be 1 to 4"),
        (HUNYUAN, {"moe_intermediate_size": 64}, "moe_intermediate_size: 64"),
        (HUNYUAN, {"num_shared_expert": [1, 2]}, "num_shared_expert"),
        (PHIMOE, {"num_experts_per_tok": 3}, "num_experts_per_tok: must be 2"),
        (DEEPSEEK2, {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'"),
        (DEEPSEEK2, {"norm_topk_prob": True}, "norm_topk_prob: True"),
        (DEEPSEEK2, {"n_group": 3}, "n_group: 3 groups of at least 1"),
        (DEEPSEEK2, {"mlp_bias": True}, "mlp_bias: True"),
    ],
)
def test_what_newer_mixtures_must_not_say(data, fields, what):
    with pytest.raises(ConfigError, match=what):
        parse_config({**data, **fields})
