"""ServedModel: everything that the engine needs of one model, whether it was loaded from a checkpoint or
built by hand (tests, toys).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import UnsupportedFeature
from penstock.runtime.execution.backend import Backend, check_required
from penstock.runtime.host import host_memory
from penstock.runtime.host.processors import available_processors
from penstock.runtime.loading.checkpoint import load_config, load_weights, stage_named
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.loading.leaves import NewLeaf
from penstock.runtime.models.load_rules import ParamPath, TensorSpec
from penstock.runtime.models.params import abstract_model, load_rules, model_dtype
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.requests.sampling_defaults import GenerationDefaults, read_generation_defaults
from penstock.runtime.text.codec import TextCodec

Tensors = Mapping[str, NDArray[Any]]
Renewal = Callable[[Any], Any]
"""Takes the weights that serve when an update's turn comes, and returns those that shall serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model on its devices. `graphdef` and `weights` are the halves of nnx.split; for what a model must
    compute, see `penstock.runtime.execution.step_programs.StepModel`.
    """

    name: str
    architecture: str
    graphdef: nnx.GraphDef[Any]
    weights: Any
    cache: CacheSpec
    dtype: np.dtype[Any]
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    text: TextCodec | None
    skips_padding: bool = False
    """Whether padding tokens cost almost nothing, as with native kernels."""
    is_native: bool = False
    """Whether native kernels compute the layers and the head, see `CausalLM.is_native`."""
    tensors: Sequence[TensorSpec] = ()
    """The tensors that an update consists of."""
    stage: Callable[[Any, Tensors, bool], Renewal] | None = None
    """Takes (current weights, tensors by checkpoint name, partial), puts the new weights on the device, and
    returns what will bring them in. Raises CheckpointError naming every bad tensor. None: the model takes no
    updates."""

    def staged(self, weights: Any, tensors: Tensors, partial: bool) -> Renewal:
        """Makes new weights from named tensors, beside those that serve, which are not changed. Raises
        UnsupportedFeature if the model takes no updates, and CheckpointError naming every bad tensor.
        """
        if self.stage is None:
            raise UnsupportedFeature(["UpdateWeights"])
        return self.stage(weights, tensors, partial)


def load_model(model: str, config: EngineConfig, backend: Backend) -> ServedModel:
    """Loads "demo", a checkpoint directory or a hub id onto the backend's devices, with a progress bar.

    Raises ConfigError (unknown architecture, bad config or checkpoint, a hub that cannot be reached), which
    says what to do.
    """
    directory = resolve_model(model)
    model_config = load_config(directory)
    dtype = model_dtype(model_config, config.dtype)
    check_required(config, backend, dtype)
    linear = backend.linear_format(dtype, int8=config.quantization == "int8")
    text = TextCodec.find(directory)
    defaults = read_generation_defaults(directory, config.generation_config)
    threads = config.threads or available_processors()
    weights = load_weights(
        directory,
        model_config,
        dtype,
        linear=linear,
        placement=NamedSharding(backend.mesh, PartitionSpec()),
        progress=config.show_progress,
        threads=threads,
    )
    host_memory.give_back()
    graphdef, shapes = abstract_model(model_config, dtype, linear)

    def stage(current: Any, tensors: Tensors, partial: bool) -> Renewal:
        seen = _by_path(current)
        new = stage_named(
            model_config,
            tensors,
            seen,
            partial=partial,
            dtype=dtype,
            linear=linear,
            threads=max(1, threads // 2),  # the other half computes steps meanwhile
        )
        host_memory.give_back()
        backend.use_huge_pages(
            [leaf.value for leaf in new.values()]
        )  # most is there already, see `host_memory`
        return _renewal(seen, new)

    return ServedModel(
        name=config.served_model_name or (model if not Path(model).exists() else directory.resolve().name),
        architecture=model_config.architecture,
        graphdef=graphdef,
        weights=weights,
        cache=model_config.cache,
        dtype=dtype,
        vocab_size=model_config.vocab_size,
        max_model_len=model_config.max_position_embeddings,
        eos_token_ids=model_config.eos_token_ids,
        defaults=defaults,
        text=text,
        skips_padding=linear.packed,
        is_native=nnx.merge(graphdef, shapes).is_native,
        tensors=load_rules(model_config, dtype, linear).tensors,
        stage=stage,
    )


def _by_path(weights: Any) -> dict[ParamPath, jax.Array]:
    paths = [cast("ParamPath", path) for path, _ in nnx.to_flat_state(weights)]
    return dict(zip(paths, jax.tree.leaves(weights), strict=True))


def _renewal(seen: Mapping[ParamPath, jax.Array], new: Mapping[ParamPath, NewLeaf]) -> Renewal:
    """Replaces leaves of the weights by the new ones, which were made when the weights were `seen`.

    An update that was staged before this one may go live in between, and what it changed must stay changed.
    This matters if only parts of a leaf are new: then the leaf is made again, from the live one.
    """
    seen = {path: seen[path] for path, leaf in new.items() if leaf.parts is not None}

    def renew(live: Any) -> Any:
        leaves = _by_path(live)
        for path, leaf in new.items():
            is_stale = leaf.parts is not None and leaves[path] is not seen[path]
            leaves[path] = _merged(leaves[path], leaf) if is_stale else leaf.value
        return jax.tree.unflatten(jax.tree.structure(live), list(leaves.values()))

    return renew


def _merged(live: jax.Array, new: NewLeaf) -> jax.Array:
    """The live leaf with the new parts. It is made on the host, because nothing may be compiled while
    requests run.
    """
    merged = host_memory.zeros(live.shape, live.dtype)
    merged[...] = np.asarray(live)
    for part in new.parts or ():
        merged[part] = np.asarray(new.value)[part]
    placed: jax.Array = jax.device_put(merged, live.sharding)
    return placed
