"""Makes this process one of JAX's, which then has the devices of all processes of its group."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import jax

from penstock.runtime.config import ADAPTER_RANKS, EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import has_own_memory
from penstock.runtime.execution.cpu_threads import start_backends
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.following.facts import process_facts
from penstock.runtime.following.interface import MOST_CALL_BYTES, Facts, GroupOptions
from penstock.runtime.images.vision import Vision
from penstock.runtime.machine.processors import available_processors

_log = logging.getLogger(__name__)

_MEETING_S = 60
"""Seconds that JAX's processes have to find each other. They all run already when this begins."""


def joined(
    model: str, config: EngineConfig, options: GroupOptions, meet: Callable[[Facts], None]
) -> list[jax.Device]:
    """Meet the group, and return the devices of all its processes over which the model is cut, those of the
    leader first. Where each process has a stage, those of the first stage are the first, and the leader has
    the last stage. Call it before other code computes with JAX. ConfigError if the options do not fit a
    group.
    """
    check_options(config, options)
    meet(process_facts(model, config, options.processes))
    _join(options)
    size, has_stages = config.tensor_parallel_size or 1, config.pipeline_parallel_size > 1
    share = size if has_stages else size // options.processes
    devices = shares(
        start_backends(config.threads or available_processors(), share), share, options.processes
    )
    if has_stages:
        devices = [*devices[share:], *devices[:share]]
    if has_own_memory(devices[0]) and config.kv_cache_bytes is None:
        raise ConfigError(
            "kv_cache_bytes: must be given for a model on several processes, because the memory that is left "
            "on their devices differs"
        )
    return devices


def check_options(config: EngineConfig, options: GroupOptions) -> None:
    """Raise ConfigError if the engine's options do not fit those of a group."""
    if config.compiled is not None:
        raise ConfigError("compiled: is for one process; the processes of a group compile their programs")
    if config.pipeline_parallel_size > 1:
        if config.pipeline_parallel_size != options.processes:
            raise ConfigError(
                f"pipeline_parallel_size: must be 1 or the number of processes, {options.processes}, not "
                f"{config.pipeline_parallel_size}: each process has one stage"
            )
        return
    size = config.tensor_parallel_size
    if size is None or size % options.processes:
        raise ConfigError(
            f"tensor_parallel_size: must be a multiple of processes, {options.processes}, "
            f"not {'auto' if size is None else size}"
        )


def check_images(vision: Vision | None, encode_buckets: Sequence[int]) -> None:
    """Raise ConfigError if the largest image is too large for a call of a group."""
    if vision is None or not encode_buckets:
        return
    patches = encode_buckets[-1]
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(vision.inputs((), patches)))
    if num_bytes > MOST_CALL_BYTES:
        tokens = patches // vision.patches_per_token
        raise ConfigError(
            f"max_image_tokens: an image of {tokens} tokens is sent to the other processes of the group in "
            f"one call of {num_bytes / 1e6:.0f} MB, and a call has at most {MOST_CALL_BYTES / 1e6:.0f} MB: "
            f"at most {tokens * MOST_CALL_BYTES // num_bytes} tokens fit"
        )


def check_adapters(config: RunnerConfig) -> None:
    """Raise ConfigError if a place of an adapter on one device is too large for a call of a group."""
    for pool in config.adapter_shapes:
        num_bytes = pool.shape[1] * pool.dtype.itemsize
        if num_bytes > MOST_CALL_BYTES:
            most = config.adapter_rank * MOST_CALL_BYTES // num_bytes
            fits = (
                f"a rank of at most {most} fits"
                if most >= min(ADAPTER_RANKS)
                else "no rank fits; without adapter_experts a place is far smaller"
            )
            raise ConfigError(
                f"max_adapter_rank: what a device has of an adapter is sent to the other processes of the "
                f"group in one call of {num_bytes / 1e6:.0f} MB, and a call has at most "
                f"{MOST_CALL_BYTES / 1e6:.0f} MB: {fits}"
            )


def shares(devices: Sequence[jax.Device], share: int, processes: int) -> list[jax.Device]:
    """Return the first `share` devices of each process, in the order of the processes. ConfigError if one has
    fewer.
    """
    by_process = [[device for device in devices if device.process_index == i] for i in range(processes)]
    for number, own in enumerate(by_process):
        if len(own) < share:
            raise ConfigError(
                f"tensor_parallel_size: {share} devices are needed of each process, and process {number} has "
                f"{len(own)}"
            )
    return [device for own in by_process for device in own[:share]]


def _join(options: GroupOptions) -> None:
    # This service of JAX's would take SIGTERM, which belongs to the server.
    jax.config.update("jax_enable_preemption_service", False)
    assert options.coordinator is not None, "checked when the options were made"
    try:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process_id,
            cluster_detection_method="deactivate",
            # By default it would listen on all addresses of the machine, and it has no keys.
            coordinator_bind_address=options.coordinator,
            initialization_timeout=_MEETING_S,
            # JAX ends a process without a word if another is lost. The group has ended before that. But
            # where the leader is killed JAX notices at once, and aborts: `initialize` takes no callback.
            heartbeat_timeout_seconds=math.ceil(2 * options.group_timeout_s) + 10,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"coordinator: JAX's processes cannot meet at {options.coordinator}: {error}"
        ) from error
    _log.info("process %d of %d has met the others", options.process_id, options.processes)
