"""AWQ (Lin et al. 2023, arXiv 2306.00978): the columns of a weight that large inputs meet are made larger
before they are rounded, and the inputs smaller by as much, so that rounding costs less where it matters.

Inputs are made smaller where they come from, so nothing is left to do when the model is served: in the weight
of the norm before the product, or for the inputs of an MLP's last product in the rows of the one before it.
The output of attention is left alone, because its channels come from values that several heads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError
from penstock.runtime.models.config import AttentionConfig, MLPConfig, ModelConfig
from penstock.runtime.models.load_rules import LoadRule, ParamPath
from penstock.runtime.models.params import rules_of_layer
from penstock.runtime.quantising.grids import Floats, grid_of, rounded
from penstock.runtime.quantising.layerwise import Grams
from penstock.runtime.quantising.options import Scheme

_POWERS = tuple(step / 10 for step in range(11))
"""Of the size of inputs, by which columns are scaled; the one that leaves the least error is taken."""
_LAYER: ParamPath = ("layers", 0)
_QKV: ParamPath = (*_LAYER, "self_attn", "qkv_proj", "weight")
_GATE_UP: ParamPath = (*_LAYER, "mlp", "gate_up_proj", "weight")
_DOWN: ParamPath = (*_LAYER, "mlp", "down_proj", "weight")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A product, and what its inputs come from."""

    weight: ParamPath
    """The leaf of the product's weight."""
    before: LoadRule
    """The rule of the norm, or of the rows of a product, that makes the inputs."""
    offset: float | None
    """What is added to the norm's weight; None if it is no norm."""


def check_scalable(config: ModelConfig) -> None:
    """Raise ConfigError for a model with a layer in which no norm can take up scales."""
    for number, layer in enumerate(config.layers):
        problem = None
        if not isinstance(layer.attention, AttentionConfig):
            problem = "does not attend"
        elif layer.attention.output_gate or layer.beside is not None:
            problem = "has further products that read what attention reads"
        elif layer.norms not in ("pre", "sandwich"):
            problem = f"has norms of the kind {layer.norms!r}"
        elif config.norm != "rms":
            problem = f"has norms of the kind {config.norm!r}"
        elif not isinstance(layer.mlp, MLPConfig):
            problem = "has no MLP"
        if problem is not None:
            raise ConfigError(
                f"method: awq cannot scale the inputs of {config.architecture}: layer {number} {problem}; "
                "choose gptq"
            )


def _pairs(config: ModelConfig, layer: int) -> list[_Pair]:
    """Find the products whose inputs can be scaled, last one first: what makes its inputs is scaled by it."""
    rules, found = rules_of_layer(config, layer), []
    mlp = config.layers[layer].mlp
    assert isinstance(mlp, MLPConfig)
    if mlp.plain is None and not mlp.bias:  # what follows a gate is linear in the other half
        found.append(_Pair(_DOWN, rules[*_LAYER, "mlp", "up_proj", "weight"], None))
    for weight, norm in ((_GATE_UP, "mlp_norm"), (_QKV, "attention_norm")):
        found.append(_Pair(weight, rules[*_LAYER, norm, "weight"], config.norm_offset))
    return found


def scaled(
    config: ModelConfig,
    layer: int,
    floats: Mapping[str, NDArray[Any]],
    weights: Mapping[str, ParamPath],
    grams: Grams,
    scheme: Scheme,
) -> tuple[dict[str, NDArray[Any]], dict[str, Floats]]:
    """Scale a layer's tensors: (those that changed, for each of its quantised tensors the mean squares of its
    new inputs [K]). The layer computes the same with them before anything is rounded.

    floats: the tensors of the layer. weights: those that become codes, and the leaf of each one's product.
    """
    new = {name: np.asarray(floats[name]).astype(np.float32) for name in weights}
    norms: dict[str, NDArray[Any]] = {}
    importance = {name: np.diag(grams[path]).astype(np.float32) for name, path in weights.items()}
    for pair in _pairs(config, layer):
        readers = [name for name, path in weights.items() if path == pair.weight]
        source = pair.before.sources[0]
        rows = slice(source.begin, source.begin + pair.before.num_rows)
        of_rows = pair.offset is None
        # Whatever reads the inputs must be scaled with them, so all of it must be at hand.
        if not readers or source.order is not None or (of_rows and source.name not in new):
            continue
        gram = grams[pair.weight]
        scales = _best_scales(np.concatenate([new[name] for name in readers]), gram, scheme)
        if pair.offset is None:
            new[source.name][rows] /= scales[:, None]
        else:
            norms[source.name], scales = _folded(np.asarray(floats[source.name]), pair.offset, scales)
        for name in readers:
            new[name] *= scales
            importance[name] = (importance[name] / np.square(scales)).astype(np.float32)
    return new | norms, importance


def _best_scales(weight: Floats, gram: NDArray[np.float64], scheme: Scheme) -> Floats:
    """Find the scales of the columns of a weight [N, K] that leave the least error of its outputs."""
    size = np.sqrt(np.diag(gram))
    size = np.where(size > 0, size, 1.0)
    best, least = np.ones(len(size), np.float32), np.inf
    for power in _POWERS:
        scales = size**power
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        importance = (np.diag(gram) / np.square(scales)).astype(np.float32)
        grown = weight * scales
        left = rounded(grown, grid_of(grown, scheme, importance), scheme).dequantised() / scales - weight
        error = float(np.sum((left @ gram.astype(np.float32)) * left, dtype=np.float64))
        if error < least:
            best, least = scales, error
    return best


def _folded(weight: NDArray[Any], offset: float, scales: Floats) -> tuple[NDArray[Any], Floats]:
    """Return a norm's weight divided by the scales, in its own dtype, and the scales by which it became
    smaller in fact. Rounding the norm's weight costs nothing so.
    """
    effective = weight.astype(np.float32) + np.float32(offset)
    new = (effective / scales - np.float32(offset)).astype(weight.dtype)
    smaller = new.astype(np.float32) + np.float32(offset)
    usable = (effective != 0) & (smaller != 0)
    new = np.where(usable, new, weight).astype(weight.dtype)
    true = np.where(usable, effective / np.where(usable, smaller, 1), 1).astype(np.float32)
    return new, true
