"""From a Hugging Face checkpoint directory to a model's state on the device.

All tensors are checked by name, shape and dtype before the first one is placed; then each is read through a
memory map, converted and placed in turn, so host memory peaks at about one tensor above the weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from penstock.runtime.checkpoint_safetensors import TensorEntry, find_tensors
from penstock.runtime.errors import CheckpointError, ConfigError
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.fields import Fields
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.params import ModelState, ParamSpec, param_specs, state_of
from penstock.runtime.models.registry import ParamPath

_log = logging.getLogger(__name__)

Placement: TypeAlias = (
    jax.Device | jax.sharding.Sharding | Callable[[ParamSpec], jax.sharding.Sharding] | None
)
Progress: TypeAlias = bool | Callable[[int, int], None]

_IGNORED = re.compile(
    r"(^|\.)rotary_emb\.inv_freq$"
)  # a constant that old checkpoints store; config.json decides
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class _Described(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[np.generic]: ...


def load_config(directory: Path) -> ModelConfig:
    """Parse config.json; generation_config.json's eos_token_id wins over config.json's, as in transformers.

    Raises ConfigError, or UnknownArchitecture.
    """
    config = ModelConfig.from_dict(_read_json(directory / "config.json"))
    generation = directory / "generation_config.json"
    if generation.is_file():
        fields = Fields(_read_json(generation))
        eos = fields.token_ids("eos_token_id")
        if fields.problems:
            raise ConfigError(f"{generation}: {'; '.join(fields.problems)}")
        if eos:
            config = dataclasses.replace(config, eos_token_ids=eos)
    return config


def _read_json(file: Path) -> Mapping[str, object]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file} is not there; give the directory that holds the model's config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {type(data).__name__}")
    return data


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: npt.DTypeLike | None = None,
    *,
    linear: LinearFormat = PLAIN,
    placement: Placement = None,
    progress: Progress = True,
) -> ModelState:
    """Load a checkpoint's weights onto the device.

    dtype: of the parameters; None or "auto" for the checkpoint's own. linear: how products' weights are kept.
    placement: a device, a sharding, or a function from parameter to sharding; None for JAX's default device.
    progress: a bar on stderr if that is a terminal, False for none, or a callback (bytes done, bytes in all).
    Raises CheckpointError listing every missing, extra and wrongly shaped tensor before anything is placed,
    and ConfigError for files that are absent, truncated or corrupt. Only values beyond the range of `dtype`
    are found later, with the tensor that holds them (CheckpointError too).
    """
    found = find_tensors(directory)
    specs = param_specs(config, dtype, linear)
    _check(
        config, specs, found, lambda name: found[name].map(), partial=False, where=f"checkpoint {directory}"
    )
    total = sum(spec.num_bytes for spec in specs)
    _log.info("loading %d tensors (%.2f GB) from %s", len(specs), total / 1e9, directory)
    leaves: dict[ParamPath, jax.Array] = {}
    with tqdm(
        total=total,
        desc="weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        disable=None if progress is True else True,  # None: only where stderr is a terminal
    ) as bar:
        done = 0
        for spec in specs:
            leaves.update(_place(found[spec.hf_name], spec, placement))
            done += spec.num_bytes
            bar.update(spec.num_bytes)
            if callable(progress):
                progress(done, total)
    return state_of(config, leaves, dtype, linear)


def _place(entry: TensorEntry, spec: ParamSpec, placement: Placement) -> dict[ParamPath, jax.Array]:
    value, problem = _convert(spec, entry.map())
    if problem:
        raise CheckpointError(mismatched=[problem], where=f"{entry.file}")
    target = placement(spec) if callable(placement) else placement
    placed = {path: jax.device_put(leaf, target) for path, leaf in spec.stored(value).items()}
    jax.block_until_ready(list(placed.values()))
    return placed


def convert_named(
    config: ModelConfig,
    tensors: Mapping[str, npt.NDArray[np.generic]],
    *,
    partial: bool,
    dtype: npt.DTypeLike | None = None,
    linear: LinearFormat = PLAIN,
) -> dict[ParamPath, npt.NDArray[np.generic]]:
    """Tensors by checkpoint name -> new host arrays by state path, as the model keeps them; nothing is
    placed.

    partial: whether a subset of the parameters is enough. The input is never aliased.
    Raises CheckpointError listing every missing (unless partial), extra, misshapen or overflowing tensor.
    """
    specs = param_specs(config, dtype, linear)
    _check(config, specs, tensors, tensors.__getitem__, partial=partial, where="the update")
    converted: dict[ParamPath, npt.NDArray[np.generic]] = {}
    problems: list[str] = []
    for spec in specs:
        if spec.hf_name in tensors:
            value, problem = _convert(spec, tensors[spec.hf_name])
            converted |= spec.stored(value)
            problems += [problem] if problem else []
    if problems:
        raise CheckpointError(mismatched=problems, where="the update")
    return converted


def _convert(spec: ParamSpec, tensor: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.generic], str | None]:
    """A copy in the parameter's dtype, and what is wrong with it, if anything.

    Always a copy: device_put may alias host memory on CPU, and a mapped file may change or go away.
    """
    with np.errstate(over="ignore"):
        value = np.array(tensor, dtype=spec.dtype, copy=True)
    if _largest(tensor.dtype) > _largest(spec.dtype) and np.isinf(value).any():
        return value, f"{spec.hf_name} has values beyond the range of {spec.dtype}"
    return value, None


def _check(
    config: ModelConfig,
    specs: tuple[ParamSpec, ...],
    found: Mapping[str, _Described],
    read: Callable[[str], npt.NDArray[np.generic]],
    *,
    partial: bool,
    where: str,
) -> None:
    """Raise CheckpointError unless `found` is what the model needs; `read` gives values, for tied heads."""
    expected = {spec.hf_name: spec for spec in specs}
    missing = [] if partial else [name for name in expected if name not in found]
    extra: list[str] = []
    mismatched: list[str] = []
    for name in sorted(found):
        tensor = found[name]
        if name in expected:
            if tuple(tensor.shape) != expected[name].shape:
                mismatched.append(
                    f"{name} has shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
                )
            elif not _is_loadable(tensor.dtype):
                mismatched.append(f"{name} has dtype {tensor.dtype}, expected a 16-, 32- or 64-bit float")
        elif name == _HEAD and config.tie_word_embeddings and _EMBEDDING in found:
            if not _equal(read(_HEAD), read(_EMBEDDING)):
                mismatched.append(f"{_HEAD} differs from {_EMBEDDING}, though config.json ties them")
        elif not _IGNORED.search(name):
            extra.append(name)
    if missing or extra or mismatched:
        raise CheckpointError(missing=missing, extra=extra, mismatched=mismatched, where=where)


def _largest(dtype: np.dtype[np.generic]) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]  # jax leaves finfo unannotated


def _is_loadable(dtype: np.dtype[np.generic]) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 2


def _equal(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
