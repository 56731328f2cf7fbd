"""Loads a model's state onto the device from a Hugging Face checkpoint directory.

All tensors are checked by name, shape and dtype before the first one is placed; `leaves` converts and places
them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from penstock.runtime.errors import CheckpointError, ConfigError
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.leaves import LeafMaker, Parts
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.loading.tensor_checks import problems_of
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.load_rules import LoadRule, LoadRules, ParamPath, Tensor
from penstock.runtime.models.params import ModelState, leaf_shapes, load_rules, state_of
from penstock.runtime.models.registry import parse_config
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason

_log = logging.getLogger(__name__)

Placement: TypeAlias = (
    jax.Device | jax.sharding.Sharding | Callable[[ParamPath], jax.sharding.Sharding] | None
)
Progress: TypeAlias = bool | Callable[[int, int], None]

_COMPARED_AT_ONCE = 1 << 24  # bytes


def load_config(directory: Path) -> ModelConfig:
    """Parse config.json. The eos_token_id of generation_config.json replaces that of config.json, as in
    transformers. What the names of tensors begin with is read from the files of weights, if there are any. A
    decoder saved by itself, without a head (as the larger Qwen3-Embedding), gets its embeddings as the head.

    Raises ConfigError or UnknownArchitecture.
    """
    config = parse_config(_read_json(directory / "config.json"))
    generation = directory / "generation_config.json"
    if generation.is_file():
        fields = Fields(_read_json(generation))
        eos = fields.token_ids("eos_token_id")
        if fields.problems:
            raise ConfigError(f"{generation}: {'; '.join(fields.problems)}")
        if eos:
            config = dataclasses.replace(config, eos_token_ids=eos)
    try:
        tensors = find_tensors(directory)
    except ConfigError:  # no weights, or damaged ones, which `load_weights` says
        return config
    names = config.names.found_in(tensors)
    tied = config.tie_word_embeddings
    if not (tied or names.decoder or f"{names.head}weight" in tensors):
        _log.warning(
            "%s has a model without a head: it makes embeddings, but its texts would mean nothing",
            directory,
        )
        tied = True
    return dataclasses.replace(config, names=names, tie_word_embeddings=tied)


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
    """Load a checkpoint's weights onto the device.

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
    check_tensors(rules, found, where=where)
    total = sum(rule.num_bytes for rule in rules.rules)
    _log.info("loading %d tensors (%.2f GB) from %s", len(rules.tensors), total / 1e9, directory)
    values: dict[ParamPath, jax.Array] = {}

    def take(path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        values[path] = jax.device_put(leaf, placement(path) if callable(placement) else placement)
        jax.block_until_ready(values[path])

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

        maker = LeafMaker(
            rules.rules,
            found,
            leaf_shapes(config, dtype, linear),
            take,
            threads=threads or available_processors(),
            done=done,
        )
        try:
            for tensor in rules.tensors:  # in the order of the rules, so that few leaves are open at a time
                maker.add(tensor.name, found[tensor.name])
            maker.finish()
        finally:
            maker.close()
    if maker.too_large:
        problems = [
            f"{name} has values beyond the range of {dtype}" for name, dtype in maker.too_large.items()
        ]
        raise CheckpointError(mismatched=problems, where=where)
    return state_of(config, values, dtype, linear)


def check_tensors(rules: LoadRules, found: Mapping[str, Tensor], *, where: str, compare: bool = True) -> None:
    """Raise CheckpointError unless `found` is what the rules need. Values are read only to `compare` tensors
    that must be copies of others.
    """
    sent = [SentTensor(name, name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in found.items()]
    by_reason: dict[TensorReason, list[TensorProblem]] = {}
    for problem in problems_of(rules, sent, partial=False):
        by_reason.setdefault(problem.reason, []).append(problem)
    missing = by_reason.pop(TensorReason.MISSING, [])
    extra = by_reason.pop(TensorReason.UNKNOWN_NAME, [])
    mismatched = [str(problem) for problems in by_reason.values() for problem in problems]
    if compare and not mismatched:
        mismatched = [
            f"{name} differs from {other}, though config.json ties them"
            for name, other in rules.copies.items()
            if name in found and other in found and not _equal(found[name], found[other])
        ]
    if missing or extra or mismatched:
        raise CheckpointError(
            missing=[problem.name for problem in missing],
            extra=[problem.name for problem in extra],
            mismatched=mismatched,
            where=where,
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    rows = max(1, _COMPARED_AT_ONCE // max(1, one.dtype.itemsize * int(np.prod(one.shape[1:]))))
    parts = [slice(begin, begin + rows) for begin in range(0, one.shape[0], rows)]
    return all(one[part].tobytes() == other[part].tobytes() for part in parts)
