"""Every program of an engine, compiled for chips that are not there: `make test-accelerators`.

The models have the heads, widths and experts of published ones, one layer of each of their kinds, and a small
vocabulary. What is tried of each program: it compiles, no program copies the cache or a weight in memory, its
scratch memory is near what `penstock plan` estimates, decode steps attend by a kernel where there is one, and
on TPUs a kernel computes the experts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device_state import bytes_beside_arguments
from penstock.runtime.models.config import ExpertsConfig, ModelConfig
from penstock.runtime.models.registry import parse_config
from penstock.runtime.planning.absent import (
    absent_backend,
    absent_programs,
    copied,
    lacking,
    name_of,
    prepare,
)
from penstock.runtime.planning.chips import CHIPS, Machine, read_machine
from penstock.runtime.planning.plan import plan
from tests.support.models.configs import PUBLISHED, published

lacks = {kind: lacking(CHIPS[kind]) for kind in ("tpu-v5e", "h100")}
pytestmark = [
    pytest.mark.users_xla,
    pytest.mark.sweep,
    pytest.mark.skipif(any(lacks.values()), reason=f"{lacks} are not installed: make test-accelerators"),
]
VOCABULARY = 32_768
OPTIONS = EngineConfig(
    dtype="bfloat16",
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=1024,
    max_decode_steps=1,
    max_image_tokens=64,
    compilation_cache=None,
)
KERNEL = re.compile(r'^\s+(?:ROOT )?(%[\w.-]+) = .*custom_call_target="(?:tpu_custom_call|mosaic_gpu)', re.M)
"""How a kernel in Pallas is called."""
OF_EXPERTS = "%grouped_product"
"""What the name of the kernel for experts on TPUs begins with."""
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
LARGE = 1 << 20
"""Bytes from which on an array counts as one that must not be copied."""
CACHE_BYTES = 8 << 30
"""Of the cache. XLA moves a small one to a TPU's own memory, of up to 128 MiB, and back."""
SNAPSHOTS = 512
"""Of recurrent state, for the same reason."""
CHIP_BYTES = 128 << 20
"""Of a TPU's own memory."""
MODELS = (
    "Qwen3-4B",  # grouped queries, norms of queries and keys
    "gemma-2-9b",  # windows and soft caps, heads of 256
    "gpt-oss-20b",  # sinks, biases, experts in MXFP4, heads of 64
    "Qwen3-30B-A3B",  # experts by softmax
    "GLM-4.5-Air",  # experts by sigmoid, and a shared one
    "deepseek_v3",  # latent attention; the golden's small sizes
    "LFM2-1.2B",  # convolutions
    "Qwen3.5-0.8B",  # gated delta rule
    "granite-4.0-h-tiny",  # Mamba-2
    "Qwen3-VL-4B-Instruct",  # reads images
)
HEADS_FOR_EIGHT = {
    "deepseek_v3": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "granite-4.0-h-tiny": {"num_attention_heads": 24, "num_key_value_heads": 8},
}
"""What models have instead of heads that do not divide by eight."""
CHIPS_TRIED = ("tpu-v5e", "tpu-v6e", "tpu-v7x", "h100", "b200", "rtx5090")
CASES = (
    *itertools.product(MODELS, CHIPS_TRIED),
    # Latent attention of 576 channels. On an H100 its experts have a kernel, and its attention has none.
    *itertools.product(["DeepSeek-V2-Lite"], CHIPS_TRIED[:3]),
)
CANNOT: dict[tuple[str, str], str] = {}
"""What this version of JAX cannot compile: model and chip to a part of the error."""
SPARE_BYTES = 64 << 20
"""Scratch memory that a program may have beside twice what a plan estimates."""
Record = Callable[[str, object], None]
"""Writes a figure of a case into the report of pytest's `--junitxml FILE -o junit_family=xunit1`."""


def small(name: str, devices: int = 1) -> ModelConfig:
    """Return the model with one layer of each kind, in their order, and the small vocabulary. On eight
    devices it has heads that divide.
    """
    if (PUBLISHED / f"{name}.json").exists():
        data = published(name)
    else:
        data = json.loads((Path(__file__).parents[1] / "golden" / name / "config.json").read_text())
    config = parse_config(data | (HEADS_FOR_EIGHT.get(name, {}) if devices == 8 else {}))
    return dataclasses.replace(
        config,
        layers=tuple(dict.fromkeys(config.layers)),
        vocab_size=min(VOCABULARY, config.vocab_size),
        eos_token_ids=(1,),
    )


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return int(array.size * array.dtype.itemsize)


def collectives_of(machine: Machine, options: EngineConfig) -> set[str]:
    """Return the kinds of collectives that a program may have, by the table of `cutting`."""
    if machine.devices == 1:
        return set()
    return {"all-reduce", "all-gather", *(("all-to-all",) if options.context_parallel else ())}


def check(model: str, machine: Machine, record: Record, **ways: Any) -> None:
    """Compile every program, and list all that is wrong. `record` is told what was found. `ways`: the options
    that say how the model is cut.
    """
    config = small(model, machine.devices)
    snapshots = SNAPSHOTS if config.cache.has_state else 0
    options = dataclasses.replace(
        OPTIONS, tensor_parallel_size=machine.devices, state_snapshots=snapshots, **ways
    )
    backend = absent_backend(machine, options)
    kv_bytes = CACHE_BYTES + config.cache.state_bytes(options.max_num_seqs or 0, snapshots)
    builder = absent_programs(config, options, backend, kv_bytes=kv_bytes)
    most = 2 * plan(config, machine, options).temp_bytes + SPARE_BYTES
    size = backend.mesh.size
    caches = [(each.shape[0] // size, *each.shape[1:]) for each in jax.tree.leaves(builder.kv)]
    leaves = [each.shape[1:] if size > 1 else each.shape for each in builder.weights]
    dtypes = [each.dtype for each in (*jax.tree.leaves(builder.kv), *builder.weights)]
    own = list(map(jax.ShapeDtypeStruct, (*caches, *leaves), dtypes))
    if size > 1:  # a program is given its part of a leaf with an axis of one entry more
        own += [jax.ShapeDtypeStruct((1, *each.shape), each.dtype) for each in own[len(caches) :]]
    large = [array for array in own if _bytes(array) >= LARGE]
    has_kernel = any(
        backend.decodes_natively(
            jax.ShapeDtypeStruct((1, kept.num_queries, kept.head_dim), jnp.bfloat16),
            kept.arrays(1, OPTIONS.page_size, 1, jnp.dtype(jnp.bfloat16)),
            kept.value_dim,
        )
        for kept in builder.cache.paged
    )
    with_experts = sum(isinstance(layer.mlp, ExpertsConfig) for layer in config.layers)
    begun_s = time.process_time()
    wrong = []
    kinds: set[str] = set()
    scratches = []
    for job, make in builder.jobs().items():
        program = make()
        text = program.as_text() or ""
        # XLA may move what fits a TPU's own memory there and back.
        moves = {
            f"copy-start [{','.join(map(str, array.shape))}]" for array in own if _bytes(array) < CHIP_BYTES
        }
        if found := [each for each in copied(text, large) if each not in moves]:
            wrong.append(f"{name_of(job)} copies {', '.join(found)}")
        kernels = KERNEL.findall(text)
        of_experts = sum(each.startswith(OF_EXPERTS) for each in kernels)
        attends = len(kernels) > of_experts
        if isinstance(job, ProgramKey) and job.decode_only and attends != has_kernel:
            wrong.append(f"{name_of(job)} has {'no' if has_kernel else 'a'} kernel")
        if isinstance(job, ProgramKey) and of_experts != 2 * with_experts * machine.chip.is_tpu:
            wrong.append(f"{name_of(job)} has {of_experts} kernels for {with_experts} layers with experts")
        found_kinds = set(COLLECTIVE.findall(text))
        kinds |= found_kinds
        if others := found_kinds - collectives_of(machine, options):
            wrong.append(f"{name_of(job)} has {', '.join(sorted(others))}")
        scratches.append(scratch := bytes_beside_arguments(program))
        if scratch > most:
            wrong.append(f"{name_of(job)} has {scratch:,} bytes of scratch memory, and {most:,} are the most")
    record("programs", len(scratches))
    record("seconds of the processor", round(time.process_time() - begun_s))
    record("scratch bytes of the largest", max(scratches, default=0))
    record("collectives", " ".join(sorted(kinds)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "chip"), CASES)
def test_every_program_compiles(model: str, chip: str, record_property: Record) -> None:
    prepare()
    if error := CANNOT.get((model, chip)):
        with pytest.raises(Exception, match=error):
            check(model, read_machine(chip), record_property)
    else:
        check(model, read_machine(chip), record_property)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("gemma-2-9b", "tpu-v5e"),
        ("DeepSeek-V2-Lite", "tpu-v6e"),
        ("Qwen3-4B", "tpu-v7x"),
        ("Qwen3-4B", "tpu-v5e-4"),
    ],
)
def test_every_program_compiles_with_a_cache_of_int8(
    model: str, machine: str, record_property: Record
) -> None:
    """On TPUs, whose XLA would copy a cache of int8 that lies as on other platforms."""
    prepare()
    check(model, read_machine(machine), record_property, kv_cache_dtype="int8")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "machine", "ways"),
    [
        ("Qwen3-4B", "tpu-v5e-4", ()),
        ("Qwen3-4B", "h100-4", ()),
        ("gpt-oss-20b", "tpu-v5e-4", ("expert_parallel",)),
        ("GLM-4.5-Air", "tpu-v5e-4", ()),
        ("Qwen3-30B-A3B", "h100-4", ()),
        ("deepseek_v3", "tpu-v5e-4", ("expert_parallel", "context_parallel")),
        ("deepseek_v3", "h100-4", ("context_parallel",)),
        ("DeepSeek-V2-Lite", "tpu-v5e-4", ("expert_parallel",)),  # each device has all latents
        ("LFM2-1.2B", "tpu-v5e-4", ()),
        ("Qwen3.5-0.8B", "tpu-v5e-4", ()),
        ("granite-4.0-h-tiny", "h100-4", ()),
        # One of each kind of layer.
        ("Qwen3-4B", "tpu-v6e-8", ()),
        ("gemma-2-9b", "tpu-v5e-8", ()),
        ("gpt-oss-20b", "tpu-v6e-8", ()),
        ("Qwen3-30B-A3B", "tpu-v6e-8", ("expert_parallel",)),
        ("deepseek_v3", "tpu-v5e-8", ("expert_parallel", "context_parallel")),
        ("LFM2-1.2B", "tpu-v5e-8", ()),
        ("Qwen3.5-0.8B", "tpu-v5e-8", ()),
        ("granite-4.0-h-tiny", "tpu-v6e-8", ()),
        ("Qwen3-4B", "h100-8", ()),
        ("gemma-2-9b", "h100-8", ()),
        ("gpt-oss-20b", "h100-8", ("expert_parallel",)),
        ("Qwen3-30B-A3B", "h100-8", ()),
        ("deepseek_v3", "h100-8", ("context_parallel",)),
        ("LFM2-1.2B", "h100-8", ()),
        ("Qwen3.5-0.8B", "h100-8", ()),
        ("granite-4.0-h-tiny", "h100-8", ()),
    ],
)
def test_every_program_compiles_for_several_devices(
    model: str, machine: str, ways: tuple[str, ...], record_property: Record
) -> None:
    prepare()
    check(model, read_machine(machine), record_property, **dict.fromkeys(ways, True))
