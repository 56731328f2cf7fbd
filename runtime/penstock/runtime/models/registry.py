"""Architecture name to everything that is needed to serve it.

A new family adds an entry: how config.json is parsed, which module computes it, and what the tensors in its
checkpoints are called. The members of the Llama family share all of these, and differ by the data in
`config.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from penstock.runtime.errors import UnknownArchitecture
from penstock.runtime.models.config import FAMILIES, ModelConfig
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import NameOf, ParamPath


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One family of models.

    parse: a config.json mapping -> ModelConfig. build: the module with zero weights, in a dtype. tensor_name:
    what the tensors of its checkpoints are called. harmless, copies: see `LoadRules`.
    """

    parse: Callable[[Mapping[str, object]], ModelConfig]
    build: Callable[[ModelConfig, jnp.dtype, LinearFormat], CausalLM]
    tensor_name: NameOf
    harmless: tuple[str, ...]
    copies: Callable[[ModelConfig], Mapping[str, str]]


def _llama_tensor_name(path: ParamPath) -> str:
    """("layers", 0, "mlp", "weight") -> "model.layers.0.mlp.weight"; the head has no prefix."""
    name = ".".join(map(str, path))
    return name if path[0] == "lm_head" else f"model.{name}"


def _tied_head(config: ModelConfig) -> Mapping[str, str]:
    """A tied head has no leaf of its own, but some checkpoints store it nevertheless."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


_ROTARY_CONSTANT = r"(^|\.)rotary_emb\.inv_freq$"
"""Old checkpoints store this constant; config.json decides it."""

ARCHITECTURES: Mapping[str, ModelFamily] = {
    name: ModelFamily(
        parse=ModelConfig.from_dict,
        build=CausalLM,
        tensor_name=_llama_tensor_name,
        harmless=(_ROTARY_CONSTANT,),
        copies=_tied_head,
    )
    for name in FAMILIES
}


def family_of(architecture: str) -> ModelFamily:
    """The registry's entry; raises UnknownArchitecture if there is none."""
    if architecture not in ARCHITECTURES:
        raise UnknownArchitecture(architecture, tuple(ARCHITECTURES))
    return ARCHITECTURES[architecture]
