"""Says whether a checkpoint would serve, and how much memory it would take, without loading its weights. Of a
config.json alone it says the latter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from penstock.runtime.config import EngineConfig, ResolvedConfig, resolve
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend, check_required, lacking_kernels
from penstock.runtime.execution.kv_sizing import plan_kv
from penstock.runtime.loading.hub import DEMO_DIRECTORY, DEMO_TOKENS_PER_ROW
from penstock.runtime.loading.quantised.checkpoint import format_for
from penstock.runtime.loading.quantised.config import without_quantisation
from penstock.runtime.loading.quantised.layers import QuantisedWeight
from penstock.runtime.loading.served_model import (
    CheckpointFacts,
    adapted_of,
    read_checkpoint,
    read_draft,
    reader_of,
    served_config,
)
from penstock.runtime.model_files import read_json_object
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import pack_code_rows
from penstock.runtime.models.params import (
    abstract_model,
    leaf_shapes,
    load_rules,
    model_dtype,
)
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.stages import stages_of
from penstock.runtime.ops.cache_spec import CacheSpec, cache_dtype
from penstock.runtime.requests.reader import Reader
from penstock.runtime.scheduling.pages import window_pages
from penstock.runtime.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """The weights of a checkpoint that have one form of quantisation."""

    form: str
    """What it is, for people."""
    is_kept: bool
    """Whether their codes are kept in memory; else they are made floats, and served as those are."""
    num_weights: int
    num_parameters: int
    """Numbers in these weights."""
    num_bytes: int
    """What they take in the files, with scales and all else."""

    @property
    def bits_per_parameter(self) -> float:
        """Bits in the files for each number."""
        return 8 * self.num_bytes / self.num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """What each device of a stage holds, of a model whose layers are cut into stages."""

    begin: int
    """Its first layer."""
    end: int
    """The layer behind its last one."""
    weight_bytes: int
    page_bytes: int
    """Of a page of KV in its layers."""
    state_bytes: int
    """Of the state of a request in its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint that would serve, or a config.json whose model would take so much memory."""

    architecture: str
    dtype: np.dtype[np.generic]
    """Of parameters and activations."""
    kv_dtype: np.dtype[np.generic]
    """Of the KV cache."""
    num_layers: int
    num_parameters: int
    """Numbers in the tensors that are read."""
    quantised: tuple[QuantisedForm, ...] = ()
    """The weights that are quantised in the files."""
    has_weights: bool
    """Whether there is a checkpoint, and not a config.json alone."""
    devices: int
    """Over how many devices it would be cut. All bytes are those of one of them, or of one of each stage."""
    stages: tuple[StageSizes, ...] = ()
    """What each stage takes, if its layers would be cut into stages."""
    weight_bytes: int
    """Of the weights as they lie in memory."""
    stored: str
    """How the files have the weights: format, and the types of matrices."""
    is_packed: bool
    """Whether weights are packed for the native kernels."""
    is_native: bool
    """Whether the native kernels compute the layers and the head."""
    max_model_len: int
    cache: CacheSpec
    page_size: int
    eos_token_ids: tuple[int, ...]
    text: TextCodec | None
    """Its tokenizer and chat template; None if it has none."""
    served_cache_bytes: int | None
    """Of the KV cache and state with which a server starts by default; None where that depends on the memory
    of an accelerator, or cannot hold the context that was asked for."""
    sampling_bytes: int
    """Of what a server keeps for penalties and biases."""
    reader: Reader | None = None
    """What the model is, if it generates nothing; None: it generates."""
    kernels_dtype: np.dtype[np.generic] | None = None
    """The dtype that native kernels would compute, if they compute none of this model for its dtype alone."""
    adapter_bytes: int = 0
    """Of the places for LoRA adapters, if there are some."""
    draft_bytes: int = 0
    """Of the weights of a draft model, if there is one. `cache` is that of both then."""
    image_token_bytes: int = 0
    """Bytes of the pool of embeddings for each token of an image; 0: it reads no images."""
    has_image_processor: bool = False
    """Whether its files say how images are made ready for it; without that no prompt can have one."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of KV in all layers."""
        return self.cache.page_bytes(self.page_size, self.kv_dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for each token of a request, in the layers that keep all tokens."""
        return (
            sum(
                layer.page_bytes(self.page_size, self.kv_dtype)
                for layer in self.cache.paged
                if layer.window is None
            )
            // self.page_size
        )

    @property
    def window_bytes(self) -> dict[int, int]:
        """Sliding window to the bytes of KV for each token in the layers that keep only such a window."""
        found: dict[int, int] = {}
        for layer in self.cache.paged:
            if layer.window is not None:
                per_token = layer.page_bytes(self.page_size, self.kv_dtype) // self.page_size
                found[layer.window] = found.get(layer.window, 0) + per_token
        return found

    def request_bytes(self, num_tokens: int) -> int:
        """Count the bytes of KV and state for a request that has computed this many tokens. A layer with a
        window holds the pages that the scheduler lets a request hold there while it generates.
        """
        total = self.cache.slot_bytes
        for layer in self.cache.paged:
            pages = -(-num_tokens // self.page_size)
            if layer.window is not None:
                pages = min(pages, window_pages(layer.window, self.page_size))
            total += pages * layer.page_bytes(self.page_size, self.kv_dtype)
        return total


def inspect_checkpoint(directory: Path, options: EngineConfig, backend: Backend) -> Inspection:
    """Read all files of a checkpoint, of the weights' only the headers, as `read_checkpoint`, whose errors it
    raises.
    """
    facts = read_checkpoint(directory, options, backend)
    config = facts.config
    draft = None
    if options.draft_model is not None:
        draft = read_draft(options.draft_model, facts, options, backend).facts
    found = _inspection(config, facts.dtype, facts.linear, options, backend)
    cache = found.cache
    if draft is not None:
        cache = config.cache.followed_by(draft.config.cache).laid_out(backend.lanes)
    kv_dtype = cache_dtype(options.kv_cache_dtype, facts.dtype)
    resolved = resolve(options, backend.sizes, defaults=facts.defaults)
    return replace(
        found,
        num_parameters=sum(math.prod(tensor.shape) for tensor in facts.rules.tensors),
        max_model_len=options.max_model_len or facts.usual_length,
        has_weights=True,
        quantised=_forms(facts),
        stored=facts.stored,
        eos_token_ids=facts.eos_token_ids,
        text=facts.text,
        served_cache_bytes=None
        if backend.memory() is not None
        else _served_cache_bytes(directory, config, cache, resolved, backend.kv_storage_dtype(kv_dtype)),
        cache=cache,
        draft_bytes=0
        if draft is None
        else _bytes_on_one(leaf_shapes(draft.config, draft.dtype, draft.linear).values(), draft.config),
        sampling_bytes=8 * resolved.feature_slots * config.vocab_size,
        kernels_dtype=lacking_kernels(options.dtype, facts.dtype, backend),
        has_image_processor=facts.image_processor is not None,
    )


def _whole_cache(config: ModelConfig) -> CacheSpec:
    """Return what the model keeps, and its heads, where these are to guess."""
    return config.cache.followed_by(config.predictor_cache) if config.predicts else config.cache


def inspect_config(file: Path, options: EngineConfig, backend: Backend) -> Inspection:
    """Read a config.json alone. Raises ConfigError and UnknownArchitecture."""
    if options.draft_model is not None:
        raise ConfigError("draft_model: needs the whole checkpoint of the model that is served")
    config = parse_config(without_quantisation(read_json_object(file)))
    config = served_config(config, options)
    dtype = model_dtype(config, options.dtype)
    check_required(options, backend, dtype)
    config.cache.laid_out(backend.lanes).check_dtype(options.kv_cache_dtype)
    usual = backend.linear_format(dtype, options.quantization, is_encoder=config.encoder is not None)
    linear = format_for(usual, {}, partial(load_rules, config, dtype))
    return _inspection(config, dtype, linear, options, backend)


def _inspection(
    config: ModelConfig,
    dtype: np.dtype[np.generic],
    linear: LinearFormat,
    options: EngineConfig,
    backend: Backend,
) -> Inspection:
    """Return what a model's config says."""
    vision = config.vision
    graphdef, shapes = abstract_model(config, dtype, linear)
    leaves = leaf_shapes(config, dtype, linear)
    kv_dtype = cache_dtype(options.kv_cache_dtype, dtype)
    stages = tuple(
        StageSizes(
            begin=stage.begin,
            end=stage.end,
            weight_bytes=_bytes_on_one([leaves[path] for path in leaves if stage.has(path)], config),
            page_bytes=stage.cache.laid_out(backend.lanes).page_bytes(options.page_size, kv_dtype),
            state_bytes=stage.cache.slot_bytes,
        )
        for stage in stages_of(config, options.pipeline_parallel_size)
    )
    whole = config.whole or config
    padding = nnx.merge(*abstract_model(whole, dtype)).padding
    numbers = sum(math.prod(leaf.shape) for leaf in leaf_shapes(whole, dtype).values())
    return Inspection(
        architecture=config.architecture,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_layers=config.num_layers,
        num_parameters=numbers - sum(between.size for between in padding),
        has_weights=False,
        devices=config.devices,
        weight_bytes=sum(stage.weight_bytes for stage in stages) or _bytes_on_one(leaves.values(), config),
        stages=stages,
        stored="no weights: a config.json alone",
        is_packed=linear.packed,
        is_native=nnx.merge(graphdef, shapes).is_native,
        max_model_len=options.max_model_len or config.max_position_embeddings,
        cache=_whole_cache(config).laid_out(backend.lanes),
        reader=reader_of(config),
        page_size=options.page_size,
        eos_token_ids=config.eos_token_ids,
        text=None,
        served_cache_bytes=None,
        sampling_bytes=0,
        adapter_bytes=_adapter_bytes(config, dtype, linear, options),
        image_token_bytes=0 if vision is None else vision.out_size * vision.num_outputs * dtype.itemsize,
    )


def _adapter_bytes(
    config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat, options: EngineConfig
) -> int:
    """Count the bytes of the places for adapters. ConfigError: see `adapted_of`."""
    adapted = adapted_of(config, dtype, linear, options)
    if adapted is None:
        return 0
    return (options.max_adapters + 1) * adapted.size * options.max_adapter_rank * dtype.itemsize


def _served_cache_bytes(
    directory: Path,
    model: ModelConfig,
    cache: CacheSpec,
    config: ResolvedConfig,
    kv_dtype: np.dtype[np.generic],
) -> int | None:
    """Count the bytes of the cache that an engine on the CPU makes with these options; None if its default
    size cannot hold the context that they ask for.
    """
    rows = config.max_num_seqs
    groups = cache.groups(config.page_size, kv_dtype)
    try:
        plan = plan_kv(
            config,
            model_max_len=model.max_position_embeddings,
            groups=groups,
            state_bytes=cache.slot_bytes * rows,
            snapshot_bytes=cache.snapshot_bytes,
            tokens_per_row=DEMO_TOKENS_PER_ROW if directory == DEMO_DIRECTORY else None,
            device_bytes=None,
        )
    except ConfigError:
        return None
    pages = sum(num * group.page_bytes for num, group in zip(plan.num_pages, groups, strict=True))
    return pages + cache.state_bytes(rows, plan.num_snapshots)


def _forms(facts: CheckpointFacts) -> tuple[QuantisedForm, ...]:
    """List the forms of quantised weights, those with most numbers first."""
    forms = dict(facts.linear.kept)
    in_codes = [
        (rule, forms.get(rule.targets[0].path, facts.linear.codes))
        for rule in facts.rules.rules
        if rule.put is pack_code_rows
    ]
    kept = {
        source.name
        for rule, form in in_codes
        if form is not None and (own := rule.kept_form(facts.tensors)) is not None and form.takes(own)
        for source in rule.sources
    }
    by_form: dict[tuple[str, bool], list[QuantisedWeight]] = {}
    for name, tensor in facts.tensors.items():
        if isinstance(tensor, QuantisedWeight):
            by_form.setdefault((tensor.form, name in kept), []).append(tensor)
    found = [
        QuantisedForm(
            form,
            is_kept,
            len(weights),
            sum(math.prod(weight.shape) for weight in weights),
            sum(weight.num_bytes for weight in weights),
        )
        for (form, is_kept), weights in by_form.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.num_parameters))


def _bytes_on_one(leaves: Iterable[jax.ShapeDtypeStruct], config: ModelConfig) -> int:
    """Count the bytes that one of the devices has of these leaves."""
    return sum(map(_num_bytes, leaves)) // config.devices


def _num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return int(math.prod(leaf.shape) * leaf.dtype.itemsize)
