"""What the config.json of several models that read images have in common, and their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from penstock.runtime.models.configs.vision import VisionActivation
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.hf_fields import Fields

_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_activation(fields: Fields, name: str, default: str) -> VisionActivation:
    """Read an activation by its name in transformers."""
    value = fields.raw(name) or default
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        fields.problem(name, f"{value!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return "silu"
    return _ACTIVATIONS[value]


def read_image_token(fields: Fields, default: int) -> int:
    """Read the token of images, which has a name of either generation of transformers."""
    name = "image_token_id" if "image_token_id" in fields else "image_token_index"
    return fields.integer(name, default, minimum=0)


def decoder_of(text: Fields, families: Mapping[str, ModelFamily]) -> ModelFamily:
    """Find the family of the decoder by the model_type of text_config. ConfigError if it is none of these."""
    model_type = text.raw("model_type")
    family = families.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        text.problem("model_type", f"{model_type!r} is not supported; supported: {', '.join(families)}")
        text.finish()
        raise AssertionError
    return family


def flat_kernels(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return kernels of a convolution over whole patches as rows of a matrix."""
    return rows[0].reshape(len(rows[0]), -1)
