"""config.json of models that read images: what published ones say, and what is refused by name."""

import json
from typing import Any

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import AttentionConfig
from penstock.runtime.models.configs.vision import (
    Gemma4VisionConfig,
    InternConfig,
    Llama4VisionConfig,
    PixtralConfig,
    QwenVisionConfig,
)
from penstock.runtime.models.params import load_rules
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig
from tests.support.goldens import GOLDEN, QWEN_WITH_IMAGES
from tests.support.models.configs import one_layer, published, rope_of, windows

QWEN2_5 = published("Qwen2.5-VL-3B-Instruct")
QWEN3 = published("Qwen3-VL-4B-Instruct")
QWEN3_MOE = published("Qwen3-VL-30B-A3B-Instruct")


def test_published_qwen2_5_vl() -> None:
    config = parse_config(QWEN2_5)
    assert rope_of(config) == RopeConfig(theta=1e6, sections=(16, 24, 24))
    assert one_layer(config).attention.qkv_bias
    assert windows(config) == (None,) * 36
    assert (config.dtype, config.tie_word_embeddings) == ("bfloat16", True)
    assert config.vision == QwenVisionConfig(
        depth=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        out_size=2048,
        patch_size=14,
        image_token_id=151655,
        video_token_id=151656,
        activation="silu",
        gated=True,
        rms_norms=True,
        patch_bias=False,
        window=8,
        full_blocks=(7, 15, 23, 31),
    )


def test_published_qwen3_vl() -> None:
    config = parse_config(QWEN3)
    assert rope_of(config) == RopeConfig(theta=5e6, sections=(24, 20, 20), interleaved=True)
    assert one_layer(config).attention.qk_norm == "head"
    assert (config.dtype, config.tie_word_embeddings, config.hidden_size) == ("bfloat16", True, 2560)
    assert config.eos_token_ids == (151645,)
    assert config.vision == QwenVisionConfig(
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        out_size=2560,
        patch_size=16,
        image_token_id=151655,
        video_token_id=151656,
        position_side=48,
        deepstack=(5, 11, 17),
    )


def test_published_qwen3_5() -> None:
    config = parse_config(published("Qwen3.5-0.8B"))
    attention = config.layers[3].attention
    assert isinstance(attention, AttentionConfig)
    assert attention.rope == RopeConfig(
        theta=1e7, partial_rotary_factor=0.25, sections=(11, 11, 10), interleaved=True
    )
    assert attention.rotary_dim == 64
    assert config.tie_word_embeddings
    assert isinstance(config.vision, QwenVisionConfig)
    assert (config.vision.depth, config.vision.head_dim, config.vision.deepstack) == (12, 64, ())
    assert (config.vision.image_token_id, config.vision.video_token_id) == (248056, 248057)
    names = {tensor.name for tensor in load_rules(config).tensors}
    assert {name.split(".")[1] for name in names} == {"language_model", "visual"}


@pytest.mark.ci
def test_published_qwen3_vl_with_experts() -> None:
    config = parse_config(QWEN3_MOE)
    layer = one_layer(config)
    assert (layer.mlp.num_experts, layer.mlp.per_token, layer.mlp.intermediate_size) == (128, 8, 768)
    assert layer.mlp.router.normalize
    assert rope_of(config) == RopeConfig(theta=5e6, sections=(24, 20, 20), interleaved=True)
    names = {tensor.name: tensor.shape for tensor in load_rules(config).tensors}
    experts = "model.language_model.layers.0.mlp.experts"
    assert names[f"{experts}.gate_up_proj"] == (128, 2048, 2 * 768)
    assert names[f"{experts}.down_proj"] == (128, 768, 2048)
    assert isinstance(config.vision, QwenVisionConfig)
    assert config.vision.deepstack == (8, 16, 24)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("data", "text", "visual"),
    [(QWEN2_5, "model.", "visual."), (QWEN3, "model.language_model.", "model.visual.")],
)
def test_tensors_of_published_checkpoints(data: dict[str, Any], text: str, visual: str) -> None:
    names = {tensor.name: tensor.shape for tensor in load_rules(parse_config(data)).tensors}
    size = data["vision_config"]["hidden_size"]
    side = data["vision_config"]["patch_size"]
    assert names[f"{visual}patch_embed.proj.weight"] == (size, 3, 2, side, side)
    assert names[f"{visual}blocks.0.attn.qkv.weight"] == (3 * size, size)
    assert f"{text}layers.35.mlp.down_proj.weight" in names
    assert f"{text}embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert all(name.startswith((text, visual)) for name in names)


def test_the_decoders_fields_may_be_at_either_level_or_at_both() -> None:
    """Versions of transformers differ in where they write them."""
    outer = [name for name in QWEN2_5 if name.startswith(("vision", "image", "video", "transformers"))]
    outer.append("architectures")
    text = {name: value for name, value in QWEN2_5.items() if name not in outer}
    text = {**text, "model_type": "qwen2_5_vl_text"}
    around = {name: value for name, value in QWEN2_5.items() if name in outer}
    around["model_type"] = "qwen2_5_vl"
    old = parse_config(QWEN2_5)
    assert parse_config({**around, "text_config": text}) == old
    assert parse_config({**QWEN2_5, "text_config": text}) == old
    new = {name: value for name, value in text.items() if name not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    assert parse_config({**around, "text_config": new}) == old
    with pytest.raises(ConfigError, match="rope_theta"):
        parse_config({**QWEN2_5, "rope_theta": 5.0, "text_config": text})


VISION = "vision_config"
TEXT = "text_config"


@pytest.mark.parametrize(
    ("where", "field", "value", "named"),
    [
        (None, "image_token_id", -1, "image_token_id"),
        (None, "audio_config", {"layers": 1}, "audio_config"),
        (None, "text_config", [1], "text_config"),
        (TEXT, "moe_layers", [1], "text_config.moe_layers"),
        (TEXT, "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "rope_scaling.rope_type"),
        (TEXT, "rope_scaling", {"mrope_interleaved": False}, "rope_scaling.mrope_interleaved"),
        (TEXT, "rope_scaling", {"mrope_section": [24, 40]}, "rope_scaling.mrope_section"),
        (TEXT, "hidden_size", 64, "vision_config.out_hidden_size"),
        (VISION, "model_type", "siglip", "vision_config.model_type"),
        (VISION, "hidden_act", "relu", "vision_config.hidden_act"),
        (VISION, "hidden_act", ["silu"], "vision_config.hidden_act"),
        (VISION, "depth", 1 << 32, "vision_config.depth"),
        (VISION, "num_heads", 7, "vision_config.num_heads"),
        (VISION, "num_position_embeddings", 2300, "vision_config.num_position_embeddings"),
        (VISION, "deepstack_visual_indexes", [5, 24], "vision_config.deepstack_visual_indexes"),
        (VISION, "deepstack_visual_indexes", [11, 5], "vision_config.deepstack_visual_indexes"),
        (VISION, "window_size", 112, "vision_config.window_size"),
        (VISION, "rope_parameters", {"rope_type": "linear"}, "vision_config.rope_parameters.rope_type"),
        (VISION, "patch_size", [16, 16], "vision_config.patch_size"),
    ],
)
def test_refused_by_name(where: str | None, field: str, value: object, named: str) -> None:
    data = json.loads(json.dumps(QWEN3))
    (data if where is None else data[where])[field] = value
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        parse_config(data)


def test_a_window_has_whole_tokens_and_sections_have_all_channels() -> None:
    data = json.loads(json.dumps(QWEN2_5))
    data["vision_config"]["window_size"] = 27
    data["rope_scaling"]["mrope_section"] = [16, 24, 25]
    with pytest.raises(ConfigError, match=r"window_size.*mrope_section"):
        parse_config(data)


@pytest.mark.parametrize("name", QWEN_WITH_IMAGES)
def test_every_field_of_a_golden_changes_the_model_or_is_known(name: str) -> None:
    """A field of vision_config that is refused nowhere must show in what is parsed."""
    data = json.loads((GOLDEN / name / "config.json").read_text())
    config = parse_config(data)
    assert isinstance(config.vision, QwenVisionConfig)
    for field in ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "in_channels"):
        assert getattr(config.vision, field) == data["vision_config"][field]
    assert config.vision.merge_size == data["vision_config"]["spatial_merge_size"]
    assert config.vision.temporal_patch_size == data["vision_config"]["temporal_patch_size"]
    assert config.vision.image_token_id == data["image_token_id"]


MISTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "vision_config": {
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}
"""Of Mistral Small 3.1."""
PIXTRAL: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_seq_length": 1,
    "image_token_index": 10,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "is_composition": True,
        "max_position_embeddings": 1024000,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "is_composition": True,
        "model_type": "pixtral",
        "patch_size": 16,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
"""Of Pixtral 12B."""
_INTERN = {
    "attention_bias": True,
    "image_size": [448, 448],
    "model_type": "internvl_vision",
    "norm_type": "layer_norm",
    "patch_size": [14, 14],
}
INTERN: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "image_seq_length": 256,
    "image_token_id": 151667,
    "model_type": "internvl",
    "text_config": json.loads((GOLDEN / "internvl" / "config.json").read_text())["text_config"],
    "vision_config": _INTERN,
}

LLAMA4 = published("Llama-4-Scout-17B-16E")
GEMMA4: dict[str, Any] = json.loads((GOLDEN / "gemma4_vl" / "config.json").read_text())


@pytest.mark.ci
def test_published_mistral_small() -> None:
    config = parse_config(MISTRAL)
    assert config.vision == PixtralConfig(
        out_size=5120,
        image_token_id=10,
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        patch_size=14,
        activation="silu",
        merger_eps=1e-5,
    )
    names = {tensor.name: tensor.shape for tensor in load_rules(config).tensors}
    assert names["vision_tower.patch_conv.weight"] == (1024, 3, 14, 14)
    assert names["vision_tower.transformer.layers.23.attention.o_proj.weight"] == (1024, 1024)
    assert names["multi_modal_projector.patch_merger.merging_layer.weight"] == (1024, 4096)
    assert names["multi_modal_projector.linear_1.weight"] == (5120, 1024)
    assert names["language_model.model.layers.39.mlp.up_proj.weight"] == (32768, 5120)


def test_published_pixtral() -> None:
    config = parse_config(PIXTRAL)
    assert one_layer(config).attention.num_heads == 32
    assert config.vision == PixtralConfig(
        out_size=5120,
        image_token_id=10,
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        patch_size=16,
        merge_size=1,
        activation="silu",
        projector_bias=True,
    )


def test_internvl_has_the_defaults_of_transformers() -> None:
    config = parse_config(INTERN)
    assert isinstance(config.vision, InternConfig)
    assert (config.vision.depth, config.vision.hidden_size, config.vision.qkv_bias) == (24, 1024, True)
    assert (config.vision.patches_per_tile, config.vision.tokens_per_tile) == (1024, 256)


@pytest.mark.ci
def test_published_llama_4() -> None:
    config = parse_config(LLAMA4)
    assert config.vision == Llama4VisionConfig(
        out_size=5120,
        image_token_id=200_092,
        depth=34,
        hidden_size=1408,
        intermediate_size=5632,
        num_heads=16,
        image_size=336,
        patch_size=14,
        adapter_size=4096,
    )
    assert isinstance(config.vision, Llama4VisionConfig)
    assert (config.vision.patches_per_tile, config.vision.tokens_per_tile) == (576, 144)
    of_images = {
        tensor.name: tensor.shape
        for tensor in load_rules(config).tensors
        if not tensor.name.startswith("language_model.")
    }
    layer = "vision_model.model.layers.33"
    assert {name: shape for name, shape in of_images.items() if ".model.layers." not in name} == {
        "vision_model.class_embedding": (1408,),
        "vision_model.positional_embedding_vlm": (577, 1408),
        "vision_model.patch_embedding.linear.weight": (1408, 588),
        "vision_model.layernorm_pre.weight": (1408,),
        "vision_model.layernorm_pre.bias": (1408,),
        "vision_model.layernorm_post.weight": (1408,),
        "vision_model.layernorm_post.bias": (1408,),
        "vision_model.vision_adapter.mlp.fc1.weight": (4096, 5632),
        "vision_model.vision_adapter.mlp.fc2.weight": (4096, 4096),
        "multi_modal_projector.linear_1.weight": (5120, 4096),
    }
    assert of_images[f"{layer}.self_attn.o_proj.bias"] == (1408,)
    assert of_images[f"{layer}.mlp.fc1.weight"] == (5632, 1408)


def test_gemma_4_has_the_defaults_of_transformers() -> None:
    """And the fields that only published files have. Images are seen both ways only where the decoder says
    so.
    """
    inner = {"model_type": "gemma4_vision", "default_output_length": 280, "global_head_dim": 64}
    names = ("architectures", "model_type", "text_config")
    data = {name: GEMMA4[name] for name in names} | {"vision_config": inner}
    assert parse_config(data).vision == Gemma4VisionConfig(
        out_size=48,
        image_token_id=258_880,
        begin_token_id=255_999,
        end_token_id=258_882,
        video_token_id=258_884,
        audio_token_id=258_881,
        most_tokens=280,
        depth=16,
        hidden_size=768,
        intermediate_size=3072,
        num_heads=12,
        patch_size=16,
        merge_size=3,
        num_positions=10_240,
        sees_windows_ahead=True,
        eps=1e-6,
        rope_theta=100.0,
    )
    causal = {**GEMMA4["text_config"], "use_bidirectional_attention": None}
    vision = parse_config({**data, "text_config": causal}).vision
    assert vision is not None
    assert vision.both_ways == "none"


@pytest.mark.parametrize(
    ("data", "where", "field", "value", "named"),
    [
        (MISTRAL, None, "vision_feature_layer", -2, "vision_feature_layer"),
        (MISTRAL, None, "audio_config", {"layers": 1}, "audio_config"),
        (MISTRAL, None, "projector_hidden_act", "relu", "projector_hidden_act"),
        (MISTRAL, None, "projector_hidden_act", ["gelu"], "projector_hidden_act"),
        (MISTRAL, VISION, "model_type", "siglip", "vision_config.model_type"),
        (MISTRAL, VISION, "num_hidden_layers", 1 << 32, "vision_config.num_hidden_layers"),
        (MISTRAL, VISION, "head_dim", 32, "vision_config.head_dim"),
        (MISTRAL, VISION, "num_attention_heads", 6, "vision_config.num_attention_heads"),
        (
            MISTRAL,
            VISION,
            "rope_parameters",
            {"rope_type": "yarn"},
            "vision_config.rope_parameters.rope_type",
        ),
        (MISTRAL, VISION, "patch_size", [14, 14], "vision_config.patch_size"),
        (PIXTRAL, None, "vision_feature_select_strategy", "default", "vision_feature_select_strategy"),
        (PIXTRAL, VISION, "model_type", "clip_vision_model", "vision_config.model_type"),
        (INTERN, None, "downsample_ratio", 0.25, "downsample_ratio"),
        (INTERN, None, "image_seq_length", 64, "image_seq_length"),
        (INTERN, VISION, "use_mask_token", True, "vision_config.use_mask_token"),
        (INTERN, VISION, "image_size", [448, 224], "vision_config.image_size"),
        (INTERN, VISION, "norm_type", "batch_norm", "vision_config.norm_type"),
        (INTERN, TEXT, "model_type", "gpt_oss", "text_config.model_type"),
        (LLAMA4, TEXT, "model_type", "llama", "text_config.model_type"),
        (LLAMA4, VISION, "model_type", "siglip_vision_model", "vision_config.model_type"),
        (LLAMA4, VISION, "pixel_shuffle_ratio", 0.25, "vision_config.pixel_shuffle_ratio"),
        (LLAMA4, VISION, "multi_modal_projector_bias", True, "vision_config.multi_modal_projector_bias"),
        (LLAMA4, VISION, "num_attention_heads", 12, "vision_config.num_attention_heads"),
        (LLAMA4, VISION, "num_channels", 1, "vision_config.num_channels"),
        (LLAMA4, VISION, "image_size", 350, "vision_config.image_size"),
        (LLAMA4, VISION, "intermediate_size", 1408, "vision_config.intermediate_size"),
        (LLAMA4, VISION, "projector_input_dim", 2048, "vision_config.projector_input_dim"),
        (LLAMA4, VISION, "vision_output_dim", 7680, "vision_config.vision_output_dim"),
        (
            LLAMA4,
            VISION,
            "rope_parameters",
            {"rope_type": "yarn"},
            "vision_config.rope_parameters.rope_type",
        ),
        (GEMMA4, None, "audio_sampling", 3, "audio_sampling"),
        (GEMMA4, TEXT, "model_type", "gemma3_text", "text_config.model_type"),
        (GEMMA4, TEXT, "pad_token_id", 512, "text_config.pad_token_id: must be below 512"),
        (GEMMA4, TEXT, "use_bidirectional_attention", "all", "text_config.use_bidirectional_attention"),
        (GEMMA4, VISION, "model_type", "siglip_vision_model", "vision_config.model_type"),
        (GEMMA4, VISION, "head_dim", 32, "vision_config.head_dim"),
        (GEMMA4, VISION, "num_key_value_heads", 1, "vision_config.num_key_value_heads"),
        (GEMMA4, VISION, "num_attention_heads", 3, "vision_config.num_attention_heads"),
        (GEMMA4, VISION, "hidden_activation", "silu", "vision_config.hidden_activation"),
        (
            GEMMA4,
            VISION,
            "rope_parameters",
            {"rope_type": "yarn"},
            "vision_config.rope_parameters.rope_type",
        ),
    ],
)
def test_others_are_refused_by_name(
    data: dict[str, Any], where: str | None, field: str, value: object, named: str
) -> None:
    changed = json.loads(json.dumps(data))
    (changed if where is None else changed[where])[field] = value
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        parse_config(changed)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gemma3_vl", "num_hidden_layers"),
        ("mistral3_vl", "num_hidden_layers"),
        ("internvl", "num_hidden_layers"),
        ("gemma4_vl", "num_hidden_layers"),
        ("qwen3_vl", "depth"),
    ],
)
def test_so_many_layers_of_an_encoder_that_none_has_are_refused(name: str, field: str) -> None:
    """To describe each of them would take all memory."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config["vision_config"][field] = 1 << 12
    with pytest.raises(ConfigError, match=f"vision_config.{field}: must be an integer .*below 4,?096"):
        parse_config(config)
