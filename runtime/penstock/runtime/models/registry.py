"""Architecture name -> everything needed to serve it.

A new family adds an entry: how config.json is parsed, which module computes it, and how state paths are named
in its checkpoints. Members of the Llama family share all three and differ by the data in `config.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp

from penstock.runtime.errors import UnknownArchitecture
from penstock.runtime.models.config import FAMILIES, ModelConfig
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.linear import LinearFormat

ParamPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """parse: config.json mapping -> ModelConfig. build: the module with zero weights, in a dtype.

    tensor_name: the checkpoint's name of the tensor at a path, that of a state in which nothing is fused.
    """

    parse: Callable[[Mapping[str, object]], ModelConfig]
    build: Callable[[ModelConfig, jnp.dtype, LinearFormat], CausalLM]
    tensor_name: Callable[[ParamPath], str]


def _llama_tensor_name(path: ParamPath) -> str:
    """("layers", 0, "mlp", "weight") -> "model.layers.0.mlp.weight"; the head has no prefix."""
    name = ".".join(map(str, path))
    return name if path[0] == "lm_head" else f"model.{name}"


ARCHITECTURES: Mapping[str, ModelFamily] = {
    name: ModelFamily(parse=ModelConfig.from_dict, build=CausalLM, tensor_name=_llama_tensor_name)
    for name in FAMILIES
}


def family_of(architecture: str) -> ModelFamily:
    """The registry's entry; raises UnknownArchitecture."""
    if architecture not in ARCHITECTURES:
        raise UnknownArchitecture(architecture, tuple(ARCHITECTURES))
    return ARCHITECTURES[architecture]
