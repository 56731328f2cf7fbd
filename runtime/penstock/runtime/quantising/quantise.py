"""Makes a quantised checkpoint of one in floats, layer by layer.

Every layer is computed twice on the texts on which inputs are watched: with its weights in floats, to see
what its products multiply, and with its codes. So layers further on are watched on what the quantised layers
before them give, and are chosen to make up for it.

In memory are one layer, hidden states of the texts, and for a moment the embeddings and the head.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import (
    Progress,
    bytes_done,
    check_tensors,
    config_for_tensors,
    read_config,
)
from penstock.runtime.loading.gguf.file import is_gguf
from penstock.runtime.loading.quantised.config import read_quantisation
from penstock.runtime.loading.safetensors_files import TensorEntry, find_tensors
from penstock.runtime.model_files import read_json_object
from penstock.runtime.models.config import AttentionConfig, MLPConfig, ModelConfig
from penstock.runtime.models.configs.recurrent import RecurrentConfig
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import ParamPath, Tensor, pack_code_rows
from penstock.runtime.models.params import load_rules, rules_of_layer
from penstock.runtime.models.quantised import Codes
from penstock.runtime.ops.codes import CodeForm
from penstock.runtime.quantising.gptq import gptq
from penstock.runtime.quantising.grids import grid_of, rounded
from penstock.runtime.quantising.layerwise import Grams, LayerByLayer, Score
from penstock.runtime.quantising.options import QuantiseOptions, Scheme
from penstock.runtime.quantising.output import (
    CheckpointWriter,
    Shape,
    check_target,
    copied_files,
    new_folder,
    packed,
    packed_shapes,
    quantization_config,
)
from penstock.runtime.quantising.scaling import check_scalable, scaled
from penstock.runtime.quantising.texts import (
    JUDGED_TOKENS,
    JUDGED_WINDOWS,
    calibration_text,
    judging_text,
    windows,
)
from penstock.runtime.text.codec import TextCodec

_WATCHED_TOKENS = 512
"""The tokens of each text on which inputs are watched."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, and what it cost."""

    num_quantised: int
    """Weights that are in codes."""
    kept: tuple[str, ...]
    """Layers of products that stay as they were, but for embeddings and head."""
    old_bytes: int
    new_bytes: int
    score: Score
    """The checkpoint in floats beside the quantised one, both computed in float32."""
    num_positions: int
    """How many positions were judged."""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint in floats, and which of its weights become codes."""

    folder: Path
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]
    weights: tuple[Mapping[str, ParamPath], ...]
    """For each layer the tensors that become codes, and the leaf of the product that multiplies each."""

    @property
    def quantised(self) -> set[str]:
        """The tensors that become codes."""
        return {name for layer in self.weights for name in layer}


def quantise(source: Path, target: Path, options: QuantiseOptions, *, progress: Progress = True) -> Report:
    """Write the checkpoint in `source` to the new folder `target` with its weights in codes.

    progress: True for a bar on stderr if that is a terminal, False for none, or a callback (bytes done, bytes
    in all). Raises ConfigError before anything is computed if the model or the options cannot be used, or the
    folder cannot be made. Nothing is left behind if it does not end well.
    """
    checkpoint = _read(source, options)
    scheme = Scheme.of(options, checkpoint.config.dtype)
    files = _files(checkpoint, scheme)
    new_bytes = sum(shape.num_bytes for tensors in files.values() for shape in tensors.values())
    others = copied_files(source)
    check_target(target, new_bytes + sum(path.stat().st_size for path in others))
    codec = TextCodec.find(source)
    if codec is None:
        raise ConfigError(f"{source} has no tokenizer, and without one no text can be computed")
    watched = None if options.method == "rtn" else _watched_texts(codec, checkpoint.config, options)
    judged = _judged_texts(codec, checkpoint.config)
    with new_folder(target) as folder:
        for path in others:
            shutil.copyfile(path, folder / path.name)
        _write_config(checkpoint, scheme, folder)
        writer = CheckpointWriter(folder, files)
        try:
            score = _make(checkpoint, scheme, options, watched, judged, writer, progress)
            writer.finish()
        finally:
            writer.close()
    return Report(
        num_quantised=len(checkpoint.quantised),
        kept=tuple(_kept_layers(checkpoint)),
        old_bytes=sum(entry.num_bytes for entry in checkpoint.tensors.values()),
        new_bytes=new_bytes,
        score=score,
        num_positions=judged.shape[0] * (judged.shape[1] - 1),
    )


def _read(source: Path, options: QuantiseOptions) -> _Checkpoint:
    """Read all but the weights that become codes. Raises ConfigError for what cannot be quantised."""
    if is_gguf(source):
        raise ConfigError(f"{source}: a GGUF file cannot be quantised again; give the checkpoint in floats")
    config = read_config(source)
    if read_quantisation(source, read_json_object(source / "config.json")) is not None:
        raise ConfigError(f"{source / 'config.json'}: quantization_config says that it is quantised already")
    tensors = find_tensors(source)
    config = config_for_tensors(config, tensors, source)
    _check_family(config)
    if options.method == "awq":
        check_scalable(config)
    check_tensors(load_rules(config), tensors, where=f"checkpoint {source}")
    weights = tuple(_weights_of(config, layer, options) for layer in range(config.num_layers))
    if not any(weights):
        raise ConfigError(
            f"{source}: no weight can be quantised: outputs must be a multiple of 16, and inputs of 64 and "
            f"of the group, {options.group}"
        )
    checkpoint = _Checkpoint(source, config, tensors, weights)
    quantised = checkpoint.quantised
    for name, entry in tensors.items():
        if name not in quantised:  # those are read layer by layer
            _check_values(name, entry)
    return checkpoint


def _check_family(config: ModelConfig) -> None:
    """Raise ConfigError for models whose layers cannot be computed one by one, or whose weights are mostly
    of another kind than a product's.
    """
    refused = _refused(config)
    if refused is not None:
        raise ConfigError(
            f"{config.architecture} cannot be quantised to a folder: {refused}; serve it with --quantization"
        )


def _refused(config: ModelConfig) -> str | None:
    """Say why a model cannot be quantised; None: it can."""
    if not config.generates:
        return "it generates nothing"
    if config.per_layer is not None:
        return "its layers have embeddings of their own"
    for number, layer in enumerate(config.layers):
        if layer.shares_kv_of is not None:
            return f"layer {number} attends to the keys and values of another layer"
        if not isinstance(layer.attention, AttentionConfig | RecurrentConfig):
            return f"layer {number} has latent attention"
        if layer.mlp is not None and not isinstance(layer.mlp, MLPConfig):
            return f"layer {number} has experts"
    return None


def _weights_of(config: ModelConfig, layer: int, options: QuantiseOptions) -> dict[str, ParamPath]:
    """Find the tensors of a layer that become codes: those that a server with --quantization keeps in codes,
    as far as a group divides their inputs. A tensor may hold several products that have the same inputs.
    """
    in_codes = LinearFormat(codes=CodeForm(options.bits, zeros=False))
    found: dict[str, ParamPath] = {}
    others: set[str] = set()
    for rule in rules_of_layer(config, layer, linear=in_codes).values():
        source = rule.sources[0]
        is_usual = rule.decode is None and len(rule.sources) == 1 and not source.at and source.axis == 0
        fits = is_usual and len(source.shape) == 2 and source.shape[0] % 16 == 0
        if rule.put is pack_code_rows and fits and source.shape[1] % options.group == 0:
            found.setdefault(source.name, rule.targets[0].path)
        else:
            others.update(source.name for source in rule.sources)
    return {name: path for name, path in found.items() if name not in others and name.endswith(".weight")}


def _files(checkpoint: _Checkpoint, scheme: Scheme) -> dict[str, dict[str, Shape]]:
    """Return the new files, which are those of the old checkpoint, with what they will hold."""
    found: dict[str, dict[str, Shape]] = {}
    quantised = checkpoint.quantised
    for name, entry in checkpoint.tensors.items():
        tensors = found.setdefault(entry.file.name, {})
        if name in quantised:
            num_out, num_in = entry.shape
            shapes = packed_shapes(num_out, num_in, scheme)
            tensors.update({_renamed(name, ending): shape for ending, shape in shapes.items()})
        else:
            tensors[name] = Shape(entry.dtype, entry.shape)
    return found


def _renamed(weight: str, ending: str) -> str:
    return f"{weight.removesuffix('weight')}{ending}"


def _kept_layers(checkpoint: _Checkpoint) -> list[str]:
    """Return what may be a layer of a product and stays as it was, but for embeddings and head."""
    names = checkpoint.config.names
    ends = {f"{names.decoder}{names.table}", f"{names.head}weight"}
    return [
        name.removesuffix(".weight")
        for name, entry in checkpoint.tensors.items()
        if name.endswith(".weight")
        and len(entry.shape) == 2
        and name not in checkpoint.quantised
        and name not in ends
    ]


def _write_config(checkpoint: _Checkpoint, scheme: Scheme, folder: Path) -> None:
    given = read_json_object(checkpoint.folder / "config.json")
    # A head that is tied to the embeddings has no tensor, and is a layer all the same.
    ignore = [checkpoint.config.names.head.removesuffix("."), *_kept_layers(checkpoint)]
    given["quantization_config"] = quantization_config(scheme, ignore)
    (folder / "config.json").write_text(json.dumps(given, indent=2) + "\n")


def _watched_texts(codec: TextCodec, config: ModelConfig, options: QuantiseOptions) -> Any:
    size = min(_WATCHED_TOKENS, config.max_position_embeddings)
    count = -(-options.calibration_tokens // size)
    return windows(codec, calibration_text(options.calibration), count=count, num_tokens=size)


def _judged_texts(codec: TextCodec, config: ModelConfig) -> Any:
    size = min(JUDGED_TOKENS, config.max_position_embeddings)
    return windows(codec, judging_text(), count=JUDGED_WINDOWS, num_tokens=size)


def _make(
    checkpoint: _Checkpoint,
    scheme: Scheme,
    options: QuantiseOptions,
    watched: Any,
    judged: Any,
    writer: CheckpointWriter,
    progress: Progress,
) -> Score:
    """Make and write all tensors, and compare the two models."""
    config, tensors = checkpoint.config, checkpoint.tensors
    model = LayerByLayer(config, max(texts.shape[1] for texts in (judged, watched) if texts is not None))
    exact = model.embed(judged, tensors)
    quantised = exact.copy()
    hidden = None if watched is None else model.embed(watched, tensors)
    total = sum(entry.num_bytes for entry in tensors.values())
    with bytes_done(total, "quantised", progress) as done:
        written = set(checkpoint.quantised)
        for index, weights in enumerate(checkpoint.weights):
            for name in weights:
                _check_values(name, tensors[name])
            layer = model.layer(index, tensors)
            layer.advance(exact)
            if not np.isfinite(exact).all():
                raise ConfigError(
                    f"{checkpoint.folder}: in floats layer {index} makes values of a text that are infinite "
                    "or no numbers: the checkpoint is damaged, or computes no text in float32"
                )
            grams: Grams = {} if hidden is None or not weights else layer.grams(hidden)
            del layer  # before it is loaded again
            codes, changed = _layer_codes(checkpoint, index, grams, scheme, options)
            for name, of_tensor in codes.items():
                for ending, values in packed(of_tensor, scheme).items():
                    writer.put(_renamed(name, ending), values)
                done(tensors[name].num_bytes)
            for name, values in changed.items():
                writer.put(name, values)
                written.add(name)
                done(tensors[name].num_bytes)
            new = {name: of_tensor.dequantised() for name, of_tensor in codes.items()}
            new_layer: dict[str, Tensor] = {**tensors, **changed, **new}
            layer = model.layer(index, new_layer)
            layer.advance(quantised)
            if hidden is not None:
                layer.advance(hidden)
        for name, entry in tensors.items():
            if name not in written:
                writer.copy(name, entry)
                done(tensors[name].num_bytes)
    return model.score(judged, exact, quantised, tensors)


def _layer_codes(
    checkpoint: _Checkpoint, layer: int, grams: Grams, scheme: Scheme, options: QuantiseOptions
) -> tuple[dict[str, Codes], dict[str, NDArray[Any]]]:
    """Choose the codes of all quantised tensors of a layer: (these, other tensors that changed)."""
    weights, found = checkpoint.weights[layer], {}
    floats = {name: np.asarray(checkpoint.tensors[name].map()).astype(np.float32) for name in weights}
    changed: dict[str, NDArray[Any]] = {}
    if options.method == "awq" and weights:
        of_layer = rules_of_layer(checkpoint.config, layer).values()
        names = {source.name for rule in of_layer for source in rule.sources}
        tensors = {name: np.asarray(checkpoint.tensors[name].map()) for name in names}
        new, importance = scaled(checkpoint.config, layer, tensors, weights, grams, scheme)
        changed = {name: values for name, values in new.items() if name not in weights}
        for name in weights:
            found[name] = rounded(new[name], grid_of(new[name], scheme, importance[name]), scheme)
        return found, changed
    for name, path in weights.items():
        if options.method == "gptq":
            found[name] = gptq(floats[name], grams[path], scheme)
        else:
            found[name] = rounded(floats[name], grid_of(floats[name], scheme), scheme)
    return found, changed


def _check_values(name: str, entry: TensorEntry) -> None:
    """Raise ConfigError if a value is infinite or no number."""
    if not np.isfinite(entry.map()).all():
        raise ConfigError(f"{entry.file}: tensor {name} has values that are infinite or no numbers")
