"""Loads a model's state onto the device from a Hugging Face checkpoint directory.

All tensors are checked by name, shape and dtype before the first one is placed; `leaves` converts and places
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding
from tqdm import tqdm

from penstock.runtime.errors import CheckpointError, ConfigError
from penstock.runtime.loading.by_device import LeavesOnDevices, rules_of_each, shapes_of_each
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.leaves import LeafMaker, LeafShape, Parts, TakeLeaf
from penstock.runtime.loading.quantised.checkpoint import find_weights, without_empty_biases
from penstock.runtime.loading.quantised.config import without_quantisation
from penstock.runtime.loading.safetensors_files import refuse_gguf_in
from penstock.runtime.loading.tensor_checks import problems_of
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.model_files import read_json_object
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.families import eagle
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.load_rules import LoadRule, LoadRules, ParamPath, Tensor
from penstock.runtime.models.params import ModelState, leaf_shapes, load_rules, state_of
from penstock.runtime.models.registry import family_of, parse_config
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason

_log = logging.getLogger(__name__)

Placement: TypeAlias = (
    jax.Device | jax.sharding.Sharding | Callable[[ParamPath], jax.sharding.Sharding] | None
)
Progress: TypeAlias = bool | Callable[[int, int], None]

_OTHER_KINDS = {
    "adapter_config.json": ": the directory holds an adapter (LoRA), and not the model that it changes",
    "model_index.json": ": the directory holds a pipeline that makes images (diffusers), which is not served",
    "params.json": ": the directory holds a model in the form of its makers; convert it to Hugging Face's",
}
"""What directories are that have such a file in place of config.json."""
_COMPARED_AT_ONCE = 1 << 24  # bytes


def load_config(directory: Path) -> ModelConfig:
    """Read the config of a checkpoint: `read_config`, and `config_for_tensors` unless the weights are absent
    or damaged.

    Raises ConfigError or UnknownArchitecture.
    """
    config = read_config(directory)
    try:
        tensors = find_weights(directory)
    except ConfigError:  # `load_weights` says what is wrong with them
        return config
    return config_for_tensors(config, tensors, directory)


def read_config(directory: Path, *, heads: bool = False) -> ModelConfig:
    """Parse config.json. The eos_token_id of generation_config.json replaces that of config.json, as in
    transformers. heads: also that of an EAGLE head.

    Raises ConfigError or UnknownArchitecture.
    """
    file = directory / "config.json"
    if not file.exists():
        refuse_gguf_in(directory)
        what = next((what for name, what in _OTHER_KINDS.items() if (directory / name).is_file()), "")
        raise ConfigError(f"{file} is not there{what}; give the directory that holds the model's config.json")
    config = parse_config(without_quantisation(read_json_object(file)), heads=heads)
    generation = directory / "generation_config.json"
    if generation.is_file():
        fields = Fields(read_json_object(generation))
        eos = fields.token_ids("eos_token_id")
        if fields.problems:
            raise ConfigError(f"{generation}: {'; '.join(fields.problems)}")
        if eos:
            config = dataclasses.replace(config, eos_token_ids=eos)
    return config


def config_for_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], directory: Path) -> ModelConfig:
    """Add what only the checkpoint's tensors say: what their names begin with, and what is tied. A decoder
    saved by itself, without a head (as the larger Qwen3-Embedding), gets its embeddings as the head. A head
    that config.json ties to the embeddings, but that the files have beside them with other values, is not
    tied, as in transformers. A model that reads images, saved without what reads them, reads texts alone.
    """
    if config.eagle is not None:
        return eagle.for_tensors(config, tensors)
    names = config.names.found_in(tensors)
    tied = config.tie_word_embeddings
    if config.generates and not (tied or names.decoder or f"{names.head}weight" in tensors):
        _log.warning(
            "%s has a model without a head: it makes embeddings, but its texts would mean nothing",
            directory,
        )
        tied = True
    vision = config.vision
    if vision is not None and not any(name.endswith(names.vision_tensor) for name in tensors):
        _log.warning("%s has no encoder of images: its text model alone is served", directory)
        vision = None
    config = dataclasses.replace(config, names=names, tie_word_embeddings=tied, vision=vision)
    differing = _differing_copies(config, tensors)
    if differing:
        _log.warning(
            "%s: %s; so both are used, as in transformers", directory / "config.json", "; ".join(differing)
        )
        config = dataclasses.replace(config, tie_word_embeddings=False)
    return config


def _differing_copies(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """Tell which tensors that config.json ties to others have other values. Only where both are there, they
    are read, until they differ.
    """
    spelled = config.names.spelled
    copies = family_of(config.architecture).copies(config)
    return [
        f"it ties {name} to {other}, from which it differs"
        for name, other in ((spelled(name), spelled(other)) for name, other in copies.items())
        if name in tensors and other in tensors and not _equal(tensors[name], tensors[other])
    ]


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
    rules = load_rules(config, dtype, linear)
    found = without_empty_biases(find_weights(directory), rules)
    check_tensors(rules, found, where=f"checkpoint {directory}")
    leaves = load_leaves(
        directory,
        rules,
        found,
        leaf_shapes(config, dtype, linear),
        placement=placement,
        progress=progress,
        threads=threads,
    )
    return state_of(config, leaves, dtype, linear)


@contextlib.contextmanager
def bytes_done(total: int, what: str, progress: Progress) -> Iterator[Callable[[int], None]]:
    """Show the progress of work on `total` bytes, as `load_weights` says. Yields what is to be called with
    the number of bytes that were done since the call before.
    """
    with tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        disable=None if progress is True else True,  # None: only where stderr is a terminal
    ) as bar:
        so_far = 0

        def done(num_bytes: int) -> None:
            nonlocal so_far
            so_far += num_bytes
            bar.update(num_bytes)
            if callable(progress):
                progress(so_far, total)

        yield done


def load_leaves(
    where: Path,
    rules: LoadRules,
    found: Mapping[str, Tensor],
    shapes: Mapping[ParamPath, LeafShape],
    *,
    placement: Placement = None,
    progress: Progress = True,
    threads: int | None = None,
) -> Mapping[ParamPath, jax.Array]:
    """Make all leaves, of these shapes, of a checkpoint's tensors, which `check_tensors` has found right.
    where: the directory or file that they are in. The other arguments are those of `load_weights`, and so is
    the CheckpointError.
    """
    total = sum(rule.num_bytes for rule in rules.rules)
    _log.info("loading %d tensors (%.2f GB) from %s", len(rules.tensors), total / 1e9, where)
    values: dict[ParamPath, jax.Array] = {}

    def place(path: ParamPath, leaf: npt.NDArray[Any], parts: Parts) -> None:
        values[path] = jax.device_put(leaf, placement(path) if callable(placement) else placement)
        jax.block_until_ready(values[path])

    followed: Sequence[LoadRule] = rules.rules
    take: TakeLeaf = place
    sharding_of = _cut_placement(placement, shapes)
    if sharding_of is not None:
        on_devices = LeavesOnDevices(sharding_of)
        values, take = on_devices.leaves, on_devices.take
        followed, shapes = rules_of_each(rules.rules), shapes_of_each(shapes)

    with bytes_done(total, "weights", progress) as done:
        maker = LeafMaker(
            followed,
            found,
            shapes,
            take,
            threads=threads or available_processors(),
            done=lambda rule: done(rule.num_bytes),
        )
        try:
            maker.add_all(found)
            maker.finish()
        finally:
            maker.close()
    if maker.too_large:
        problems = [
            f"{name} has values beyond the range of {dtype}" for name, dtype in maker.too_large.items()
        ]
        raise CheckpointError(mismatched=problems, where=f"checkpoint {where}")
    return values


def _cut_placement(
    placement: Placement, paths: Iterable[ParamPath]
) -> Callable[[ParamPath], NamedSharding] | None:
    """Return what tells the place of each leaf of a model that is cut over devices; None for another."""
    first = placement(next(iter(paths))) if callable(placement) else placement
    if not isinstance(first, NamedSharding) or first.mesh.size == 1:
        return None
    return cast("Callable[[ParamPath], NamedSharding]", placement if callable(placement) else lambda _: first)


def check_tensors(rules: LoadRules, found: Mapping[str, Tensor], *, where: str) -> None:
    """Raise CheckpointError unless `found` is what the rules need, by names, shapes and dtypes."""
    sent = [SentTensor(name, name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in found.items()]
    by_reason: dict[TensorReason, list[TensorProblem]] = {}
    for problem in problems_of(rules, sent, partial=False):
        by_reason.setdefault(problem.reason, []).append(problem)
    missing = by_reason.pop(TensorReason.MISSING, [])
    extra = by_reason.pop(TensorReason.UNKNOWN_NAME, [])
    mismatched = [str(problem) for problems in by_reason.values() for problem in problems]
    if missing or extra or mismatched:
        raise CheckpointError(
            missing=[problem.name for problem in missing],
            extra=[problem.name for problem in extra],
            mismatched=mismatched,
            where=where,
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors have one shape and dtype, and the same bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = max(1, _COMPARED_AT_ONCE // max(1, one.dtype.itemsize * int(np.prod(one.shape[1:]))))
    parts = [slice(begin, begin + rows) for begin in range(0, one.shape[0] if one.shape else 0, rows)]
    return all(one[part].tobytes() == other[part].tobytes() for part in parts)
