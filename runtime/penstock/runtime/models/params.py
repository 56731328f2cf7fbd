"""A model's parameters without their values: the abstract state, the rules by which a checkpoint fills it,
and the flat form for compiled programs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.models.adapted import AdaptedModel, adapted_layers, adds_natively, expert_layers
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import USUAL, TensorNames
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.layers.experts import StackedLinear
from penstock.runtime.models.linear import PLAIN, Linear, LinearFormat
from penstock.runtime.models.load_rules import (
    HasLoadRules,
    LoadRule,
    LoadRules,
    ParamPath,
    Source,
    Stored,
    StoredAt,
)
from penstock.runtime.models.registry import family_of
from penstock.runtime.models.rule_checks import check

ModelState: TypeAlias = nnx.State[Any, Any]

_ROTARY_CONSTANT = r"(^|\.)rotary_emb\.inv_freq$"
"""Old checkpoints of any family store this constant; config.json decides it."""
MOST_FURTHER_LAYERS = 16
"""How many layers behind the last one a checkpoint may have; known ones have up to three."""


def model_dtype(config: ModelConfig, dtype: npt.DTypeLike | None = None) -> np.dtype[np.generic]:
    """Return `dtype` or, for None and "auto", the checkpoint's own (float32 if config.json names none)."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        dtype = config.dtype or "float32"
    return jnp.dtype(dtype)


def abstract_model(
    config: ModelConfig, dtype: npt.DTypeLike | None = None, linear: LinearFormat = PLAIN
) -> tuple[nnx.GraphDef[CausalLM], ModelState]:
    """Build the model's structure, without memory for weights: (graphdef, state of ShapeDtypeStructs)."""
    return _abstract_model(config, model_dtype(config, dtype), linear)


@functools.lru_cache(maxsize=8)
def _abstract_model(
    config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat
) -> tuple[nnx.GraphDef[CausalLM], ModelState]:
    if not linear.kept:
        build = functools.partial(family_of(config.architecture).build, config, dtype, linear)
        return nnx.split(nnx.eval_shape(lambda: cast(CausalLM, build())))  # or an Encoder
    # Whoever has found out what can be kept has built the model without it, which takes longest.
    graphdef, state = _abstract_model(config, dtype, replace(linear, kept=()))
    forms = dict(linear.kept)

    def keep(state: ModelState) -> CausalLM:  # or an Encoder
        model = nnx.merge(graphdef, state)
        for path, module in nnx.iter_modules(model):
            if (form := forms.get((*cast(ParamPath, path), "weight"))) is not None:
                assert isinstance(module, Linear | StackedLinear), "no other module keeps codes"
                module.keep(form)
            elif isinstance(module, Linear):
                of_parts = {part: forms.get((*cast(ParamPath, path), part)) for part, _ in module.parts}
                if found := {part: form for part, form in of_parts.items() if form is not None}:
                    module.keep_apart(found)
        return model

    return nnx.split(nnx.eval_shape(keep, state))


def load_rules(
    config: ModelConfig, dtype: npt.DTypeLike | None = None, linear: LinearFormat = PLAIN
) -> LoadRules:
    """Return what the model makes of its checkpoint. ValueError if the rules of its modules do not fill it
    exactly.
    """
    return _load_rules(config, model_dtype(config, dtype), linear)


@functools.lru_cache(maxsize=8)
def _load_rules(config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat) -> LoadRules:
    family = family_of(config.architecture)
    model = nnx.merge(*_abstract_model(config, dtype, linear))
    stored = _with_projections(_spelled(_with_predictor(family, config), config.names), config)
    listed = [
        rule
        for path, module in nnx.iter_modules(model)
        if isinstance(module, HasLoadRules)
        for rule in module.load_rules(cast(ParamPath, path), dtype, stored)
    ]
    of_one = LoadRules(
        rules=tuple(rule for _, rule in sorted(listed, key=lambda entry: entry[0])),
        padding=model.padding,
        harmless=(
            _ROTARY_CONSTANT,
            *family.harmless,
            *(_further_layers(config) if family.further_layers else ()),
        ),
        copies={
            config.names.spelled(copy): config.names.spelled(other)
            for copy, other in family.copies(config).items()
        },
        folders=() if config.encoder is None else tuple(each.folder for each in config.encoder.projections),
    )
    rules = of_one if config.devices == 1 else of_one.on_devices(config.devices)
    check(rules, leaf_shapes(config, dtype, linear))
    return rules


def one_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """Return a model of this layer alone, with next to no embeddings: for computing a model layer by layer.
    Layers with equal configs have one program then.
    """
    alone = replace(config.layers[layer], shares_kv_of=None)
    return replace(config, layers=(alone,), vocab_size=1, tie_word_embeddings=True, vision=None)


def rules_of_layer(
    config: ModelConfig, layer: int, dtype: npt.DTypeLike | None = None, linear: LinearFormat = PLAIN
) -> dict[ParamPath, LoadRule]:
    """Return what `one_layer` makes of the tensors that the checkpoint of the whole model has for this layer,
    by the path in `one_layer` that each would have if nothing were fused.
    """
    dtype = model_dtype(config, dtype)
    model = nnx.merge(*_abstract_model(one_layer(config, layer), dtype, linear))
    whole = _spelled(family_of(config.architecture).stored(config), config.names)

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        return whole(("layers", layer, *path[2:]), shape)

    return {
        of_tensor: rule
        for path, module in nnx.iter_modules(model)
        if path[:1] == ("layers",) and isinstance(module, HasLoadRules)
        for of_tensor, rule in module.load_rules(cast(ParamPath, path), dtype, stored)
    }


def adapted_model(
    config: ModelConfig,
    dtype: npt.DTypeLike | None = None,
    linear: LinearFormat = PLAIN,
    *,
    experts: bool = False,
) -> AdaptedModel:
    """Return what adapters may change of the model; experts: of its experts, too."""
    dtype = model_dtype(config, dtype)
    model = nnx.merge(*_abstract_model(config, dtype, linear))
    stored = _spelled(family_of(config.architecture).stored(config.whole or config), config.names)
    is_native = model.is_native and adds_natively(model)
    layers = adapted_layers(model, dtype, stored, config.devices, experts=experts)
    stacks = expert_layers(model, dtype, stored, layers) if experts else {}
    return AdaptedModel(
        layers, stacks, model.adapter_sizes, experts, dtype, is_native=is_native, devices=config.devices
    )


def _spelled(stored: StoredAt, names: TensorNames) -> StoredAt:
    """Return the same places, under the names that the checkpoint has."""

    def there(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        usual = stored(path, shape)
        sources = tuple(replace(source, name=names.spelled(source.name)) for source in usual.sources)
        return replace(usual, sources=sources)

    return stored if names == USUAL else there


def _with_predictor(family: ModelFamily, config: ModelConfig) -> StoredAt:
    """Tell where the family has the parameters, and those of the predictor: the layer's own where those of a
    further layer would be, and all of it in that layer or where `ModelFamily.predictor` says.
    """
    whole = config.whole or config
    if whole.predictor is None or not config.predicts:
        return family.stored(whole)
    usual, layer = family.stored(replace(whole, layers=(*whole.layers, whole.predictor))), len(whole.layers)
    further = f"model.layers.{layer}"
    begins = family.predictor or {"block": further, "norm": f"{further}.shared_head.norm"}

    def there(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[0] != "predictor":
            return usual(path, shape)
        part, rest = str(path[1]), path[2:]
        begin = begins.get(part, f"{further}.{part}")
        if part != "block":
            source = Source(".".join((begin, *map(str, rest))), shape)
            swaps = family.hidden_first and part == "eh_proj"
            return Stored((source,), _with_halves_swapped if swaps else None)
        found = usual(("layers", layer, *rest), shape)
        sources = (replace(each, name=begin + each.name.removeprefix(further)) for each in found.sources)
        return replace(found, sources=tuple(sources))

    return there


def _with_halves_swapped(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return rows with the second half of their values before the first."""
    (values,) = rows
    return np.roll(values, values.shape[1] // 2, axis=1)


def _with_projections(stored: StoredAt, config: ModelConfig) -> StoredAt:
    """Return the same places, and those of the layers behind the pooling, whose folder begins the tensors'
    names.
    """
    projections = () if config.encoder is None else config.encoder.projections

    def there(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[0] != "projections":
            return stored(path, shape)
        folder = projections[int(path[1])].folder
        return Stored((Source(f"{folder}.linear.{path[-1]}", shape),))

    return there if projections else stored


def _further_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return a pattern that the names of tensors match which belong to layers behind the last one."""
    count = len(config.layers)
    numbers = "|".join(map(str, range(count, count + MOST_FURTHER_LAYERS)))
    return (rf"^{re.escape(config.names.decoder)}layers\.({numbers})\.",)


def leaf_shapes(
    config: ModelConfig, dtype: npt.DTypeLike | None = None, linear: LinearFormat = PLAIN
) -> dict[ParamPath, jax.ShapeDtypeStruct]:
    """Map paths to leaves of the state, in the state's order. The leaves of a model that is cut over devices
    have an axis more, the first one, with an entry for each device.
    """
    leaves = _flat(config, model_dtype(config, dtype), linear)
    before = () if config.devices == 1 else (config.devices,)
    return {
        cast(ParamPath, path): jax.ShapeDtypeStruct((*before, *leaf.shape), leaf.dtype)
        for path, leaf in leaves
    }


def _flat(config: ModelConfig, dtype: np.dtype[np.generic], linear: LinearFormat) -> Any:
    return nnx.to_flat_state(_abstract_model(config, dtype, linear)[1])


def state_of(
    config: ModelConfig,
    values: Mapping[ParamPath, jax.Array],
    dtype: npt.DTypeLike | None = None,
    linear: LinearFormat = PLAIN,
) -> ModelState:
    """Return the state with these leaves; a KeyError names a path that is absent."""
    structure = jax.tree.structure(abstract_model(config, dtype, linear)[1])
    state: ModelState = jax.tree.unflatten(
        structure, [values[path] for path, _ in _flat(config, model_dtype(config, dtype), linear)]
    )
    return state


def state_to_leaves(state: ModelState) -> tuple[jax.Array, ...]:
    """Return the arrays of a state as a flat tuple, the cheapest form to pass to a compiled program."""
    return tuple(jax.tree.leaves(state))


def bind(
    config: ModelConfig,
    leaves: Sequence[jax.Array],
    dtype: npt.DTypeLike | None = None,
    linear: LinearFormat = PLAIN,
) -> CausalLM:
    """Return the model with these weights, to be called as `bind(config, leaves)(token_ids, positions, kv,
    meta)` inside jax.jit.
    """
    graphdef, state = abstract_model(config, dtype, linear)
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))


def random_state(
    config: ModelConfig,
    dtype: npt.DTypeLike | None = None,
    seed: int = 0,
    std: float = 0.02,
    linear: LinearFormat = PLAIN,
) -> ModelState:
    """Draw weights from N(0, std), with norms of one and biases of zero: for tests and benches without a
    checkpoint.
    """
    generator = np.random.default_rng(seed)
    leaves = {
        path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaf_shapes(config, dtype, linear).items()
    }
    tensors: dict[str, npt.NDArray[Any]] = {}
    for rule in load_rules(config, dtype, linear).rules:
        tensors = {
            source.name: tensors[source.name] if source.name in tensors else _random(source, generator, std)
            for source in rule.sources
        }
        rule.fill(leaves, tensors, 0, rule.num_rows)
    return state_of(config, {path: jnp.asarray(leaf) for path, leaf in leaves.items()}, dtype, linear)


def _random(source: Source, generator: np.random.Generator, std: float) -> npt.NDArray[np.float32]:
    if len(source.shape) > 1:
        return generator.standard_normal(source.shape, np.float32) * np.float32(std)
    return np.full(source.shape, 0.0 if source.name.endswith(".bias") else 1.0, np.float32)
