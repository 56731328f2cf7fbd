"""Builds the programs of an engine from shapes alone, and compiles them for chips that are not there.

XLA compiles for TPUs by the package `libtpu`, in the version that JAX's extra "tpu" names, and for GPUs by
`jax-cuda13-plugin`, `jax-cuda13-pjrt` (both in jaxlib's version) and `nvidia-cuda-nvcc`. Neither looks for a
device.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import topologies

from penstock.runtime.building import (
    check_adapters,
    check_draft,
    kv_plan,
    laid_out,
    longest_shapes,
    with_whole_texts,
)
from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend, choose_backend, has_own_memory
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device_state import builder_of_shapes, peak_temp_bytes
from penstock.runtime.execution.draft_model import DraftModel
from penstock.runtime.execution.kv_sizing import DeviceMemory, check_max_model_len
from penstock.runtime.execution.program_set import ProgramBuilder
from penstock.runtime.loading.served_model import ServedModel, placed_shapes, reader_of, shapes_of_model
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.cutting import cut, cut_for
from penstock.runtime.models.params import abstract_model, model_dtype, state_of
from penstock.runtime.models.vision.encoders import vision_of
from penstock.runtime.planning.chips import MOST_COMPILED, Chip, Machine
from penstock.runtime.requests.sampling import GenerationDefaults

NEEDED = {True: ("libtpu",), False: ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13")}
"""Whether a chip is a TPU to the modules without which XLA cannot compile for it."""


INSTALL = (
    "for TPUs: pip install 'jax[tpu]', in JAX's version; for GPUs: pip install jax-cuda13-plugin "
    "jax-cuda13-pjrt, both in jaxlib's version, and nvidia-cuda-nvcc"
)


def prepare() -> None:
    """Tell JAX that no accelerator is here, before it looks for one. It looks once in a process."""
    os.environ |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # it would want a driver
        "TPU_SKIP_MDS_QUERY": "1",  # libtpu would ask Google's machines which TPU they have
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at a time
    }
    jax.config.update("jax_platforms", "cpu")


def lacking(chip: Chip) -> str | None:
    """Name the module whose absence keeps XLA from compiling for the chip; None: nothing lacks."""
    return next((name for name in NEEDED[chip.is_tpu] if not _is_there(name)), None)


def devices_of(machine: Machine) -> tuple[jax.Device, ...]:
    """Return the devices for which programs are compiled. ConfigError if they are more than
    `MOST_COMPILED`.
    """
    if machine.devices > MOST_COMPILED:
        raise ConfigError(
            f"for: programs are compiled for at most {MOST_COMPILED} devices, not {machine.devices}"
        )
    chip = machine.chip
    if chip.is_tpu:
        found = topologies.get_topology_desc(
            platform="tpu",
            topology_name=chip.target.topology(machine.devices),  # type: ignore[union-attr]  # a TPU
        )
    else:
        found = topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{machine.devices}", target_config=chip.target_config
        )
    return tuple(found.devices[: machine.devices])


def absent_backend(machine: Machine, options: EngineConfig) -> Backend:
    """Return what an engine on this machine would compute with."""
    options = dataclasses.replace(options, tensor_parallel_size=machine.devices)
    memory = DeviceMemory(machine.chip.usable_bytes, 0)
    return choose_backend(options, *devices_of(machine), memory=memory)


def model_of_shapes(
    config: ModelConfig, options: EngineConfig, backend: Backend, draft: ModelConfig | None = None
) -> ServedModel:
    """Make a model whose weights are shapes with their places on the backend's devices, and its draft of the
    same kind. ConfigError if the options do not suit it.
    """
    check_max_model_len(options, config.max_position_embeddings)
    config = cut_for(config, options, backend.mesh.size)
    config = config.for_context(options.max_model_len or config.max_position_embeddings)
    dtype = model_dtype(config, options.dtype)
    linear = backend.linear_format(dtype, options.quantization, is_encoder=config.encoder is not None)
    graphdef, shapes = abstract_model(config, dtype, linear)
    leaves: Any = placed_shapes(config, dtype, linear, backend.mesh)
    return ServedModel(
        name=config.architecture,
        architecture=config.architecture,
        graphdef=graphdef,
        weights=state_of(config, leaves, dtype, linear),
        cache=config.cache,
        dtype=dtype,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        defaults=GenerationDefaults(),
        text=None,
        skips_padding=linear.packed,
        is_native=nnx.merge(graphdef, shapes).is_native,
        hidden_size=config.hidden_size,
        reader=reader_of(config),
        vision=None if config.vision is None else vision_of(config.vision),
        draft=None if draft is None else _draft_of_shapes(draft, dtype, options, backend),
    )


def _draft_of_shapes(
    config: ModelConfig, dtype: np.dtype[np.generic], options: EngineConfig, backend: Backend
) -> DraftModel:
    """Make the draft of a model that is computed in this dtype."""
    config = cut(config, backend.mesh.size)
    config = config.for_context(options.max_model_len or config.max_position_embeddings)
    linear = backend.linear_format(dtype, options.quantization)
    graphdef, _ = abstract_model(config, dtype, linear)
    leaves: Any = placed_shapes(config, dtype, linear, backend.mesh)
    return DraftModel(
        name=config.architecture,
        graphdef=graphdef,
        weights=state_of(config, leaves, dtype, linear),
        cache=config.cache,
        vocab_size=config.vocab_size,
    )


def absent_programs(
    config: ModelConfig,
    options: EngineConfig,
    backend: Backend,
    *,
    kv_bytes: int,
    draft: ModelConfig | None = None,
) -> ProgramBuilder:
    """Return what makes the programs of an engine with a cache of so many bytes on each device. `draft`: the
    draft model, where the options name one; None: there is none.
    """
    model = model_of_shapes(config, options, backend, draft)
    options = dataclasses.replace(options, kv_cache_bytes=kv_bytes, show_progress=False)
    return _builder(model, options, backend)


def checkpoint_programs(model: str, options: EngineConfig, backend: Backend) -> ProgramBuilder:
    """Return what makes the programs with which an engine would serve "demo", a checkpoint directory, a GGUF
    file or a hub id with these options. Of weights only the headers are read. ConfigError if the options do
    not suit the model, and for what programs cannot be made of without the device.
    """
    if options.kv_cache_bytes is None and has_own_memory(backend.mesh.devices.flat[0]):
        raise ConfigError(
            "kv_cache_bytes: must be given, because only the device knows how much of its memory is free"
        )
    found = shapes_of_model(model, options, backend)
    if found.vision is not None:
        raise ConfigError(
            f"{found.architecture} reads images, and programs of such models are compiled where they run"
        )
    return _builder(with_whole_texts(found, options, backend), options, backend)


def _builder(model: ServedModel, options: EngineConfig, backend: Backend) -> ProgramBuilder:
    model, threads = laid_out(model, backend), options.threads or available_processors()
    resolved, shapes = longest_shapes(model, options, backend, threads=threads)
    check_adapters(model, resolved)
    check_draft(model, resolved)
    kv = kv_plan(model, resolved, shapes, device_bytes=None)
    shapes = dataclasses.replace(shapes, max_model_len=kv.max_model_len, num_snapshots=kv.num_snapshots)
    parts = (model.graphdef, model.weights, model.cache, shapes, backend)
    return builder_of_shapes(*parts, kv.num_pages, model.draft)


def compiled_temp_bytes(
    config: ModelConfig, machine: Machine, options: EngineConfig, draft: ModelConfig | None = None
) -> int:
    """Return the scratch memory of the largest program, as XLA reports it, with a cache of one row. `draft`:
    as `absent_programs` takes it. ConfigError, which says what to install, if XLA cannot compile for the chip
    here.
    """
    if missing := lacking(machine.chip):
        raise ConfigError(
            f"compile: {missing} is not installed, which compiles for {machine.chip.name}; {INSTALL}"
        )
    backend = absent_backend(machine, options)
    own = cut_for(config, options, machine.devices).cache
    if draft is not None:
        own = own.followed_by(cut(draft, machine.devices).cache)
    own = own.laid_out(backend.lanes)
    pages = -(-(options.max_model_len or config.max_position_embeddings) // options.page_size)
    pages += machine.devices  # each has as many of dealt pages as any other
    rows = options.max_num_seqs or backend.sizes.num_seqs
    kv_bytes = pages * own.page_bytes(options.page_size, np.dtype(np.float32)) + 2 * rows * own.slot_bytes
    return peak_temp_bytes(absent_programs(config, options, backend, kv_bytes=kv_bytes, draft=draft))


def name_of(job: ProgramKey | int | str) -> str:
    """Return what a program of `ProgramBuilder.jobs` is called."""
    if isinstance(job, ProgramKey):
        return job.name
    return f"choice_rows{job}" if isinstance(job, int) else job


_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>\S+) \(.*\{$")
_CALLED = re.compile(r"fusion\(.*calls=%(?P<name>[^,\s]+)")
_COPY = re.compile(
    r"= \(?\w+\[(?P<dims>[\d,]+)\](?P<layout>\S*) .*?\b"
    r"(?P<operation>copy|copy-start|transpose|convert|bitcast-convert)\("
)
_ON_CHIP = "S(1)"
"""In a layout: the array lies in a TPU's own memory, so the copy only fetches it."""


def copied(text: str, arrays: Iterable[jax.ShapeDtypeStruct]) -> list[str]:
    """Tell which arrays of these shapes a compiled program, as HLO, copies, converts or transposes as a whole
    in the device's memory. What happens within a fusion is not in memory.
    """
    wanted = {",".join(map(str, array.shape)) for array in arrays}
    fused = {match["name"] for match in _CALLED.finditer(text)}
    found, is_fused = set(), False
    for line in text.splitlines():
        if began := _COMPUTATION.match(line):
            is_fused = began["name"] in fused
            continue
        match = None if is_fused else _COPY.search(line)
        if match and match["dims"] in wanted and _ON_CHIP not in match["layout"]:
            found.add(f"{match['operation']} [{match['dims']}]")
    return sorted(found)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is not there
        return False
