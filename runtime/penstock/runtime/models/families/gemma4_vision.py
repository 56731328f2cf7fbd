"""Gemma 4 with images: its text model, and the encoder of images with a projection behind it.

Sounds and videos are not served: what reads sounds is not loaded, and prompts with a place for one are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.configs.vision import Gemma4VisionConfig
from penstock.runtime.models.families import gemma4
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.vision_fields import decoder_of
from penstock.runtime.models.families.vision_wrapper import text_fields
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_TEXT = gemma4.FAMILIES["Gemma4ForCausalLM"]
_NAMES = TensorNames(
    "model.language_model.",
    vision="model.vision_tower.",
    projector="model.",
    vision_tensor="patch_embedder.input_proj.weight",
    projector_tensor="embed_vision.embedding_projection.weight",
)
_UNUSED = (
    "audio_config",
    "audio_ms_per_token",
    "audio_soft_tokens_per_image",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "vision_soft_tokens_per_video_frame",
)
"""Fields about sounds and videos."""
_TABLES: Mapping[str, int] = {"of_columns": 0, "of_rows": 1}
"""Which of the two stacked tables of positions is which."""


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gemma4")
    fields.ignore(_UNUSED)
    vision = _read_encoder(fields)
    text = text_fields(fields, "")
    family = decoder_of(text, {"gemma4_text": _TEXT})
    text.ignore(family.ignored)
    sees_ahead = text.raw("use_bidirectional_attention") == "vision"
    pad = text.integer("pad_token_id", 0, minimum=0)
    config = family.parse(architecture, text)
    padded = (vision.image_token_id, vision.video_token_id, vision.audio_token_id)
    per_layer = config.per_layer
    if per_layer is not None:
        if pad >= per_layer.vocab_size:
            text.problem("pad_token_id", f"must be below {per_layer.vocab_size}, vocab_size_per_layer_input")
            text.finish()
        per_layer = replace(per_layer, pad_token_id=pad, padded_tokens=padded)
    vision = replace(vision, out_size=config.hidden_size, sees_windows_ahead=sees_ahead)
    return replace(config, vision=vision, per_layer=per_layer, names=_NAMES)


def _read_encoder(fields: Fields) -> Gemma4VisionConfig:
    """Read the encoder, but for what it shares with the decoder. Defaults are those of transformers'
    classes.
    """
    inner = Fields(fields.mapping("vision_config"), "vision_config.", fields.problems)
    inner.only("model_type", "gemma4_vision")
    inner.only("hidden_activation", "gelu_pytorch_tanh")
    inner.only("attention_bias", False)
    inner.ignore(("default_output_length", "dtype", "global_head_dim", "max_position_embeddings"))
    inner.ignore(("torch_dtype",))
    hidden, heads = inner.integer("hidden_size", 768), inner.integer("num_attention_heads", 12)
    if hidden % (4 * heads):
        inner.problem("num_attention_heads", f"{heads} heads of {hidden} channels have no whole quarters")
    for name, expected in {"num_key_value_heads": heads, "head_dim": hidden // heads}.items():
        if inner.integer(name, expected) != expected:
            inner.problem(name, f"must be {expected}, as heads and hidden_size are")
    rope = Fields(inner.mapping("rope_parameters"), "vision_config.rope_parameters.", fields.problems)
    rope.only("rope_type", "axial", "default")
    theta = rope.number("rope_theta", 100.0)
    rope.refuse_unread()
    config = Gemma4VisionConfig(
        out_size=1,
        image_token_id=fields.integer("image_token_id", 258_880, minimum=0),
        video_token_id=fields.integer("video_token_id", 258_884, minimum=0),
        audio_token_id=fields.integer("audio_token_id", 258_881, minimum=0),
        begin_token_id=fields.integer("boi_token_id", 255_999, minimum=0),
        end_token_id=fields.integer("eoi_token_id", 258_882, minimum=0),
        most_tokens=fields.integer("vision_soft_tokens_per_image", 280),
        depth=inner.num_layers(16),
        hidden_size=hidden,
        intermediate_size=inner.integer("intermediate_size", 3072),
        num_heads=heads,
        patch_size=inner.integer("patch_size", 16),
        merge_size=inner.integer("pooling_kernel_size", 3),
        num_positions=inner.integer("position_embedding_size", 10_240),
        has_bounds=inner.boolean("use_clipped_linears", False),
        standardizes=inner.boolean("standardize", False),
        eps=inner.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
    )
    inner.refuse_unread(HARMLESS_FIELDS)
    return config


def _stored(config: ModelConfig) -> StoredAt:
    text = _TEXT.stored(config)

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[0] != "visual":
            return text(path, shape)
        match path[1:]:
            case (str(table), "weight") if table in _TABLES:
                name = "visual.patch_embedder.position_embedding_table"
                return Stored((Source(name, (2, *shape), at=(_TABLES[table],)),))
            case ("input_proj", "weight"):
                return Stored((Source("visual.patch_embedder.input_proj.weight", shape),))
            case ("embedding_projection", "weight"):
                return Stored((Source("projector.embed_vision.embedding_projection.weight", shape),))
            case ("layers", *inner):
                name = ".".join(str(part) for part in ("visual.encoder.layers", *inner))
                is_bound = str(inner[-1]).endswith(("_min", "_max"))
                return Stored((Source(name, () if is_bound else shape),))
            case _:
                return Stored((Source(".".join(str(part) for part in path), shape),))

    return stored


FAMILIES: Mapping[str, ModelFamily] = {
    "Gemma4ForConditionalGeneration": replace(
        _TEXT,
        parse=_parse,
        ignored=(),
        stored=_stored,
        harmless=(*_TEXT.harmless, r"(^|\.)(audio_tower|embed_audio)\."),
    )
}
