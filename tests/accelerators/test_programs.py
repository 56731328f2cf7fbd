"""Every program of an engine, compiled for chips that are not there: `make test-accelerators`.

The models have the heads, widths and experts of published ones, one layer of each of their kinds, and a small
vocabulary. What is tried of each program: it compiles, it copies neither cache nor weights in memory, and
expands no weight in 8 bits there, its scratch memory is near what `penstock plan` estimates, and it calls the
kernels that docs/start/install.md promises, for each layer, and no others.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from penstock.runtime.config import EngineConfig
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device_state import bytes_beside_arguments
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.products import matmul_int8, matmul_transposed
from penstock.runtime.planning.absent import (
    absent_backend,
    absent_programs,
    copied,
    devices_of,
    lacking,
    name_of,
    prepare,
)
from penstock.runtime.planning.chips import CHIPS, Machine, read_machine
from penstock.runtime.planning.plan import plan
from tests.accelerators.hlo_bytes import widened
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
    max_decode_steps=2,  # with a loop, in which XLA chooses layouts by itself
    max_image_tokens=64,
    compilation_cache=None,
)
KERNEL = re.compile('custom_call_target="(?:tpu_custom_call|mosaic_gpu)[^\n]*[{ ]op_name="(?P<place>[^"]*)"')
"""How a kernel in Pallas is called, and the functions within which it stands."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class ForKernels:
    """What kernels may compute of a model, with one layer of each kind."""

    attends: int = 0
    """Layers with keys and values of their own, which latent attention has not."""
    head_dim: int = 0
    launches: int = 0
    """How often a decode step launches on a GPU for such a layer: for shares of rows, and where heads are of
    whole warpgroups again to merge them. With twelve queries to a head of keys half of the heads are taken at
    a time."""
    latents: int = 0
    """Layers with latent attention."""
    key_dim: int = 0
    """Channels of their keys, latent and rotary ones."""
    mixtures: int = 0
    inner: int = 0
    """Channels within an expert."""


FOR_KERNELS = {
    "Qwen3-4B": ForKernels(attends=1, head_dim=128, launches=2),
    "gemma-2-9b": ForKernels(attends=2, head_dim=256, launches=2),
    "gpt-oss-20b": ForKernels(attends=2, head_dim=64, launches=1, mixtures=2, inner=2880),
    "Qwen3-30B-A3B": ForKernels(attends=1, head_dim=128, launches=2, mixtures=1, inner=768),
    "GLM-4.5-Air": ForKernels(attends=2, head_dim=128, launches=4, mixtures=1, inner=1408),
    "deepseek_v3": ForKernels(latents=2, key_dim=48, mixtures=1, inner=48),
    "DeepSeek-V2-Lite": ForKernels(latents=2, key_dim=576, mixtures=1, inner=1408),
    "LFM2-1.2B": ForKernels(attends=1, head_dim=64, launches=1),
    "Qwen3.5-0.8B": ForKernels(attends=1, head_dim=256, launches=2),
    "granite-4.0-h-tiny": ForKernels(attends=1, head_dim=128, launches=2, mixtures=2, inner=512),
    "Qwen3-VL-4B-Instruct": ForKernels(attends=1, head_dim=128, launches=2),
}
ALL_HEADS = frozenset((64, 128, 192, 256))
HEADS_OF = {
    "tpu-v5e": ALL_HEADS,
    "tpu-v6e": ALL_HEADS,
    "tpu-v7x": ALL_HEADS,
    "h100": ALL_HEADS,
    "b200": ALL_HEADS,
    "rtx5090": frozenset((64, 128)),
}
"""Chips to the heads with which kernels attend, in pages of 64 tokens."""
INT8_CHUNKS_OF = {"h100": ALL_HEADS - {256}, "b200": ALL_HEADS - {256}, "rtx5090": frozenset((64,))}
"""GPUs to the heads of which kernels read int8 for chunks. XLA computes mixed steps of others."""
NEED_JAX_0_11 = ("b200", "rtx5090")
EXPERTS_OF = dict.fromkeys(("tpu-v5e", "tpu-v6e", "tpu-v7x"), 8) | dict.fromkeys(
    ("h100", "b200", "rtx5090"), 64
)
"""Chips to what the channels of experts in bfloat16 or int8 must be multiples of, on each device, to have a
kernel."""
HEADS_FOR_EIGHT = {
    "deepseek_v3": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "granite-4.0-h-tiny": {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128},
}
"""What models have instead of heads that do not divide by eight."""
CHIPS_TRIED = ("tpu-v5e", "tpu-v6e", "tpu-v7x", "h100", "b200", "rtx5090")
CASES = (
    *itertools.product(MODELS, CHIPS_TRIED),
    # Latent attention of 576 channels, for which an RTX 5090 has no room.
    *itertools.product(["DeepSeek-V2-Lite"], CHIPS_TRIED[:5]),
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


def _experts_in(weight: jax.Array, devices: int) -> int:
    """Return how many matrices a weight of all devices stacks on each of them."""
    own = weight.shape[1:] if devices > 1 else weight.shape
    return int(own[0]) if len(own) == 3 else 1


def collectives_of(machine: Machine, options: EngineConfig) -> set[str]:
    """Return the kinds of collectives that a program may have, by the table of `cutting`."""
    if machine.devices == 1:
        return set()
    return {"all-reduce", "all-gather", *(("all-to-all",) if options.context_parallel else ())}


def kernels_due(model: str, machine: Machine, options: EngineConfig, job: object) -> Counter[str]:
    """Return how often a program must launch each kernel, by docs/start/install.md."""
    own, chip, due = FOR_KERNELS[model], machine.chip.name, Counter[str]()
    if not isinstance(job, ProgramKey) or (chip in NEED_JAX_0_11 and jax.__version_info__ < (0, 11)):
        return due
    if own.head_dim in HEADS_OF[chip] and not options.context_parallel:
        if machine.chip.is_tpu:  # one kernel takes all rows of a step
            due["decode_attention" if job.decode_only else "chunk_attention"] = own.attends
        elif job.decode_only or options.kv_cache_dtype != "int8" or own.head_dim in INT8_CHUNKS_OF[chip]:
            due["decode_attention"] = own.attends * own.launches
            due["chunk_attention"] = 0 if job.decode_only else own.attends
    if own.latents and not options.context_parallel:
        if machine.chip.is_tpu:
            due["decode_attention" if job.decode_only else "latent_attention"] = own.latents
        elif chip in ("h100", "b200") and own.key_dim % 64 == 0:
            # Few rows have few blocks, so several share a row, and are merged; chunks likewise.
            due["latent_attention"] = own.latents * (2 if job.decode_only else 4)
    pieces = 1 if options.expert_parallel else machine.devices
    if options.quantization in ("none", "int8") and own.inner // pieces % EXPERTS_OF[chip] == 0:
        due["grouped_product"] = 2 * own.mixtures  # to the inner channels and back
    return +due


def kernels_of(text: str) -> Counter[str]:
    """Count the kernels that a compiled program calls, by the function of ours that each stands in."""
    return Counter(re.findall(r"jit\((\w+)\)", match["place"])[-1] for match in KERNEL.finditer(text))


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
    in_8_bits = [each for each in builder.weights if each.dtype.itemsize == 1]
    sizes = {each.size // (size * parts) for each in in_8_bits for parts in {1, _experts_in(each, size)}}
    sizes = {each for each in sizes if each >= LARGE}
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
        if found := widened(text, sizes):
            wrong.append(f"{name_of(job)} expands {', '.join(found)}")
        launched, due = kernels_of(text), kernels_due(model, machine, options, job)
        if launched != due:
            wrong.append(f"{name_of(job)} has the kernels {dict(launched)}, not {dict(due)}")
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
        ("Qwen3-4B", "h100"),
        ("gemma-2-9b", "h100"),
        ("Qwen3-4B", "b200"),
    ],
)
def test_every_program_compiles_with_a_cache_of_int8(
    model: str, machine: str, record_property: Record
) -> None:
    """In columns, as the kernels for TPUs and GPUs read it. XLA for TPUs would copy a cache of other rows."""
    prepare()
    check(model, read_machine(machine), record_property, kv_cache_dtype="int8")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("Qwen3-4B", "tpu-v5e"),
        ("Qwen3-4B", "h100"),
        ("Qwen3-4B", "b200"),
        ("Qwen3-30B-A3B", "tpu-v6e"),
        ("Qwen3-30B-A3B", "h100"),
        ("gpt-oss-20b", "tpu-v5e"),
        ("Qwen3-4B", "tpu-v5e-4"),
        ("Qwen3-4B", "h100-4"),
    ],
)
def test_every_program_compiles_in_int8(model: str, machine: str, record_property: Record) -> None:
    prepare()
    check(model, read_machine(machine), record_property, quantization="int8")


@pytest.mark.parametrize("chip", ["tpu-v5e", "h100"])
def test_a_weight_that_is_expanded_on_a_chip_is_found(chip: str) -> None:
    """The check above sees a weight that is made bfloat16 before its product, and nothing in the
    product that models have.
    """
    prepare()
    place = SingleDeviceSharding(devices_of(read_machine(chip))[0])

    def found(product: Callable[..., jax.Array]) -> list[str]:
        shapes = ((16, 2560), jnp.bfloat16), ((6144, 2560), jnp.int8), ((6144,), jnp.float32)
        given = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
        return widened(jax.jit(product).lower(*given).compile().as_text() or "", {6144 * 2560})

    def expanding(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
        return matmul_transposed(x, jax.lax.optimization_barrier(weight.astype(x.dtype))) * scale[None]

    assert found(matmul_int8) == []
    (wide,) = found(expanding)
    assert wide.endswith("bf16[6144,2560]")


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
