"""Which layers of a model adapters may change: every linear layer of the decoder but head and embeddings,
latent attention's kv_b_proj, and experts. Routers and encoders of images keep what they have.

The places of experts lie behind all others, because most of the room would be theirs: an engine that takes no
adapters of experts has a pool without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.layers.experts import ExpertStack, StackedLinear
from penstock.runtime.models.layers.latent import HeadProducts, LatentAttention
from penstock.runtime.models.linear import Embedding, Linear
from penstock.runtime.models.load_rules import LoadRule, ParamPath, Source, StoredAt
from penstock.runtime.ops.adapters import AdapterPlace


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """How many units of `rank` values an adapter takes on a device, see `AdapterPlace`."""

    without_experts: int
    with_experts: int

    def of(self, *, experts: bool) -> int:
        """Return the units of adapters that may change experts, or may not."""
        return self.with_experts if experts else self.without_experts


def place_adapters(layers: Iterable[nnx.Module]) -> AdapterSizes:
    """Give the linear layers of a decoder their places in the pool of adapters."""
    size, of_experts = 0, list[StackedLinear]()

    def take(
        in_size: int, parts: Iterable[int], num_experts: int = 1, *, packed: bool = False
    ) -> AdapterPlace:
        nonlocal size
        place = AdapterPlace(size, in_size, tuple(parts), num_experts, packed)
        size += place.size
        return place

    for layer in layers:
        for _, module in nnx.iter_modules(layer):
            if isinstance(module, ExpertStack):
                stacked = (module.gate_up_proj, module.down_proj)
                if module.is_shared:  # it is small, as other layers are
                    for each in stacked:
                        sizes = dict(each.parts).values()
                        each.adapter_at = take(each.in_size, sizes, packed=each.form.packed)
                elif not module.config.weigh_input:  # PEFT's releases disagree on the inputs of Llama 4's
                    of_experts += stacked
            if isinstance(module, Linear) and not isinstance(module, Embedding):
                sizes = dict(module.parts).values()
                module.adapter_at = take(module.in_size, sizes, packed=module.packed)
            elif isinstance(module, LatentAttention):
                config = module.config
                outputs = config.num_heads * (config.nope_dim + config.value_dim)
                place = take(config.latent_dim, (outputs,))
                module.key_up.adapter_at = module.value_up.adapter_at = place
    without_experts = size
    for each in of_experts:
        sizes = dict(each.parts).values()
        each.adapter_at = take(each.in_size, sizes, each.num_experts, packed=each.form.packed)
    return AdapterSizes(without_experts, size)


@dataclass(frozen=True, slots=True)
class AdaptedPiece:
    """What one device has of a part of a layer of the checkpoint."""

    device: int
    outputs: slice | npt.NDArray[np.intp]
    """Which of the layer's outputs are those of the part there, in its order. Neighbours are a
    slice: a mixture has ten thousands of such layers."""
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
    """Those of the devices that have some of it, all of them at the place."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer of the checkpoint, with its sizes there."""

    in_size: int
    out_size: int
    parts: tuple[AdaptedPart, ...]


ExpertLayers: TypeAlias = tuple[tuple[str, ...], ...]
"""For each expert the names of the layers whose outputs lie side by side in what transformers stacks."""


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """What adapters may change of a model."""

    layers: Mapping[str, AdaptedLayer]
    """By their names in the checkpoint. A layer of one of the experts that share a tensor there has the
    expert's number behind the name."""
    stacks: Mapping[tuple[int, str], ExpertLayers]
    """By the number of a decoder's layer, and by the name that transformers gives the parameter which stacks
    the layers of all experts, such as "down_proj"."""
    sizes: AdapterSizes
    takes_experts: bool
    """Whether adapters may change experts, so that `layers` and `stacks` have theirs."""
    dtype: np.dtype[Any]
    """The dtype in which they are computed."""
    is_native: bool
    """Whether native kernels compute all that adapters add."""
    devices: int = 1
    """Over how many devices the model is cut."""

    @property
    def size(self) -> int:
        """How many units an adapter takes on a device."""
        return self.sizes.of(experts=self.takes_experts)

    def check_experts(self) -> None:
        """Raise ConfigError if adapters are to change experts, and cannot."""
        if not self.takes_experts:
            return
        if not self.has_experts:
            raise ConfigError("adapter_experts: this model has no experts that adapters can change")
        if not any(
            part.place.begin >= self.sizes.without_experts
            for layer in self.layers.values()
            for part in layer.parts
        ):
            described = "adapters cannot change this model's experts as the checkpoint has them"
            raise ConfigError(f"adapter_experts: {described}")

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.sizes.with_experts > self.sizes.without_experts


def adds_natively(model: nnx.Module) -> bool:
    """Say whether native kernels compute what adapters add, if they compute the model: XLA has
    kv_b_proj's.
    """
    return not any(isinstance(module, HeadProducts) for _, module in nnx.iter_modules(model))


def adapted_layers(
    model: Any, dtype: np.dtype[np.generic], stored: StoredAt, devices: int, *, experts: bool
) -> dict[str, AdaptedLayer]:
    """Return the layers that adapters may change, by their names in the checkpoint. `stored`: where it has
    the parameters of `model`, which is that of one of the devices. experts: with those of experts. A layer of
    which a weight is made of several tensors is left out.
    """
    sizes: dict[str, tuple[int, int]] = {}
    parts: dict[str, list[AdaptedPart]] = {}
    for name, part, (out_size, in_size) in _parts(model, dtype, stored, devices, experts):
        sizes[name] = out_size, in_size
        parts.setdefault(name, []).append(part)
    return {
        name: AdaptedLayer(in_size, out_size, tuple(parts[name]))
        for name, (out_size, in_size) in sizes.items()
    }


def expert_layers(
    model: Any, dtype: np.dtype[np.generic], stored: StoredAt, layers: Mapping[str, AdaptedLayer]
) -> dict[tuple[int, str], ExpertLayers]:
    """Return what `AdaptedModel.stacks` has. layers: those that adapters may change."""
    stacks: dict[tuple[int, str], ExpertLayers] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, StackedLinear) and module.numbered and module.adapter_at is not None:
            named: dict[int, dict[str, None]] = {}  # the names of each expert, each once and in order
            for index, rule in enumerate(_weights_of(module, cast(ParamPath, path), dtype, stored)):
                own = index // len(module.parts)
                cut = rule.cut
                is_dealt = cut is not None and cut.along == "sources"
                of_devices = cut.sources if cut is not None and is_dealt else (rule.sources,)
                for device, (source, *_) in enumerate(of_devices):
                    named.setdefault(own + device * module.num_experts, {})[_name(source)] = None
            stack = tuple(tuple(named[expert]) for expert in sorted(named))
            if all(name in layers for names in stack for name in names):
                _, number, *_, last = cast(ParamPath, path)
                stacks[int(number), str(last)] = stack
    return stacks


def _weights_of(
    module: Linear | HeadProducts | StackedLinear,
    path: ParamPath,
    dtype: np.dtype[np.generic],
    stored: StoredAt,
) -> list[LoadRule]:
    return [rule for tensor, rule in module.load_rules(path, dtype, stored) if tensor[-1] == "weight"]


def _parts(
    model: Any, dtype: np.dtype[np.generic], stored: StoredAt, devices: int, experts: bool
) -> Iterator[tuple[str, AdaptedPart, tuple[int, int]]]:
    """Return (name of a layer of the checkpoint, a part of it, (its outputs, its inputs))."""
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, Linear | HeadProducts | StackedLinear) or module.adapter_at is None:
            continue
        if isinstance(module, StackedLinear) and module.numbered and not experts:
            continue
        rules, place = _weights_of(module, cast(ParamPath, path), dtype, stored), module.adapter_at
        if isinstance(module, HeadProducts):
            if module.keys:  # both halves of kv_b_proj have one place
                out_size, in_size = _sizes(rules[0])
                own = out_size // devices  # of the heads of one device, which lie one behind the other
                pieces = tuple(
                    AdaptedPiece(i, slice(i * own, (i + 1) * own), slice(0, in_size)) for i in range(devices)
                )
                yield _name(rules[0].sources[0]), AdaptedPart(place, 0, pieces), (out_size, in_size)
            continue
        for index, rule in enumerate(rules):
            if rule.decode is not None or len(rule.sources) != 1 or len(_shape(rule.sources[0])) != 2:
                continue
            if isinstance(module, StackedLinear) and module.numbered and not _is_named(rule.sources[0]):
                continue
            expert, part = divmod(index, len(module.parts))
            for device in range(devices):  # each may have another expert there
                own_rules = rule.on_device(device, devices)
                adapted = AdaptedPart(place.of_expert(expert), part, (_piece(own_rules, device),))
                yield _name(own_rules[0].sources[0]), adapted, _sizes(rule)


def _piece(rules: Sequence[LoadRule], device: int) -> AdaptedPiece:
    """Return what a device has of a part whose rows these rules fill there, one behind the other."""
    source = rules[0].sources[0]
    inputs = source.columns or slice(0, source.num_columns)
    if len(rules) == 1 and source.order is None:
        return AdaptedPiece(device, slice(source.begin, source.begin + rules[0].num_rows), inputs)
    outputs: list[npt.NDArray[np.intp]] = []
    for rule in rules:
        source = rule.sources[0]
        order = np.arange(rule.num_rows) if source.order is None else np.asarray(source.order)
        outputs.append(source.begin + order[: rule.num_rows])
    return AdaptedPiece(device, np.concatenate(outputs), inputs)


def _shape(source: Source) -> tuple[int, ...]:
    """Return the shape of the matrix that is read."""
    return source.shape[len(source.at) :]


def _is_named(source: Source) -> bool:
    """Say whether a layer of an expert has a name that PEFT can have for it. It has none for experts that
    transformers keeps in a module of another name, as Granite's.
    """
    return ".experts." in source.name


def _sizes(rule: LoadRule) -> tuple[int, int]:
    """Return (outputs, inputs) of a rule's layer."""
    source = rule.sources[0]
    shape = _shape(source)
    return shape[source.axis], shape[1 - source.axis]


def _name(source: Source) -> str:
    """Return the name of the layer that a source is the weight of; see `AdaptedModel.layers`."""
    return ".".join((source.name.removesuffix(".weight"), *map(str, source.at)))
