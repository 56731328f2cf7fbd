"""Reads LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

A field of the config that changes the computation is honoured or refused by name. Nothing of a tensor's size
is allocated before its shape is known to be right. Patterns are regular expressions of whoever wrote the
adapter, so only those are taken that match any name quickly.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.adapters.interface import AdapterTensors
from penstock.runtime.adapters.packing import Packer, Part, Tensors
from penstock.runtime.errors import AdapterFormatError, ConfigError
from penstock.runtime.loading.dtypes import DTYPES
from penstock.runtime.loading.safetensors_files import header_of
from penstock.runtime.models.adapted import AdaptedModel, ExpertLayers
from penstock.runtime.ops.native.hashing import digest_of_values
from penstock.runtime.ops.native.linear import BLOCK_OUT
from penstock.runtime.requests.adapter import AdapterWeights
from penstock.runtime.sent_tensors import SentTensor

CONFIG_NAME: Final = "adapter_config.json"
TENSORS_NAME: Final = "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 2**20
_MOST_PATTERN_CHARS = 1000
_MOST_REPEATS = 4
"""Most quantifiers of a pattern. With so many, and none behind a group, a name of 100 characters is matched
or not within milliseconds."""
_MOST_CHOICES = 1000
"""In how many ways alternatives of a pattern can be combined, at most: each may have to be tried."""
_HONOURED = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
        *("layers_to_transform", "exclude_modules", "bias", "init_lora_weights", "fan_in_fan_out"),
        "target_parameters",
    )
)
_HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config"),
        *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
    )
)
"""Fields that say how the adapter was made, or what does not concern one that is finished."""
_OF_OTHER_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that change the model's own weights, so that the adapter fits no others."""
_ROOTS = ("model.", "model.language_model.", "language_model.model.", "model.model.", "transformer.", "")
"""What the names of a decoder's layers may begin with."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What adapter_config.json says, as far as it changes the computation."""

    rank: int
    alpha: float
    use_rslora: bool
    ranks: tuple[tuple[str, int], ...]
    """Patterns, each with its rank."""
    alphas: tuple[tuple[str, float], ...]
    """Patterns, each with its alpha."""
    modules: tuple[str, ...]
    """The ends of the names of layers of which some must be changed, each."""
    parameters: tuple[str, ...]
    """The ends of the names of parameters that are changed and belong to no linear layer: those that stack
    experts."""

    def rank_of(self, name: str) -> int:
        """Return the rank of a layer."""
        return int(_by_pattern(self.ranks, name, self.rank))

    def scaling_of(self, name: str) -> float:
        """Return by what the product of a layer's matrices is multiplied."""
        rank, alpha = self.rank_of(name), float(_by_pattern(self.alphas, name, self.alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(fields: Mapping[str, Any]) -> LoraConfig:
    """Check what adapter_config.json holds. Raises AdapterFormatError, which names the field."""
    if fields.get("peft_type", "LORA") != "LORA":
        raise _of_field("peft_type", f"{fields['peft_type']!r} is not LORA")
    for name, value in fields.items():
        if name not in _HONOURED | _HARMLESS and value not in (None, False, 0, "", [], {}):
            raise _of_field(str(name)[:100], "is not supported")
    if fields.get("bias", "none") != "none":
        raise _of_field("bias", "trained biases are not supported")
    begun = fields.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower().startswith(_OF_OTHER_WEIGHTS):
        raise _of_field("init_lora_weights", f"{begun[:50]!r} changes the model's own weights")
    _check_targets(fields)
    rslora = fields.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise _of_field("use_rslora", "must be true or false")
    return LoraConfig(
        rank=_rank("r", fields.get("r", 8)),
        alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
        use_rslora=rslora,
        ranks=_patterns(fields, "rank_pattern", _rank),
        alphas=_patterns(fields, "alpha_pattern", _number),
        modules=tuple(targets) if isinstance(targets := fields.get("target_modules"), list) else (),
        parameters=tuple(fields.get("target_parameters") or ()),
    )


def _check_targets(fields: Mapping[str, Any]) -> None:
    """Check only the form of what names the targets, as the tensors say which layers are changed."""
    for name in ("target_modules", "exclude_modules"):
        value = fields.get(name)
        if isinstance(value, str) or value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _of_field(name, "must be a text or a list of texts")
    value = fields.get("target_parameters") or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _of_field("target_parameters", "must be a list of texts")
    value = fields.get("layers_to_transform")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) for each in listed):
        raise _of_field("layers_to_transform", "must be a number or a list of numbers")


def _patterns(
    fields: Mapping[str, Any], name: str, read: Callable[[str, object], Any]
) -> tuple[tuple[str, Any], ...]:
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > 1000:
        raise _of_field(name, "must map at most 1,000 patterns")
    for pattern in found:
        _check_pattern(name, pattern)
    return tuple((pattern, read(name, value)) for pattern, value in found.items())


def _check_pattern(field: str, pattern: str) -> None:
    """Refuse what is no regular expression, or may take long to match."""
    repeats = re.sub(r"\\.", "", pattern)  # without characters that stand for themselves
    may_take_long = re.search(r"\)[*+?{]|\{", repeats) or len(re.findall(r"[*+?]", repeats)) > _MOST_REPEATS
    may_take_long = may_take_long or _num_choices(repeats) > _MOST_CHOICES
    if len(pattern) > _MOST_PATTERN_CHARS or may_take_long or re.search(r"\(\?|\\[1-9]", pattern):
        raise _of_field(field, f"the pattern {pattern[:100]!r} is too long or too costly to match")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _of_field(field, f"{pattern[:100]!r} is no regular expression: {error}") from error


def _num_choices(pattern: str) -> int:
    """Count in how many ways the alternatives of a pattern can be combined, at most."""
    product, bars = 1, [0]
    for char in pattern:
        if char == "(":
            bars.append(0)
        elif char == "|":
            bars[-1] += 1
        elif char == ")" and len(bars) > 1:
            product *= bars.pop() + 1
    return product * math.prod(count + 1 for count in bars)


def _by_pattern(found: Iterable[tuple[str, float]], name: str, default: float) -> float:
    """Return what the first pattern says that the end of the name matches, as PEFT has it."""
    for pattern, value in found:
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _rank(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _of_field(field, f"a rank must be a number above 0, not {str(value)[:50]}")
    return value


def _number(field: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise _of_field(field, f"must be a finite number, not {str(value)[:50]}")
    return number


def _of_field(field: str, message: str) -> AdapterFormatError:
    return AdapterFormatError(message, field=field)


@dataclass(frozen=True, slots=True)
class _Half:
    """Which matrix of which layer a tensor is."""

    layer: str
    """The layer's name in the model's checkpoint; or that of a parameter which stacks experts."""
    is_b: bool
    experts: ExpertLayers = ()
    """The layers of such a parameter, see `AdaptedModel.stacks`."""

    @property
    def layers(self) -> ExpertLayers:
        """The layers that it changes, by expert; or that layer alone."""
        return self.experts or ((self.layer,),)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of the tensors of an adapter, whatever their numbers are."""

    packer: Packer
    rank: int
    scaling: float
    targets: tuple[str, ...]


_Described: TypeAlias = tuple[str, tuple[int, ...], np.dtype[Any]]
"""The name, the shape and the dtype of a tensor."""
_MOST_PLANS = 4
"""How many plans are kept. One for a mixture of experts has ten thousands of parts."""


class AdapterReader:
    """Makes adapters of one model ready for the device."""

    def __init__(self, model: AdaptedModel, rank: int) -> None:
        """`rank`: the largest that an adapter may have."""
        self._model, self._rank = model, rank
        self._by_rest: dict[str, str] = {}
        for name in model.layers:
            root = next(root for root in sorted(_ROOTS, key=len, reverse=True) if name.startswith(root))
            self._by_rest[name.removeprefix(root)] = name
        # Adapters of one trainer differ in nothing but their numbers, and a layer's name takes some time.
        self._planned = functools.lru_cache(_MOST_PLANS)(self._checked)

    def read(self, source: Path | AdapterTensors) -> AdapterWeights:
        """Read an adapter and check it. AdapterFormatError names the first tensor or field that is wrong, and
        not where the folder lies: whoever names an adapter in a request may see it.
        """
        if isinstance(source, AdapterTensors):
            given = [(name, np.asarray(each)) for name, each in source.tensors]
            plan = self._plan(source.config, ((name, each.shape, each.dtype) for name, each in given))
            return self._made(plan, Tensors.in_memory(dict(given)))
        try:
            with (source / TENSORS_NAME).open("rb") as file:
                before = os.fstat(file.fileno())
                config = _read_json(source / CONFIG_NAME)
                entries = header_of(source / TENSORS_NAME, file.fileno())
                plan = self._plan(config, ((name, each.shape, each.dtype) for name, each in entries.items()))
                weights = self._made(plan, Tensors.in_file(file.fileno(), entries))
                after = os.stat(source / TENSORS_NAME)
                told = [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in (before, after)]
                if told[0] != told[1] or _read_json(source / CONFIG_NAME) != config:
                    raise AdapterFormatError("its folder was changed while it was read")
        except (OSError, ConfigError) as error:
            why = str(error).replace(f"{source}/", "")
            raise AdapterFormatError(f"its folder cannot be read as an adapter: {why}") from error
        return weights

    def check(self, config: Mapping[str, Any], tensors: Iterable[SentTensor]) -> None:
        """Check the names, shapes and dtypes of tensors whose values are still to come. config: what
        adapter_config.json holds. Raises AdapterFormatError as `read` does.
        """
        self._plan(config, ((each.name, each.shape, DTYPES[each.dtype]) for each in tensors))

    def _plan(self, fields: Mapping[str, Any], tensors: Iterable[_Described]) -> _Plan:
        """Check all that can be told from the config and the names, shapes and dtypes of tensors, and tell
        what becomes of them.
        """
        return self._planned(read_config(fields), tuple(tensors))

    def _checked(self, config: LoraConfig, tensors: tuple[_Described, ...]) -> _Plan:
        names, taken = dict[_Half, str](), set[tuple[str, bool]]()
        for name, shape, dtype in tensors:
            half = self._check(config, name, shape, dtype)
            # The layers of an expert may be named, and may be in a stack, which may have several names.
            matrices = {(layer, half.is_b) for expert in half.layers for layer in expert}
            if matrices & taken:
                raise AdapterFormatError("the layer has this matrix already", tensor=name)
            taken |= matrices
            names[half] = name
        if not names:
            raise AdapterFormatError("the adapter has no tensors")
        for half, name in names.items():
            if replace(half, is_b=not half.is_b) not in names:
                raise AdapterFormatError(f"the other matrix of {half.layer} is missing", tensor=name)
        layers = {half.layer for half in names}
        _check_complete(config, layers)
        model = self._model
        parts = [part for half, name in names.items() for part in self._parts(config, name, half)]
        described = {name: (shape, dtype) for name, shape, dtype in tensors}
        return _Plan(
            Packer(parts, described, model.devices, model.size * self._rank, model.dtype),
            rank=max(config.rank_of(layer) for layer in layers),
            scaling=max(config.scaling_of(layer) for layer in layers),
            targets=tuple(sorted({layer.rpartition(".")[2] for layer in layers})),
        )

    def _made(self, plan: _Plan, tensors: Tensors) -> AdapterWeights:
        values = plan.packer.pack(tensors)
        return AdapterWeights(
            values=values,
            digest=digest_of_values(values.whole()),
            rank=plan.rank,
            scaling=plan.scaling,
            targets=plan.targets,
        )

    def _parts(self, config: LoraConfig, name: str, half: _Half) -> Iterator[Part]:
        """Yield what becomes of a tensor. Of a stack of experts the layers of each lie side by side."""
        rank, scaling = config.rank_of(half.layer), config.scaling_of(half.layer) if half.is_b else 1.0
        for expert, layers in enumerate(half.layers):
            first = 0
            for layer in layers:
                found = self._model.layers[layer]
                for each in found.parts:
                    place = each.place
                    begin, width = (
                        (place.b_at(each.part), place.parts[each.part])
                        if half.is_b
                        else (place.a_at(each.part), self._rank)
                    )
                    if place.packed:
                        width = self._rank * (BLOCK_OUT if half.is_b else 2)
                    for piece in each.pieces:
                        yield Part(
                            tensor=name,
                            device=piece.device,
                            begin=begin * self._rank,
                            width=width,
                            is_b=half.is_b,
                            is_packed=place.packed,
                            rank=rank,
                            scaling=scaling,
                            taken=_behind(piece.outputs, first) if half.is_b else piece.inputs,
                            expert=expert,
                            num_experts=len(half.layers),
                        )
                first += found.out_size

    def _check(self, config: LoraConfig, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Half:
        """Tell which matrix a tensor is. AdapterFormatError if its name, shape or dtype cannot be right."""
        half = self._half(config, name)
        rank, columns = config.rank_of(half.layer), max(1, len(half.experts))
        side_by_side = [self._model.layers[each] for each in half.layers[0]]
        if rank > self._rank:
            message = f"its rank is {rank}, and the server takes at most {self._rank}"
            raise AdapterFormatError(message, tensor=name)
        out_size, in_size = sum(layer.out_size for layer in side_by_side), side_by_side[0].in_size
        wanted = (out_size, rank * columns) if half.is_b else (rank * columns, in_size)
        if tuple(shape) != wanted:
            message = f"its shape is {tuple(shape)}; with rank {rank} this model has {wanted}"
            raise AdapterFormatError(message, tensor=name)
        if dtype.name not in ("float16", "bfloat16", "float32"):
            raise AdapterFormatError(
                f"its dtype is {dtype}, and not float16, bfloat16 or float32", tensor=name
            )
        return half

    def _half(self, config: LoraConfig, name: str) -> _Half:
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        if match is None or len(name) > 500:
            message = "only matrices lora_A and lora_B of linear layers are supported"
            raise AdapterFormatError(message, tensor=name[:500])
        inner = match[1]
        for root in _ROOTS:
            rest = inner.removeprefix(root) if inner.startswith(root) else None
            if rest is not None and (layer := self._by_rest.get(rest)) is not None:
                return _Half(layer, match[2] == "B")
            if rest is not None and (stack := self._stack(config, inner, rest)) is not None:
                return _Half(stack[0], match[2] == "B", stack[1])
        message = "the model has no such layer, or none that an adapter may change"
        if self._model.has_experts and not self._model.takes_experts and ".experts" in inner:
            message = "the server was started without adapter_experts, so adapters change no experts"
        raise AdapterFormatError(message, tensor=name)

    def _stack(self, config: LoraConfig, inner: str, rest: str) -> tuple[str, ExpertLayers] | None:
        """Return the name and the layers of the parameter that PEFT wraps with these matrices, if it stacks
        experts. PEFT wraps the parameters of one module one around the other, in the order in which the
        module has them; so how often a name has ".base_layer" tells the parameter.
        """
        match = re.fullmatch(r"layers\.(\d{1,6})\.(?:\w+\.)?experts((?:\.base_layer)?)", rest)
        if match is None:
            return None
        module = inner.removesuffix(match[2])
        names = [f"{module}.{parameter}" for parameter in ("gate_up_proj", "down_proj")]
        wrapped = [name for name in names if _ends_in(name, config.parameters)]
        depth = 1 if match[2] else 0
        if depth >= len(wrapped):
            return None
        name = wrapped[-1 - depth]
        stack = self._model.stacks.get((int(match[1]), name.rpartition(".")[2]))
        return None if stack is None else (name, stack)


def _behind(outputs: slice | NDArray[np.intp], first: int) -> slice | NDArray[np.intp]:
    """Return the outputs of a layer, of which `first` others lie before them."""
    if isinstance(outputs, slice):
        return slice(first + outputs.start, first + outputs.stop)
    return first + outputs


def _ends_in(name: str, ends: Iterable[str]) -> bool:
    """Say whether a name is one of these, or ends in one after a dot."""
    return any(f".{name}".endswith(f".{end}") for end in ends)


def _check_complete(config: LoraConfig, layers: Collection[str]) -> None:
    """Raise AdapterFormatError if a name in `target_modules` or `target_parameters` has no tensors at all."""
    lacking = [end for end in config.parameters if not any(_ends_in(name, (end,)) for name in layers)]
    if lacking:
        raise _of_field("target_parameters", f"there are no tensors for {', '.join(lacking)[:200]}")
    lacking = sorted(end for end in config.modules if not any(_ends_in(name, (end,)) for name in layers))
    if lacking:
        raise _of_field("target_modules", f"there are no tensors for {', '.join(lacking)[:200]}")


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(_MOST_CONFIG_BYTES + 1)
    if len(text) > _MOST_CONFIG_BYTES:
        raise AdapterFormatError(f"{path.name} has more than {_MOST_CONFIG_BYTES} bytes")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterFormatError(f"{path.name} holds no object")
    return fields
