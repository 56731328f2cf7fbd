"""ServedModel: everything that the engine needs of one model, whether it was loaded from a checkpoint or
built by hand (tests, toys).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from penstock.runtime.config import MOST_TEXT_CHARS, MOST_TEXT_TOKENS, EngineConfig, resolve
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend, check_required, most_devices
from penstock.runtime.execution.draft_model import DraftModel
from penstock.runtime.execution.kv_sizing import check_max_model_len
from penstock.runtime.execution.on_mesh import cut_sharding
from penstock.runtime.execution.runner_config import check_end_tokens
from penstock.runtime.images.reader import Processor
from penstock.runtime.images.vision import Vision
from penstock.runtime.loading.checkpoint import (
    Placement,
    check_tensors,
    config_for_tensors,
    load_leaves,
    read_config,
)
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.gguf.file import is_gguf
from penstock.runtime.loading.gguf.model import read_model
from penstock.runtime.loading.hub import DEMO, DEMO_DIRECTORY, DEMO_TEXT, DEMO_TOKENS_PER_ROW, resolve_model
from penstock.runtime.loading.image_processors import find_processor, find_written_token
from penstock.runtime.loading.own_rules import own_devices, own_rules, own_shapes, rules_of_leaves
from penstock.runtime.loading.pooling import (
    read_answer_tokens,
    read_most_tokens,
    read_pooling,
    with_projections,
)
from penstock.runtime.loading.quantised.checkpoint import find_weights, format_for, without_empty_biases
from penstock.runtime.machine import host_memory
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.models.adapted import AdaptedModel
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.eagle import EagleConfig
from penstock.runtime.models.cutting import cut_for, sizes_that_work
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import LoadRules, ParamPath, RulesFor, Tensor
from penstock.runtime.models.params import (
    abstract_model,
    adapted_model,
    leaf_shapes,
    load_rules,
    model_dtype,
    state_of,
)
from penstock.runtime.models.stages import Stage, home_of, stages_of
from penstock.runtime.models.vision.encoders import vision_of
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.requests.reader import Reader
from penstock.runtime.requests.request import Pooling
from penstock.runtime.requests.sampling import GenerationDefaults, read_generation_defaults
from penstock.runtime.text.codec import TextCodec

_log = logging.getLogger(__name__)


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
    tokens_per_row: int | None = None
    """How many tokens of each row the KV cache of a CPU has room for where nobody says its size; None: the
    whole context."""
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    text: TextCodec | None
    skips_padding: bool = False
    """Whether padding tokens cost almost nothing, as with native kernels."""
    is_native: bool = False
    """Whether native kernels compute the layers and the head, see `CausalLM.is_native`."""
    rules: LoadRules | None = None
    """What the model makes of the tensors of an update; None: it takes no updates."""
    rules_for: RulesFor | None = None
    """The same for an update whose tensors have these names, which may begin otherwise; None: the names are
    those of `rules`."""
    directory: Path | None = None
    """Where its files lie; None: it has none."""
    hidden_size: int
    """How many numbers a hidden state has, and an embedding; behind projections those of an embedding."""
    pooling: Pooling = Pooling.LAST_TOKEN
    """What an embedding is made of where a request does not say it."""
    answer_token_ids: tuple[int, int] | None = None
    """The tokens that mean yes and no; None: its files name none."""
    reader: Reader | None = None
    """What it is, if it generates nothing; None: it generates."""
    vision: Vision | None = None
    """What it makes of images; None: it reads none."""
    image_processor: Processor | None = None
    """Makes images ready for it; None: it reads none, or its files do not say how."""
    adapted: AdaptedModel | None = None
    """What adapters may change of it; None: the engine is made without them."""
    draft: DraftModel | None = None
    """What guesses on the device what it makes; None: there is nothing."""
    lookup_tokens: NDArray[np.int32] | None = None
    """The tokens of `EngineConfig.lookup_text`; None: there is none."""
    stages: tuple[Stage, ...] = ()
    """The stages into which its layers are cut, with each leaf on devices of the first one that has it; ():
    they are not cut. In a process that has one of them, `weights` has shapes in place of the leaves of the
    others."""

    @property
    def whole_cache(self) -> CacheSpec:
        """What the model and its draft keep."""
        return self.cache if self.draft is None else self.cache.followed_by(self.draft.cache)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What each stage keeps; of a model without stages, what `whole_cache` says."""
        return tuple(stage.cache for stage in self.stages) or (self.whole_cache,)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """All that the files of a checkpoint say, except for the values of its weights."""

    config: ModelConfig
    """For the context that is served."""
    dtype: np.dtype[np.generic]
    """Of parameters and activations."""
    linear: LinearFormat
    rules: LoadRules
    tensors: Mapping[str, Tensor]
    stored: str
    """How the files have the weights: format, and the types of matrices."""
    text: TextCodec | None
    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    pooling: Pooling
    answer_token_ids: tuple[int, int] | None
    most_tokens: int | None
    """The length at which an encoder's texts are usually cut, though it has more positions; None: none is
    told."""
    vision: Vision | None
    image_processor: Processor | None

    @property
    def max_length(self) -> int:
        """The most tokens that the model can take."""
        return self.config.max_position_embeddings

    @property
    def usual_length(self) -> int:
        """The most tokens of a text where the operator says nothing."""
        return min(self.max_length, self.most_tokens or self.max_length)


def with_mesh_size(config: EngineConfig, model: str, devices: Sequence[jax.Device]) -> EngineConfig:
    """Return the options with a number as `tensor_parallel_size`; `model` and the ConfigErrors are those of
    `load_model`.
    """
    if config.tensor_parallel_size is not None:
        return config
    size, most = 1, most_devices(devices)
    if most > 1:
        model_config = _config_of(resolve_model(model))
        sizes = sizes_that_work(model_config, expert_parallel=config.expert_parallel)
        size = max(n for n in sizes if n <= most)
        _log.info("tensor_parallel_size: the model is cut over %d of %d devices", size, most)
    return dataclasses.replace(config, tensor_parallel_size=size)


def _config_of(path: Path) -> ModelConfig:
    return read_model(path).config if is_gguf(path) else read_config(path)


def read_checkpoint(
    directory: Path, options: EngineConfig, backend: Backend, *, heads: bool = False
) -> CheckpointFacts:
    """Read all files of a checkpoint, of the weights' only the headers. `directory` may be a GGUF file, which
    has everything. heads: it may be that of an EAGLE head. A server starts with this function, and `penstock
    check` calls it, so that both refuse the same: UnknownArchitecture, CheckpointError and ConfigError say
    what is wrong, and in which file. Only values of weights beyond the range of the dtype are found later.
    """
    gguf = read_model(directory, options.generation_config) if is_gguf(directory) else None
    config = gguf.config if gguf else read_config(directory, heads=heads)
    check_max_model_len(options, config.max_position_embeddings)
    tensors: Mapping[str, Tensor] = gguf.tensors if gguf else find_weights(directory)
    config, projecting = with_projections(config_for_tensors(config, tensors, directory), directory)
    tensors = {**tensors, **projecting}
    config = served_config(config, options)
    if config.predicts and gguf:
        raise ConfigError("speculation: heads of a GGUF file are not read")
    dtype = model_dtype(config, options.dtype)
    check_required(options, backend, dtype)
    config.cache.laid_out(backend.lanes).check_dtype(options.kv_cache_dtype)
    usual = backend.linear_format(dtype, options.quantization, is_encoder=config.encoder is not None)
    linear = format_for(usual, tensors, partial(load_rules, config, dtype))
    rules = load_rules(config, dtype, linear)
    tensors = without_empty_biases(tensors, rules)
    check_tensors(rules, tensors, where=f"checkpoint {directory}")
    text = gguf.text if gguf else TextCodec.find(directory)
    eos_token_ids = end_tokens(config.eos_token_ids, text, config.vocab_size)
    check_end_tokens(eos_token_ids)
    defaults = gguf.defaults if gguf else read_generation_defaults(directory, options.generation_config)
    vision, processor = None, None
    if config.vision is not None:
        vision = vision_of(config.vision)
        tokens = resolve(options, backend.sizes, defaults=defaults).max_image_tokens
        processor = find_processor(directory, config.vision, tokens)
        if processor is not None:
            written = find_written_token(directory, config.vision)
            vision = dataclasses.replace(vision, written_token_id=written)
    return CheckpointFacts(
        config=config,
        dtype=dtype,
        linear=linear,
        rules=rules,
        tensors=tensors,
        stored=gguf.stored if gguf else f"safetensors: {', '.join(_stored_types(tensors))}",
        text=text,
        defaults=defaults,
        eos_token_ids=eos_token_ids,
        pooling=read_pooling(directory, Pooling.LAST_TOKEN if config.encoder is None else Pooling.MEAN),
        answer_token_ids=read_answer_tokens(directory, config.vocab_size),
        most_tokens=None if config.encoder is None else read_most_tokens(directory),
        vision=vision,
        image_processor=processor,
    )


def served_config(config: ModelConfig, options: EngineConfig) -> ModelConfig:
    """Return the model as each device computes it, for the context that is served, with the layer that
    predicts further tokens where that is to guess. ConfigError: see `cut`, and where there is no such layer.
    """
    check_max_model_len(options, config.max_position_embeddings)
    if options.speculation == "heads":
        config = _with_heads(config, options)
    config = cut_for(config, options, options.tensor_parallel_size or 1)
    return config.for_context(options.max_model_len or config.max_position_embeddings)


def _with_heads(config: ModelConfig, options: EngineConfig) -> ModelConfig:
    """Return the model with its heads. ConfigError if it has none, or cannot have them here."""
    if config.predictor is None:
        raise ConfigError(
            f"speculation: {config.architecture} has no heads here: the checkpoint must have exactly one "
            "layer that predicts, and the family must be one whose heads are read, see docs/models.md"
        )
    if options.context_parallel:
        raise ConfigError(
            "speculation: heads do not go with context_parallel, which deals the pages of latents"
        )
    if config.cache.windows[0] is not None:
        raise ConfigError(
            f"speculation: all layers of {config.architecture} have a sliding window, so pages behind it are "
            "given back, which heads would need"
        )
    return dataclasses.replace(config, predicts=True)


def _heads(config: ModelConfig) -> DraftModel | None:
    """Return the heads of a model that has them."""
    if not config.predicts:
        return None
    return DraftModel(
        name=f"the heads of {config.architecture}",
        graphdef=None,
        weights=None,
        cache=config.predictor_cache,
        vocab_size=config.vocab_size,
    )


def load_model(model: str, config: EngineConfig, backend: Backend) -> ServedModel:
    """Load "demo", a checkpoint directory, a GGUF file or a hub id onto the backend's devices, with a bar
    that shows progress.

    Raises ConfigError (unknown architecture, bad config or checkpoint, a hub that cannot be reached), which
    says what to do.
    """
    directory = resolve_model(model)
    facts = read_checkpoint(directory, config, backend)
    read = None if config.draft_model is None else read_draft(config.draft_model, facts, config, backend)
    adapted = adapted_of(facts.config, facts.dtype, facts.linear, config)  # refused before weights are read
    lookup_tokens = None if config.lookup_text is None else read_lookup_text(config.lookup_text, facts.text)
    draft = None
    if read is not None:
        home = cut_sharding(backend.mesh)
        draft = _draft_of(read, _load_own(read.directory, read.facts, config, backend, home), facts.config)
    stages = stages_of(facts.config, config.pipeline_parallel_size)
    leaves: Mapping[Any, Any]
    if backend.own_stage is None:
        leaves = _load_own(directory, facts, config, backend, partial(_home, stages, backend))
    else:
        place, own_stage = cut_sharding(backend.mesh), stages[backend.own_stage]
        shapes = placed_shapes(facts.config, facts.dtype, facts.linear, backend.mesh)
        leaves = {**shapes, **_load_own(directory, facts, config, backend, place, own_stage)}
    served = _served(model, directory, config, facts, leaves, adapted, draft)
    return dataclasses.replace(served, stages=stages, lookup_tokens=lookup_tokens)


def read_lookup_text(name: str, text: TextCodec | None) -> NDArray[np.int32]:
    """Read the tokens of a text in which a lookup is to find what outputs repeat: a file, or "demo".
    ConfigError if it cannot be read, or has too many or none.
    """
    if text is None:
        raise ConfigError("lookup_text: the model has no tokenizer, which would make tokens of it")
    try:
        file = DEMO_TEXT if name == DEMO else Path(name).expanduser()
        with file.open(encoding="utf-8") as opened:
            written = opened.read(MOST_TEXT_CHARS + 1)
    except (OSError, ValueError, RuntimeError) as error:  # the latter two: no path, and no such user's home
        raise ConfigError(f"lookup_text: {name} cannot be read: {error}") from error
    if not written:
        raise ConfigError(f"lookup_text: {name} is empty")
    if len(written) > MOST_TEXT_CHARS:
        raise ConfigError(f"lookup_text: {name} has more than {MOST_TEXT_CHARS} characters")
    tokens = np.array(text.encode(written, add_special_tokens=False), np.int32)
    if len(tokens) > MOST_TEXT_TOKENS:
        raise ConfigError(
            f"lookup_text: {name} has {len(tokens)} tokens, and at most {MOST_TEXT_TOKENS} are read"
        )
    return tokens


def _load_own(
    directory: Path,
    facts: CheckpointFacts,
    config: EngineConfig,
    backend: Backend,
    placement: Placement,
    stage: Stage | None = None,
) -> Mapping[Any, Any]:
    """Load what the devices of this process have of a checkpoint's leaves: of all of them, or of those of one
    stage.
    """
    own, devices = own_devices(backend.mesh), backend.mesh.size
    rules = own_rules(facts.rules, own, devices)
    leaves = load_leaves(
        directory,
        rules if stage is None else rules_of_leaves(rules, stage.has),
        facts.tensors,
        own_shapes(leaf_shapes(facts.config, facts.dtype, facts.linear), own, devices),
        placement=placement,
        progress=config.show_progress,
        threads=config.threads or available_processors(),
    )
    host_memory.give_back()
    return leaves


def _home(stages: tuple[Stage, ...], backend: Backend, path: ParamPath) -> NamedSharding:
    """Tell where the leaf at this path is loaded to."""
    return cut_sharding(backend.stages[home_of(stages, path)] if stages else backend.mesh)


def shapes_of_model(model: str, config: EngineConfig, backend: Backend) -> ServedModel:
    """Return the model that `load_model` would load, with shapes in place of its weights, of which only the
    headers are read. The same holds for its draft. The backend's devices need not be there. Raises as
    `load_model` does.
    """
    directory = resolve_model(model)
    facts = read_checkpoint(directory, config, backend)
    read = None if config.draft_model is None else read_draft(config.draft_model, facts, config, backend)

    def shapes(facts: CheckpointFacts) -> Mapping[Any, Any]:
        return placed_shapes(facts.config, facts.dtype, facts.linear, backend.mesh)

    draft = None if read is None else _draft_of(read, shapes(read.facts), facts.config)
    adapted = adapted_of(facts.config, facts.dtype, facts.linear, config)
    return _served(model, directory, config, facts, shapes(facts), adapted, draft)


def placed_shapes(
    config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat, mesh: jax.sharding.Mesh
) -> dict[ParamPath, jax.ShapeDtypeStruct]:
    """Return the shapes of a model's leaves of all devices together, with their places on the mesh."""
    sharding = cut_sharding(mesh)
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for path, leaf in leaf_shapes(config, dtype, linear).items()
    }


def _served(
    model: str,
    directory: Path,
    config: EngineConfig,
    facts: CheckpointFacts,
    leaves: Mapping[Any, Any],
    adapted: AdaptedModel | None,
    draft: DraftModel | None,
) -> ServedModel:
    graphdef, shapes = abstract_model(facts.config, facts.dtype, facts.linear)
    return ServedModel(
        name=config.served_model_name or (model if not Path(model).exists() else directory.resolve().name),
        architecture=facts.config.architecture,
        graphdef=graphdef,
        weights=state_of(facts.config, leaves, facts.dtype, facts.linear),
        cache=facts.config.cache,
        dtype=facts.dtype,
        vocab_size=facts.config.vocab_size,
        max_model_len=facts.usual_length if config.max_model_len is None else facts.max_length,
        tokens_per_row=DEMO_TOKENS_PER_ROW if directory == DEMO_DIRECTORY else None,
        eos_token_ids=facts.eos_token_ids,
        defaults=facts.defaults,
        text=facts.text,
        skips_padding=facts.linear.packed and facts.config.encoder is None,
        is_native=nnx.merge(graphdef, shapes).is_native,
        rules=facts.rules,
        rules_for=partial(_rules_for, facts.config, facts.dtype, facts.linear, facts.rules),
        directory=None if is_gguf(directory) else directory,
        vision=facts.vision,
        image_processor=facts.image_processor,
        hidden_size=facts.config.embedding_size,
        pooling=facts.pooling,
        answer_token_ids=facts.answer_token_ids,
        reader=reader_of(facts.config),
        adapted=adapted,
        draft=draft or _heads(facts.config),
    )


def adapted_of(
    config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat, options: EngineConfig
) -> AdaptedModel | None:
    """Return what adapters may change; None if none are asked for. ConfigError where the model cannot have
    any, or cannot have its experts changed.
    """
    if not options.max_adapters:
        return None
    if config.encoder is not None:
        raise ConfigError("max_adapters: this model takes no adapters")
    adapted = adapted_model(config, dtype, linear, experts=options.adapter_experts)
    adapted.check_experts()
    return adapted


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """What the files of a draft model say."""

    name: str
    directory: Path
    facts: CheckpointFacts


def read_draft(name: str, target: CheckpointFacts, options: EngineConfig, backend: Backend) -> DraftFacts:
    """Read all files of a draft model as `read_checkpoint` does, for a model with these facts. ConfigError,
    which begins with the name of the option, if it cannot be that model's draft.
    """
    if options.context_parallel:
        raise ConfigError(
            f"draft_model: {name}: does not go with context_parallel, which deals the pages of one model"
        )
    own = dataclasses.replace(
        options,
        dtype=np.dtype(target.dtype).name,
        max_model_len=options.max_model_len or target.usual_length,
        expert_parallel=False,  # a draft may have no experts; those of one that has some are cut
        max_adapters=0,
        adapter_experts=False,
        adapter_dir=None,
        generation_config=None,
    )
    try:
        directory = resolve_model(name)
        if problem := _why_no_target(target.config):
            raise ConfigError(problem)
        facts = read_checkpoint(directory, own, backend, heads=True)
        if problem := why_no_draft(facts.config, target.config) or _why_other_tokens(facts, target):
            raise ConfigError(problem)
    except ConfigError as error:
        raise ConfigError(f"draft_model: {name}: {error}") from error
    return DraftFacts(name=name, directory=directory, facts=facts)


def why_no_draft(model: ModelConfig, target: ModelConfig) -> str:
    """Say why a model cannot be the draft of another one, by their sizes; empty if it can."""
    if problem := _why_no_target(target):
        return problem
    if not model.generates:
        return "it generates nothing"
    if model.cache.has_state:
        return "it has a recurrent state, which cannot go back to where a guess was wrong"
    if model.eagle is not None:
        return _why_no_head(model, model.eagle, target)
    return "" if model.vision is None else "it reads images, which a draft does not get"


def _why_no_target(target: ModelConfig) -> str:
    """Say why a model takes no draft; empty if it does."""
    if not target.generates:
        return "the model that is served generates nothing"
    if not target.cache.paged:
        return "the model that is served has no layers that attend, whose pages a draft could have"
    if target.cache.windows[0] is not None:
        return (
            "all layers of the model that is served have a sliding window, so pages behind it are given back"
        )
    if target.vision is not None:
        return "the model that is served reads images, which a draft does not get"
    return ""


def _why_no_head(model: ModelConfig, eagle: EagleConfig, target: ModelConfig) -> str:
    """Say why an EAGLE head cannot be that of this model; empty if it can."""
    taps = eagle.taps_of(target.num_layers)
    ours, theirs = eagle.target_hidden_size, target.hidden_size
    if ours != theirs:
        return f"it reads hidden states of {ours} numbers, and those of {target.architecture} have {theirs}"
    if model.vocab_size != target.vocab_size:
        return f"it knows {model.vocab_size} tokens, and {target.architecture} {target.vocab_size}"
    if not 0 <= taps[0] < taps[1] < taps[2] <= target.num_layers:
        found = ", ".join(map(str, taps))
        return f"it reads what layers {found} read, and {target.architecture} has {target.num_layers}"
    if eagle.has_embeddings:
        return ""
    if model.hidden_size != theirs:
        return f"it has no embeddings, and those of {target.architecture} have {theirs} numbers"
    if target.embedding_scale != 1.0 or target.embed_norm or target.positions_from is not None:
        return f"it has no embeddings, and {target.architecture} changes its own before they are read"
    return ""


def _why_other_tokens(facts: CheckpointFacts, target: CheckpointFacts) -> str:
    """Say whether a draft has other tokens than its target, in words; empty if not. An EAGLE head has no
    tokenizer, and says which of its target's tokens its own are.
    """
    if facts.config.eagle is not None:
        if not facts.config.eagle.maps_tokens:
            return ""
        shift = facts.tensors["d2t"]
        found = np.arange(shift.shape[0]) + shift[0 : shift.shape[0]]
        is_known = bool(((found >= 0) & (found < target.config.vocab_size)).all())
        return "" if is_known else f"d2t: it names tokens that {target.config.architecture} has not"
    ours, theirs = _vocabulary(facts.text), _vocabulary(target.text)
    if ours is None or theirs is None:
        same = ours is theirs and facts.config.vocab_size == target.config.vocab_size
    else:
        size = min(facts.config.vocab_size, target.config.vocab_size)
        same = _below(ours, size) == _below(theirs, size)
    return "" if same else "its tokenizer is another one: a draft has the tokens of the model that is served"


def _vocabulary(text: TextCodec | None) -> dict[str, int] | None:
    """Map tokens to ids; None where that is not known."""
    if text is None or text.backend is None:
        return None
    return text.backend.get_vocab(with_added_tokens=True)


def _below(vocabulary: Mapping[str, int], size: int) -> dict[str, int]:
    return {token: i for token, i in vocabulary.items() if i < size}


def _draft_of(read: DraftFacts, leaves: Mapping[Any, Any], target: ModelConfig) -> DraftModel:
    """Make a draft for this target of its leaves, which may be shapes."""
    facts, eagle = read.facts, read.facts.config.eagle
    graphdef, _ = abstract_model(facts.config, facts.dtype, facts.linear)
    return DraftModel(
        name=read.name,
        graphdef=graphdef,
        weights=state_of(facts.config, leaves, facts.dtype, facts.linear),
        cache=facts.config.cache,
        vocab_size=facts.config.vocab_size,
        taps=() if eagle is None else eagle.taps_of(target.num_layers),
    )


def reader_of(config: ModelConfig) -> Reader | None:
    """Return what the engine must know of a model that generates nothing; None for one that does."""
    if config.generates:
        return None
    encoder, classifier = config.encoder, config.classifier
    return Reader(
        kind="a classifier" if classifier is not None else "an encoder",
        reads_whole=encoder is not None,
        token_types=1 if encoder is None else max(encoder.token_types, 1),
        classes=None if classifier is None else classifier.classes,
        has_projections=encoder is not None and bool(encoder.projections),
    )


def _rules_for(
    config: ModelConfig,
    dtype: np.dtype[np.generic],
    linear: LinearFormat,
    rules: LoadRules,
    names: Collection[str],
) -> LoadRules:
    """Return the rules for tensors of these names, which are read as those of a checkpoint are."""
    found = config.names.found_in(names)
    if found == config.names:
        return rules
    return load_rules(dataclasses.replace(config, names=found), dtype, linear)


def end_tokens(configured: tuple[int, ...], text: TextCodec | None, vocab_size: int) -> tuple[int, ...]:
    """Return the model's end tokens: those of its configuration, and then those that its tokenizer or its
    chat template shows besides, as far as the model can write them.
    """
    shown = frozenset[int]() if text is None else text.end_token_ids
    return (*configured, *sorted(i for i in shown - frozenset(configured) if i < vocab_size))


def _stored_types(tensors: Mapping[str, Tensor]) -> list[str]:
    """List the names of the dtypes of tensors, that of most values first."""
    values: dict[str, int] = {}
    for tensor in tensors.values():
        name = name_of(tensor.dtype)
        values[name] = values.get(name, 0) + math.prod(tensor.shape)
    return sorted(values, key=lambda name: -values[name])
