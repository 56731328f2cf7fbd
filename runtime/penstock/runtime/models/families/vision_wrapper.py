"""A config.json whose decoder has an object of its own, `text_config`, or has its fields at the top level.

Such a family refers to the family of its decoder, which reads `text_config` as if it were a config.json, and
gives the rules of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS

_TIED = "tie_word_embeddings"
_DTYPES = ("dtype", "torch_dtype")
_OF_BOTH = (*_DTYPES, "bos_token_id", "eos_token_id")
"""Fields of the top level that are the decoder's where text_config does not have them."""


def text_fields(fields: Fields, model_type: str, defaults: Mapping[str, object] | None = None) -> Fields:
    """Return the fields of the decoder, whose problems are noted among those of `fields`; call it when all
    else has been read. model_type: that of the decoder. defaults: of its fields.

    Heads are tied where either level says so, unless the checkpoint has a head of its own that differs from
    the embeddings (`load_config`).
    """
    of_outer = _tied(fields)
    if fields.raw("text_config") is None:
        data = {**(defaults or {}), **fields.rest(), "model_type": model_type, **of_outer}
        return Fields(data, problems=fields.problems)
    text: Mapping[str, object] = fields.mapping("text_config")
    inner = Fields(text, "text_config.", fields.problems)
    of_inner = _tied(inner)
    others = fields.rest()
    # Some versions of transformers wrote the decoder's fields at both levels, and read text_config's alone.
    outer = {
        name: value
        for name, value in others.items()
        if name not in _OF_BOTH and (name not in text or text[name] != value)
    }
    Fields(outer, problems=fields.problems).refuse_unread(HARMLESS_FIELDS)
    has_dtype = any(text.get(name) is not None for name in _DTYPES)
    shared = {
        name: others[name]
        for name in _OF_BOTH
        if name in others and text.get(name) is None and not (has_dtype and name in _DTYPES)
    }
    given = {name: value for name, value in text.items() if value is not None or name not in shared}
    tied = {**of_inner, **of_outer}
    if tied:
        tied = {_TIED: any(tied_there is True for tied_there in (*of_inner.values(), *of_outer.values()))}
    return Fields({**(defaults or {}), **given, **shared, **tied}, "text_config.", fields.problems)


def _tied(fields: Fields) -> dict[str, object]:
    """Return the field that ties the head, if it is there."""
    return {} if fields.raw(_TIED) is None else {_TIED: fields.boolean(_TIED, False)}
