"""What Gemma's config.json says, in its older and newer forms, and what of it is refused."""

import json

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import MLPConfig
from penstock.runtime.models.configs.vision import SiglipVisionConfig
from penstock.runtime.models.params import load_rules
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig
from tests.support.models.configs import attentions, one_layer, published, windows

GEMMA2, GEMMA3 = published("gemma-2-9b"), published("gemma-3-1b-it")
LOCAL, GLOBAL = RopeConfig(theta=10_000.0), RopeConfig(theta=1_000_000.0)


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_published_gemma2():
    config = parse_config(GEMMA2)
    layer = one_layer(config)
    assert windows(config) == (4096, None) * 21
    assert (layer.norms, layer.residual_multiplier) == ("sandwich", 1.0)
    assert (layer.mlp.activation, layer.mlp.bias) == ("gelu_tanh", False)
    attention = layer.attention
    assert (attention.scale, attention.softcap, attention.rope) == (1 / 16, 50.0, LOCAL)
    assert (attention.qk_norm, attention.qkv_bias, attention.o_bias) == ("none", False, False)
    assert (config.norm_offset, config.logits_softcap, config.tie_word_embeddings) == (1.0, 30.0, True)
    assert config.embedding_scale == pytest.approx(59.866518)  # the square root of 3584


def test_published_gemma3():
    config = parse_config(GEMMA3)
    assert windows(config) == (512, 512, 512, 512, 512, None) * 4 + (512, 512)
    ropes = [attention.rope for attention in attentions(config)]
    assert ropes == [GLOBAL if window is None else LOCAL for window in windows(config)]
    for layer, attention in zip(config.layers, attentions(config), strict=True):
        assert (attention.qk_norm, attention.softcap, attention.scale) == ("head", None, 1 / 16)
        assert layer.norms == "sandwich"
    assert {layer.mlp for layer in config.layers} == {
        MLPConfig(intermediate_size=6912, activation="gelu_tanh")
    }
    assert (config.logits_softcap, config.norm_offset, config.tie_word_embeddings) == (None, 1.0, True)
    assert config.eos_token_ids == (1, 106)


def test_the_newer_form_of_gemma3_is_the_same_model():
    older = without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
    types = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)]
    ropes = {
        "full_attention": {"rope_theta": 1_000_000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    }
    newer = {**older, "layer_types": types, "rope_parameters": ropes, "_sliding_window_pattern": 6}
    assert parse_config(newer) == parse_config(GEMMA3)


def test_what_the_files_leave_out():
    fields = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "head_dim")
    rope = (
        "rope_theta",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "layer_types",
        "hidden_activation",
    )
    assert parse_config(without(GEMMA2, *fields, *rope, "sliding_window")) == parse_config(GEMMA2)
    assert parse_config(without(GEMMA3, *fields, *rope)) == parse_config(GEMMA3)
    assert set(windows(parse_config(without(GEMMA3, "sliding_window")))) == {None, 4096}


def test_only_full_attention_of_gemma3_is_scaled():
    """As in Gemma 3 4B and larger."""
    config = parse_config({**GEMMA3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    ropes = {attention.window: attention.rope for attention in attentions(config)}
    assert ropes == {512: LOCAL, None: RopeConfig("linear", theta=1_000_000.0, factor=8.0)}


def test_a_pattern_that_the_layers_do_not_fill():
    assert windows(parse_config({**GEMMA3, "num_hidden_layers": 3, "sliding_window_pattern": 2})) == (
        512,
        None,
        512,
    )


def test_a_soft_cap_can_be_off():
    config = parse_config({**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (one_layer(config).attention.softcap, config.logits_softcap) == (None, None)


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (GEMMA2, "use_bidirectional_attention", True),
        (GEMMA3, "use_bidirectional_attention", True),
        (GEMMA2, "hidden_activation", "gelu"),
        (GEMMA2, "sliding_window", None),
        (GEMMA3, "attn_logit_softcapping", 50.0),
        (GEMMA3, "final_logit_softcapping", -1.0),
        (GEMMA3, "layer_types", ["chunked_attention"] * 26),
        (GEMMA3, "sliding_window_pattern", 0),
        (GEMMA3, "query_pre_attn_scalar", "256"),
        (GEMMA3, "rope_parameters.rope_theta", {"rope_theta": 10_000.0}),
        (GEMMA3, "rope_parameters.sliding_attention.alpha", {"sliding_attention": {"alpha": 2.0}}),
        (GEMMA3, "rope_parameters.full_attention", {"full_attention": 3}),
        (GEMMA2, "rope_local_base_freq", 10_000),  # Gemma 2 has one base
        (GEMMA3, "mlp_bias", True),
        (GEMMA3, "num_experts", 4),
    ],
)
def test_refused_by_name(base, field, value):
    with pytest.raises(ConfigError) as caught:
        parse_config({**base, field.partition(".")[0]: value})
    assert str(caught.value).count(f"{field}: ") == 1, caught.value


GEMMA3_VISION = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    | {"num_hidden_layers": 34, "sliding_window": 1024},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896}
    | {"intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}
    | {"vision_use_head": False},
    "mm_tokens_per_image": 256,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
}
"""What Gemma 3 4B has of these."""


def test_published_gemma3_with_images():
    config = parse_config(GEMMA3_VISION)
    vision = config.vision
    assert isinstance(vision, SiglipVisionConfig)
    assert (vision.depth, vision.head_dim, vision.out_size, vision.eps) == (27, 72, 2560, 1e-6)
    assert (vision.num_patches, vision.num_tokens, vision.per_token) == (4096, 256, 16)
    names = {tensor.name: tensor.shape for tensor in load_rules(config).tensors}
    tower = "vision_tower.vision_model"
    assert names[f"{tower}.embeddings.patch_embedding.weight"] == (1152, 3, 14, 14)
    assert names[f"{tower}.encoder.layers.26.self_attn.out_proj.bias"] == (1152,)
    assert names["multi_modal_projector.mm_input_projection_weight"] == (1152, 2560)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_tokens_per_image", 255),
        ("vision_config.model_type", "clip"),
        ("vision_config.patch_size", 15),
        ("vision_config.num_attention_heads", 7),
        ("vision_config.hidden_act", "relu"),
        ("vision_config.hidden_act", ["gelu"]),
        ("vision_config.num_hidden_layers", 1 << 32),
        ("vision_config.new_field", 1),
    ],
)
def test_what_gemma3s_encoder_cannot_be_is_refused(field, value):
    data = json.loads(json.dumps(GEMMA3_VISION))
    *outer, name = field.split(".")
    (data[outer[0]] if outer else data)[name] = value
    with pytest.raises(ConfigError, match=field):
        parse_config(data)
