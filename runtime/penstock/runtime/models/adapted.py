"""Which layers of a model adapters may change: every linear layer of the decoder but head and embeddings,
and latent attention's kv_b_proj. Experts, routers and encoders of pictures keep what they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.models.layers.latent import HeadProducts, LatentAttention
from penstock.runtime.models.linear import Embedding, Linear
from penstock.runtime.models.load_rules import LoadRule, ParamPath, StoredAt
from penstock.runtime.ops.adapters import AdapterPlace


def place_adapters(layers: Iterable[nnx.Module]) -> int:
    """Give the linear layers of a decoder their places in the pool of adapters. Returns how many units all of
    them take.
    """
    size = 0

    def take(in_size: int, parts: tuple[int, ...]) -> AdapterPlace:
        nonlocal size
        place = AdapterPlace(size, in_size, parts)
        size += place.size
        return place

    for layer in layers:
        for _, module in nnx.iter_modules(layer):
            if isinstance(module, Linear) and not isinstance(module, Embedding):
                module.adapter_at = take(module.in_size, tuple(size for _, size in module.parts))
            elif isinstance(module, LatentAttention):
                config = module.config
                outputs = config.num_heads * (config.nope_dim + config.value_dim)
                place = take(config.latent_dim, (outputs,))
                module.key_up.adapter_at = module.value_up.adapter_at = place
    return size


@dataclass(frozen=True, slots=True)
class AdaptedPiece:
    """What one device has of a part of a layer of the checkpoint."""

    outputs: npt.NDArray[np.intp]
    """Which of the layer's outputs are those of the part there, in its order."""
    inputs: slice
    """Which of the layer's inputs the device has. Where it has some, its product is a summand of the layer's,
    as that of the layer itself is."""


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """A part of a layer of the checkpoint, and where adapters have what changes it."""

    place: AdapterPlace
    part: int
    """Which of the place's parts it is."""
    pieces: tuple[AdaptedPiece, ...]
    """Those of each device, which all have the place."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer of the checkpoint, with its sizes there."""

    in_size: int
    out_size: int
    parts: tuple[AdaptedPart, ...]


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """What adapters may change of a model."""

    layers: Mapping[str, AdaptedLayer]
    """By their names in the checkpoint."""
    size: int
    """How many units of `rank` values an adapter takes on a device, see `AdapterPlace`."""
    dtype: np.dtype[Any]
    """The dtype in which they are computed."""
    is_native: bool
    """Whether native kernels compute all that adapters add."""
    devices: int = 1
    """Over how many devices the model is cut."""


def adds_natively(model: nnx.Module) -> bool:
    """Whether native kernels compute what adapters add, if they compute the model: XLA has kv_b_proj's."""
    return not any(isinstance(module, HeadProducts) for _, module in nnx.iter_modules(model))


def adapted_layers(
    model: Any, dtype: np.dtype[np.generic], stored: StoredAt, devices: int
) -> dict[str, AdaptedLayer]:
    """The layers that adapters may change, by their names in the checkpoint. `stored`: where it has the
    parameters of `model`, which is that of one of the devices. A layer of which a weight is made of several
    tensors is left out.
    """
    sizes: dict[str, tuple[int, int]] = {}
    parts: dict[str, list[AdaptedPart]] = {}
    for name, part, (out_size, in_size) in _parts(model, dtype, stored, devices):
        sizes[name] = out_size, in_size
        parts.setdefault(name, []).append(part)
    return {
        name: AdaptedLayer(in_size, out_size, tuple(parts[name]))
        for name, (out_size, in_size) in sizes.items()
    }


def _parts(
    model: Any, dtype: np.dtype[np.generic], stored: StoredAt, devices: int
) -> Iterator[tuple[str, AdaptedPart, tuple[int, int]]]:
    """(name of a layer of the checkpoint, a part of it, (its outputs, its inputs))."""
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, Linear | HeadProducts) or module.adapter_at is None:
            continue
        rules = [
            rule
            for tensor, rule in module.load_rules(cast(ParamPath, path), dtype, stored)
            if tensor[-1] == "weight"
        ]
        if isinstance(module, HeadProducts):
            if module.keys:  # both halves of kv_b_proj have one place
                name, (out_size, in_size) = _name_and_sizes(rules[0])
                own = out_size // devices  # of the heads of one device, which lie one behind the other
                pieces = tuple(
                    AdaptedPiece(np.arange(i * own, (i + 1) * own), slice(0, in_size)) for i in range(devices)
                )
                yield name, AdaptedPart(module.adapter_at, 0, pieces), (out_size, in_size)
            continue
        for part, rule in enumerate(rules):
            if rule.decode is None and len(rule.sources) == 1 and len(rule.sources[0].shape) == 2:
                name, shape = _name_and_sizes(rule)
                pieces = tuple(_piece(rule.on_device(i, devices)) for i in range(devices))
                yield name, AdaptedPart(module.adapter_at, part, pieces), shape


def _piece(rules: Sequence[LoadRule]) -> AdaptedPiece:
    """What a device has of a part whose rows these rules fill there, one behind the other."""
    outputs: list[npt.NDArray[np.intp]] = []
    for rule in rules:
        source = rule.sources[0]
        order = np.arange(rule.num_rows) if source.order is None else np.asarray(source.order)
        outputs.append(source.begin + order[: rule.num_rows])
    source = rules[0].sources[0]
    return AdaptedPiece(np.concatenate(outputs), source.columns or slice(0, source.num_columns))


def _name_and_sizes(rule: LoadRule) -> tuple[str, tuple[int, int]]:
    source = rule.sources[0]
    out_size, in_size = source.shape[source.axis], source.shape[1 - source.axis]
    return source.name.removesuffix(".weight"), (out_size, in_size)
