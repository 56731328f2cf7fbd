"""What a family of models consists of, and where most checkpoints have their parameters.

The path of a parameter is that of the model's state, where every product has a path of its own and no two are
stacked: ("layers", 0, "self_attn", "q_proj", "weight"). A family says where a checkpoint has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.encoder import Encoder
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import ParamPath, Rows, Source, Stored, StoredAt

PRE_NORMS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""What checkpoints call the norms of a layer that has them before attention and before the MLP."""
POST_NORMS: Mapping[str, str] = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
"""The same for a layer with norms after both."""
SANDWICH_NORMS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
"""The same for a layer with norms before and after both."""


def tied_head(config: ModelConfig) -> Mapping[str, str]:
    """Name a tied head, which has no leaf of its own, but which some checkpoints store nevertheless."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


def tensor_name(path: ParamPath, names: Mapping[str, str]) -> str:
    """Map ("layers", 0, "mlp_norm", "weight") -> "model.layers.0.post_attention_layernorm.weight", where
    `names` maps "mlp_norm" to "post_attention_layernorm". The head has no prefix.
    """
    if path[0] == "classifier":  # of a decoder: one product
        return f"score.{path[-1]}"
    name = ".".join(names.get(str(part), str(part)) for part in path)
    return name if path[0] == "lm_head" else f"model.{name}"


def stored_plainly(names: Mapping[str, str] = PRE_NORMS) -> Callable[[ModelConfig], StoredAt]:
    """Say where checkpoints that have a tensor for each parameter store it: see `ModelFamily.stored`. `names`
    maps parts of paths to what the checkpoint calls them.
    """

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        return Stored((Source(tensor_name(path, names), shape),))

    return lambda config: stored


@functools.lru_cache(maxsize=64)
def pairs_apart(num_heads: int, dim: int, turned: int, begin: int = 0) -> Rows:
    """Return the rows of heads of `dim` channels, of which `turned` from `begin` on are rotated, in a
    checkpoint that has the two channels of each rotated pair side by side: of each head the even ones of
    these before the odd ones, and the others where they are.
    """
    end = begin + turned
    one_head = [*range(begin), *range(begin, end, 2), *range(begin + 1, end, 2), *range(end, dim)]
    return tuple(head * dim + row for head in range(num_heads) for row in one_head)


_PLAINLY = stored_plainly()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One family of models.

    parse: (architecture, fields of config.json) -> ModelConfig; raises ConfigError with all problems.
    ignored: fields that transformers' own implementation of the family does not look at. stored: where its
    checkpoints have each parameter. harmless, copies: see `LoadRules`. further_layers: checkpoints may have
    layers behind those of the decoder, which predict further tokens and are read only if the model
    `predicts`. predictor: what the names of the tensors of such a layer's parts begin with, where it stands
    elsewhere; None: it does not. hidden_first: its product reads the hidden state before the embedding, and
    not behind it. build: the module with zero weights, in a dtype.
    """

    parse: Callable[[str, Fields], ModelConfig]
    ignored: tuple[str, ...] = ()
    stored: Callable[[ModelConfig], StoredAt] = _PLAINLY
    harmless: tuple[str, ...] = ()
    further_layers: bool = False
    predictor: Mapping[str, str] | None = None
    hidden_first: bool = False
    copies: Callable[[ModelConfig], Mapping[str, str]] = tied_head
    build: Callable[[ModelConfig, jnp.dtype, LinearFormat], CausalLM | Encoder] = CausalLM
