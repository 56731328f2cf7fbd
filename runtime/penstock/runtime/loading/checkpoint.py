"""Loads a model's state onto the device, from a Hugging Face checkpoint directory or from named tensors.

All tensors are checked by name, shape and dtype before the first one is placed; `leaves` converts and places
them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from penstock.runtime.errors import CheckpointError, ConfigError
from penstock.runtime.host.processors import available_processors
from penstock.runtime.loading.leaves import NewLeaf, make_leaves
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.load_rules import LoadRule, LoadRules, ParamPath, Tensor
from penstock.runtime.models.params import ModelState, leaf_shapes, load_rules, state_of

_log = logging.getLogger(__name__)

Placement: TypeAlias = (
    jax.Device | jax.sharding.Sharding | Callable[[ParamPath], jax.sharding.Sharding] | None
)
Progress: TypeAlias = bool | Callable[[int, int], None]

_COMPARED_AT_ONCE = 1 << 24  # bytes


def load_config(directory: Path) -> ModelConfig:
    """Parses config.json. The eos_token_id of generation_config.json replaces that of config.json, as in
    transformers.

    Raises ConfigError or UnknownArchitecture.
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
    threads: int | None = None,
) -> ModelState:
    """Loads a checkpoint's weights onto the device.

    dtype: that of the parameters; None or "auto": the checkpoint's own. linear: how the weights of products
    are stored. threads: how many convert; None: as many as the process has processors. placement: a device, a
    sharding, or a function from a leaf's path to one; None: JAX's default device. progress: True for a bar on
    stderr if that is a terminal, False for none, or a callback (bytes done, bytes in all).

    Raises CheckpointError listing every missing, extra and wrongly shaped tensor before anything is placed,
    and ConfigError for files that are absent, truncated or corrupt. Only values beyond the range of `dtype`
    are found later (CheckpointError too, listing every tensor that has some).
    """
    found = find_tensors(directory)
    rules = load_rules(config, dtype, linear)
    where = f"checkpoint {directory}"
    _check(rules, found, partial=False, where=where)
    total = sum(rule.num_bytes for rule in rules.rules)
    _log.info("loading %d tensors (%.2f GB) from %s", len(rules.tensors), total / 1e9, directory)

    def place(path: ParamPath, leaf: npt.NDArray[Any]) -> jax.Array:
        placed: jax.Array = jax.device_put(leaf, placement(path) if callable(placement) else placement)
        return placed

    with tqdm(
        total=total,
        desc="weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        disable=None if progress is True else True,  # None: only where stderr is a terminal
    ) as bar:
        so_far = 0

        def done(rule: LoadRule) -> None:
            nonlocal so_far
            so_far += rule.num_bytes
            bar.update(rule.num_bytes)
            if callable(progress):
                progress(so_far, total)

        made, problems = make_leaves(
            rules.rules,
            found,
            leaf_shapes(config, dtype, linear),
            place,
            threads=threads or available_processors(),
            done=done,
        )
    if problems:
        raise CheckpointError(mismatched=problems, where=where)
    return state_of(config, {path: leaf.value for path, leaf in made.items()}, dtype, linear)


def stage_named(
    config: ModelConfig,
    tensors: Mapping[str, npt.NDArray[Any]],
    current: Mapping[ParamPath, jax.Array],
    *,
    partial: bool,
    dtype: npt.DTypeLike | None = None,
    linear: LinearFormat = PLAIN,
    threads: int | None = None,
) -> dict[ParamPath, NewLeaf]:
    """Makes new leaves, by path in the state, of tensors by their names in a checkpoint. Each leaf is placed
    as the current one is.

    partial: whether some of the tensors are enough; the rest of a leaf is then copied from the current one.
    The mapping may be lazy: each tensor is asked for twice, to be checked and to be taken, and is not kept.
    threads: as for `load_weights`. Raises CheckpointError listing every missing (unless partial), extra,
    misshapen or overflowing tensor.
    """
    rules = load_rules(config, dtype, linear)
    _check(rules, tensors, partial=partial, where="the update")
    made, problems = make_leaves(
        rules.rules,
        tensors,
        leaf_shapes(config, dtype, linear),
        lambda path, leaf: jax.device_put(leaf, current[path].sharding),
        threads=threads or available_processors(),
        old=lambda path: np.asarray(current[path]),
    )
    if problems:
        raise CheckpointError(mismatched=problems, where="the update")
    return made


def _check(rules: LoadRules, found: Mapping[str, Tensor], *, partial: bool, where: str) -> None:
    """Raises CheckpointError unless `found` is what the rules need. Values are read only of tensors that must
    be copies of others.
    """
    expected = {tensor.name: tensor for tensor in rules.tensors}
    if partial:  # a rule needs all of its tensors at once
        some = [rule for rule in rules.rules if any(source.name in found for source in rule.sources)]
        needed = dict.fromkeys(source.name for rule in some for source in rule.sources)
    else:
        needed = dict.fromkeys(expected)
    missing = [name for name in needed if name not in found]
    extra: list[str] = []
    mismatched: list[str] = []
    for name in sorted(found):
        tensor, other = found[name], rules.copies.get(name)
        if name in expected:
            problem = expected[name].problem(tensor)
            if problem is not None:
                mismatched.append(problem)
        elif other is not None and other in found:
            if not _equal(tensor, found[other]):
                mismatched.append(f"{name} differs from {other}, though config.json ties them")
        elif not any(re.search(pattern, name) for pattern in rules.harmless):
            extra.append(name)
    if missing or extra or mismatched:
        raise CheckpointError(missing=missing, extra=extra, mismatched=mismatched, where=where)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    rows = max(1, _COMPARED_AT_ONCE // max(1, one.dtype.itemsize * int(np.prod(one.shape[1:]))))
    parts = [slice(begin, begin + rows) for begin in range(0, one.shape[0], rows)]
    return all(one[part].tobytes() == other[part].tobytes() for part in parts)
