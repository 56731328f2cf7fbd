"""The tensors of a checkpoint's directory, where quantised weights read as floats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.quantised.config import Quantisation, read_quantisation
from penstock.runtime.loading.quantised.layers import Layer, QuantisedWeight
from penstock.runtime.loading.safetensors_files import TensorEntry, find_tensors, read_metadata
from penstock.runtime.model_files import read_json_object
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import CodedTensor, LoadRule, LoadRules, ParamPath, Tensor
from penstock.runtime.ops.codes import CodeForm, union

_log = logging.getLogger(__name__)
_MOST_TOLD = 10


def find_weights(directory: Path) -> dict[str, Tensor]:
    """Find every tensor of a checkpoint, as `find_tensors` does. A quantised layer, as config.json describes
    it, is one tensor, its weight in float32. Raises ConfigError.
    """
    file = directory / "config.json"
    config = read_json_object(file) if file.is_file() else {}
    quantisation = read_quantisation(directory, config)
    tensors = find_tensors(directory)
    if quantisation is None:
        return dict(tensors)
    for note in quantisation.notes:
        _log.warning("%s: %s", directory, note)
    found = as_floats(tensors, quantisation)
    # A file beside config.json may have been left there, and says nothing by itself.
    if quantisation.is_of_config and not any(
        isinstance(tensor, QuantisedWeight) for tensor in found.values()
    ):
        raise ConfigError(f"{file} says that layers are quantised ({quantisation.method}), but no tensor is")
    return found


def format_for(
    linear: LinearFormat, tensors: Mapping[str, Tensor], rules: Callable[[LinearFormat], LoadRules]
) -> LinearFormat:
    """Give the format in which weights lie in memory, where `linear` would be that of floats or of codes that
    are made of them. `rules`: those of the model by the format.

    Codes of the files are kept if the native kernels multiply the model's floats, each leaf in the smallest
    form that holds the codes of all its tensors. Leaves for which there is none are made floats. Where parts
    of a layer have codes of different kinds, such as q, k and v, they have leaves of their own.
    """
    if linear.codes is not None:
        kept = [tensor.kept for tensor in tensors.values() if isinstance(tensor, CodedTensor)]
        of_4_bits = [form for form in kept if form is not None and CodeForm(4, zeros=True).takes(form)]
        return replace(linear, codes=union([linear.codes, *of_4_bits]))
    if not linear.packed or linear.int8:
        return linear
    of_leaves: dict[ParamPath, list[LoadRule]] = {}
    for rule in rules(linear).rules:
        if rule.may_keep:
            of_leaves.setdefault(rule.targets[0].path, []).append(rule)
    found = (each for path, of_leaf in of_leaves.items() for each in _kept(path, of_leaf, tensors))
    return replace(linear, kept=tuple(found))


def _kept(
    path: ParamPath, rules: Sequence[LoadRule], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[ParamPath, CodeForm]]:
    """Yield the form of a leaf, which these rules fill; or those of its parts, where they differ and can be
    apart.
    """
    of_parts: dict[ParamPath, list[CodeForm | None]] = {}
    for rule in rules:
        of_parts.setdefault(rule.apart or path, []).append(rule.kept_form(tensors))
    joined = {part: _joined(forms) for part, forms in of_parts.items()}
    forms = set(joined.values())
    if len(forms) == 1:
        joined = {path: forms.pop()}
    yield from ((part, form) for part, form in joined.items() if form is not None)


def _joined(forms: Sequence[CodeForm | None]) -> CodeForm | None:
    """Return the form that holds the codes of tensors which need these; None: there is none."""
    known = [form for form in forms if form is not None]
    return union(known) if len(known) == len(forms) else None


def without_empty_biases(tensors: Mapping[str, Tensor], rules: LoadRules) -> dict[str, Tensor]:
    """Leave out biases of quantised layers that the model does not have, and that are all 0: AutoGPTQ writes
    one for every layer.
    """
    known = {spec.name for spec in rules.tensors}

    def is_empty(name: str, tensor: Tensor) -> bool:
        layer = name.removesuffix(".bias")
        return (
            name not in known
            and layer != name
            and isinstance(tensors.get(f"{layer}.weight"), QuantisedWeight)
            and len(tensor.shape) == 1
            and not tensor[0 : tensor.shape[0]].any()
        )

    return {name: tensor for name, tensor in tensors.items() if not is_empty(name, tensor)}


def as_floats(tensors: Mapping[str, TensorEntry], quantisation: Quantisation) -> dict[str, Tensor]:
    """Put one tensor in the place of those of each quantised layer. Raises ConfigError, which lists what is
    wrong with layers, each with its file and tensor.
    """
    found: dict[str, Tensor] = {
        name: entry for name, entry in tensors.items() if not _ends(name, quantisation.unused)
    }
    problems: list[str] = []
    layers = _layers(tensors, quantisation)
    for layer in layers.values():
        for ending in layer.tensors:
            del found[f"{layer.name}.{ending}"]
        try:
            weight = _weight_of(layer, tensors, quantisation)
            found[f"{layer.name}.weight"] = weight
        except ConfigError as error:
            problems.append(str(error))
    parents = {name.rpartition(".")[0] for name in layers}
    for name, tensor in found.items():
        layer_name, _, ending = name.rpartition(".")
        is_product = ending == "weight" and layer_name.endswith("_proj") and len(tensor.shape) == 2
        if (
            is_product
            and isinstance(tensor, TensorEntry)
            and layer_name.rpartition(".")[0] in parents
            and not quantisation.may_be_plain(layer_name)
        ):
            problems.append(
                f"{tensor.file}: tensor {name} has dtype {name_of(tensor.dtype)}, but quantization_config "
                "says that the layer is quantised"
            )
    if problems:
        more = f"; and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
        raise ConfigError("; ".join(problems[:_MOST_TOLD]) + more)
    return found


def _weight_of(
    layer: Layer, tensors: Mapping[str, TensorEntry], quantisation: Quantisation
) -> QuantisedWeight:
    reader, first = quantisation.reader(layer.name), min(layer.tensors)
    if reader is None:
        raise layer.problem(first, "is quantised, but quantization_config says that the layer is not")
    if "weight" not in layer and f"{layer.name}.weight" in tensors:
        raise layer.problem(first, f"is quantised, but there is {layer.name}.weight too")
    return reader(layer)


def _layers(tensors: Mapping[str, TensorEntry], quantisation: Quantisation) -> dict[str, Layer]:
    """Find the quantised layers by their names."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        for ending in quantisation.endings:
            if name.endswith(f".{ending}"):
                found.setdefault(name.removesuffix(f".{ending}"), {})[ending] = entry
    told: dict[str, str] = {}
    if quantisation.has_metadata:
        for file in sorted({entry.file for entry in tensors.values()}):
            told |= read_metadata(file)
    return {
        name: Layer(name, entries, told.get(f"{name}.weight", ""))
        for name, entries in found.items()
        if any(ending in entries for ending in quantisation.marks)
        or ("weight" in entries and name_of(entries["weight"].dtype) in quantisation.dtypes)
    }


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    return any(name.endswith(f".{ending}") for ending in endings)
