"""ServedModel: everything that the engine needs of one model, whether it was loaded from a checkpoint or
built by hand (tests, toys).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from penstock.runtime.config import EngineConfig
from penstock.runtime.execution.backend import Backend, check_required
from penstock.runtime.images.vision import Vision
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.loading.pooling import read_pooling
from penstock.runtime.machine import host_memory
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.models.configs.vision import VisionConfig
from penstock.runtime.models.load_rules import LoadRules
from penstock.runtime.models.params import abstract_model, load_rules, model_dtype
from penstock.runtime.models.vision.inputs import rotary_positions, vision_inputs
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.requests.request import Pooling
from penstock.runtime.requests.sampling import GenerationDefaults, read_generation_defaults
from penstock.runtime.text.codec import TextCodec


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
    rules: LoadRules | None = None
    """What the model makes of the tensors of an update; None: it takes no updates."""
    directory: Path | None = None
    """Where its files lie; None: it has none."""
    hidden_size: int
    """How many numbers a hidden state has."""
    pooling: Pooling = Pooling.LAST_TOKEN
    """What an embedding is made of where a request does not say it."""
    vision: Vision | None = None
    """What it makes of pictures; None: it reads none."""


def load_model(model: str, config: EngineConfig, backend: Backend) -> ServedModel:
    """Load "demo", a checkpoint directory or a hub id onto the backend's devices, with a progress bar.

    Raises ConfigError (unknown architecture, bad config or checkpoint, a hub that cannot be reached), which
    says what to do.
    """
    directory = resolve_model(model)
    model_config = load_config(directory)
    model_config = model_config.for_context(config.max_model_len or model_config.max_position_embeddings)
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
    return ServedModel(
        name=config.served_model_name or (model if not Path(model).exists() else directory.resolve().name),
        architecture=model_config.architecture,
        graphdef=graphdef,
        weights=weights,
        cache=model_config.cache,
        dtype=dtype,
        vocab_size=model_config.vocab_size,
        max_model_len=model_config.max_position_embeddings,
        eos_token_ids=end_tokens(model_config.eos_token_ids, text, model_config.vocab_size),
        defaults=defaults,
        text=text,
        skips_padding=linear.packed,
        is_native=nnx.merge(graphdef, shapes).is_native,
        rules=load_rules(model_config, dtype, linear),
        directory=directory,
        vision=None if model_config.vision is None else vision_of(model_config.vision),
        hidden_size=model_config.hidden_size,
        pooling=read_pooling(directory),
    )


def vision_of(config: VisionConfig) -> Vision:
    """What the engine must know of a model with this encoder of pictures."""
    return Vision(
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        patch_size=config.patch_size,
        merge_size=config.merge_size,
        temporal_patch_size=config.temporal_patch_size,
        patch_values=config.patch_features,
        inputs=partial(vision_inputs, config),
        rotary_positions=partial(rotary_positions, config),
    )


def end_tokens(configured: tuple[int, ...], text: TextCodec | None, vocab_size: int) -> tuple[int, ...]:
    """The model's end tokens: those of its configuration, and then those that its tokenizer or its chat
    template shows besides, as far as the model can write them.
    """
    shown = frozenset[int]() if text is None else text.end_token_ids
    return (*configured, *sorted(i for i in shown - frozenset(configured) if i < vocab_size))
