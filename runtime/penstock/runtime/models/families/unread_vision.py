"""Models that read pictures, of which the text model alone is served: what reads pictures is not loaded, and
requests with pictures are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.families import llama4
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.vision_wrapper import text_fields
from penstock.runtime.models.hf_fields import Fields

_OF_PICTURES = """
    boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_id image_token_index
    multimodal_projector_bias projector_hidden_act spatial_merge_size vision_config vision_feature_layer
"""
"""Fields about pictures."""
_HARMLESS = (r"(^|\.)(vision_tower|vision_model|multi_modal_projector)\.",)

_NAMES = TensorNames("language_model.model.", "language_model.lm_head.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One architecture. texts: the model_type of text_config to the family of the text model. names: of
    published tensors.
    """

    model_type: str
    texts: Mapping[str, ModelFamily]
    names: TensorNames = _NAMES


KINDS: Mapping[str, Kind] = {
    "Llama4ForConditionalGeneration": Kind(
        model_type="llama4", texts={"llama4_text": llama4.FAMILIES["Llama4ForCausalLM"]}
    ),
}


def _parse(architecture: str, fields: Fields, kind: Kind) -> ModelConfig:
    fields.only("model_type", kind.model_type)
    fields.ignore(_OF_PICTURES.split())
    text = text_fields(fields, "")
    model_type = text.raw("model_type")
    family = kind.texts.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        text.problem("model_type", f"{model_type!r} is not supported; supported: {', '.join(kind.texts)}")
        text.finish()
        raise AssertionError
    text.ignore(family.ignored)
    return replace(family.parse(architecture, text), names=kind.names)


def _family(kind: Kind) -> ModelFamily:
    text = next(iter(kind.texts.values()))  # those of one kind differ in nothing but what they parse
    return replace(
        text,
        parse=functools.partial(_parse, kind=kind),
        ignored=(),
        harmless=(*text.harmless, *_HARMLESS),
    )


FAMILIES: Mapping[str, ModelFamily] = {name: _family(kind) for name, kind in KINDS.items()}
