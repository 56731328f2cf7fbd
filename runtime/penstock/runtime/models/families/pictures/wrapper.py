"""A config.json whose decoder has an object of its own, `text_config`, or has its fields at the top level."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS

_OF_BOTH = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")
"""Fields of the top level that are the decoder's where text_config does not have them."""


def text_fields(fields: Fields, model_type: str) -> Fields:
    """The fields of the decoder, whose problems are noted among those of `fields`; call it when all else has
    been read. model_type: that of the decoder.

    Heads are tied where either level says so. If only one does and the checkpoint has a head of its own, that
    one must hold the embeddings' bits, or loading refuses it.
    """
    tied = fields.boolean("tie_word_embeddings", False)
    if fields.raw("text_config") is None:
        data = {**fields.rest(), "model_type": model_type, "tie_word_embeddings": tied}
        return Fields(data, problems=fields.problems)
    text: Mapping[str, object] = fields.mapping("text_config")
    # Some versions of transformers wrote the decoder's fields at both levels, and read text_config's alone.
    others = fields.rest()
    outer = {
        name: value
        for name, value in others.items()
        if name not in _OF_BOTH and (name not in text or text[name] != value)
    }
    Fields(outer, problems=fields.problems).refuse_unread(HARMLESS_FIELDS)
    inner = Fields(text, "text_config.", fields.problems)
    tied = inner.boolean("tie_word_embeddings", False) or tied
    shared = {name: others[name] for name in _OF_BOTH if name in others}
    has_dtype = any(text.get(name) is not None for name in ("dtype", "torch_dtype"))
    if has_dtype:
        shared = {name: value for name, value in shared.items() if name not in ("dtype", "torch_dtype")}
    return Fields({**shared, **text, "tie_word_embeddings": tied}, "text_config.", fields.problems)
