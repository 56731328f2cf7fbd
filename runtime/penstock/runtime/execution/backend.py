"""What an engine computes with: one value, chosen once when the engine starts and handed to whatever needs
it.

The platform decides which implementation of an operation programs call, how weights are stored, which
programs there are, which defaults options have, and what is known about the device's memory. All of that is
decided here; no other module asks which platform it runs on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from penstock.runtime.config import CPU_SIZES, DefaultSizes, EngineConfig, accelerator_sizes
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.buckets import CPU_ROW_GROWTH, ROW_GROWTH
from penstock.runtime.execution.cpu_threads import check_pool, parts_of_loops
from penstock.runtime.execution.kv_sizing import DeviceMemory
from penstock.runtime.execution.program_store import processor
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.load_rules import AXIS
from penstock.runtime.ops.adapters import WriteRow, write_row
from penstock.runtime.ops.attention import LONG_SPAN, SHORT_SPAN, AttentionOp, paged_attention
from penstock.runtime.ops.cache_spec import TPU_LANES
from penstock.runtime.ops.codes import CodeForm
from penstock.runtime.ops.dealt_pages import dealt_attention
from penstock.runtime.ops.device_arrays import ZerosOf
from penstock.runtime.ops.experts import ExpertsOp, experts
from penstock.runtime.ops.gpu.forms import FORMS, GpuForm
from penstock.runtime.ops.kv_rows import GPU_LANES, kv_storage_dtype
from penstock.runtime.ops.native import attention as attention_kernels
from penstock.runtime.ops.native import huge_pages, library
from penstock.runtime.ops.native.adapter_packing import native_write_row
from penstock.runtime.ops.native.attention import native_paged_attention
from penstock.runtime.ops.native.sample import native_sample, native_token_logprobs
from penstock.runtime.ops.recurrent.native import NATIVE_RECURRENT
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT, RecurrentOps
from penstock.runtime.ops.sampler import (
    LogprobsOp,
    SamplerOp,
    sample,
    token_logprobs,
)

log = logging.getLogger(__name__)

ArrayShape = jax.ShapeDtypeStruct
AttentionTest = Callable[[ArrayShape, ArrayShape, int | None], bool]
"""Says something of attention for queries [T, H, D] and a layer's cache of these shapes and dtypes, and with
this `value_dim`."""

GPU_OPTIONS: Mapping[str, str | bool] = MappingProxyType(
    {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,"
        "CONDITIONAL,WHILE"
    }
)
"""XLA's defaults and WHILE: a loop becomes a part of a CUDA graph. Otherwise the host reads the condition of
each iteration back and launches the next one, which took half the time of a decode step on an H200, in the
loop over keys of each layer (bench/RESULTS.md, "On an H200").
"""
TPU7X = "TPU7x"
TPUS = ("TPU v5 lite", "TPU v5", "TPU v6 lite", TPU7X)
"""The TPUs, as JAX names their kinds, for which the kernel was compiled."""
TPU7X_OPTIONS: Mapping[str, str | bool] = MappingProxyType(
    {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
)
"""On this generation XLA wants what a loop reads in 16 bits in tiles of 16 rows, and arguments of a program
in tiles of 8. So each step would copy all experts, which are read in a loop. With this option all tiles have
8 rows.
"""


_LONG_ATTENTION = partial(paged_attention, span=LONG_SPAN)


def _never(query: ArrayShape, cache: ArrayShape, value_dim: int | None) -> bool:
    return False


def _as_it_is(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    return dtype


def _no_memory() -> DeviceMemory | None:
    return None


def _no_huge_pages(arrays: Sequence[jax.Array]) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Made by `choose_backend`. The fields' defaults are those of plain XLA on an accelerator."""

    mesh: Mesh
    """The devices over which the model is cut (`cutting`), along the axis `AXIS`. Where its layers are cut
    into stages, those of the first one that this process has."""
    stages: tuple[Mesh, ...] = ()
    """The devices of each stage, of a model whose layers are cut into stages; () for one that is not."""
    own_stage: int | None = None
    """The number of the one stage that this process has, where each process of a group has one; None: this
    process takes part in all that there is."""
    attention: AttentionOp = _LONG_ATTENTION
    attends_batch_invariantly: AttentionTest = _never
    """Whether the bits that `attention` gives a token depend on its own row alone."""
    decodes_natively: AttentionTest = _never
    """Whether `attention` calls a kernel of ours in decode steps."""
    needs_all_native: bool = True
    """Whether native="require" wants all of a model in kernels, and not only the attention of its decode
    steps, as on GPUs."""
    native_dtype: np.dtype[np.generic] | None = None
    """The dtype of the models that kernels compute; None: there are no kernels."""
    kernels_cannot: str = ""
    """What to tell those who require kernels for a model that these cannot compute."""
    kv_storage_dtype: Callable[[np.dtype[Any]], np.dtype[Any]] = _as_it_is
    """What keys and values in a dtype are stored in."""
    experts: ExpertsOp = experts
    """Computes mixtures of experts whose weights are not packed."""
    lanes: int = 1
    """See `CacheSpec.laid_out`."""
    recurrent: RecurrentOps = XLA_RECURRENT
    recurs_batch_invariantly: bool = False
    """Whether the bits that `recurrent` gives a token depend on its own row alone, in sizes in which the
    layers call themselves native."""
    sampler: SamplerOp = sample
    logprobs: LogprobsOp = token_logprobs
    """Computes the log-probabilities of a prompt's tokens."""
    packed_dtype: np.dtype[np.generic] | None = None
    """Models in this dtype have their linear weights packed for the native kernels; None: no model has."""
    compiler_options: Mapping[str, str | bool] | None = None
    """XLA's options for every program, beside its defaults."""
    row_growth: int = ROW_GROWTH
    """See `Buckets.default`."""
    fixed_windows: bool = True
    """Whether a window of decode steps has a program for each length, rather than one program for all
    lengths."""
    sizes: DefaultSizes
    """Default sizes of the running batch, if the operator chose none."""
    memory: Callable[[], DeviceMemory | None] = _no_memory
    """How much of the device's memory may be used, and is used now; None if the device does not report it."""
    host_memory: str | None = "pinned_host"
    """JAX's name of the memory to which weights are moved to free the device's; None: they are on the host
    anyway."""
    keeps_programs: bool = False
    """Whether compiled programs and sets of them are kept on disk by `program_store`, which was tried on CPUs
    only. JAX's own cache has those of others: with it XLA also keeps what it has measured on a GPU."""
    zeros: ZerosOf = jnp.zeros
    """What the cache's arrays are made with. Those of the native kernels begin on huge pages."""
    write_row: WriteRow = write_row
    """Writes an adapter to its slot."""
    use_huge_pages: Callable[[Sequence[jax.Array]], object] = _no_huge_pages
    """Called with arrays that stay for long. On CPU, their memory is asked to be of huge pages."""

    @property
    def platform_name(self) -> str:
        """JAX's name of the platform, such as "cpu", for those who report it. Decisions are made here."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def devices(self) -> list[jax.Device]:
        """All devices, those of the first stage first."""
        return [device for mesh in self.stages or (self.mesh,) for device in mesh.devices.flat]

    def of_stage(self, number: int) -> Backend:
        """Return the same on the devices of one stage alone."""
        return replace(self, mesh=self.stages[number], stages=(), own_stage=None)

    def device_facts(self) -> dict[str, str]:
        """Tell what is known of the devices that programs depend on, whether they are here or not. The name
        of a GPU is not among it: XLA gives one that is not here the name that it was told.
        """
        devices, name = list(self.mesh.devices.flat), self.platform_name
        first = devices[0]
        places = [getattr(device, "coords", None) if name == "tpu" else None for device in devices]
        return {
            "the platform": name,
            "the kind of device": f"capability {first.compute_capability}"
            if name == "gpu"
            else first.device_kind,
            "the processor": processor() if name == "cpu" else "",
            "the threads and processors": parts_of_loops() if name == "cpu" else "",
            "the devices": ", ".join(str(device.id) for device in devices),
            "the places of the devices": ", ".join(map(str, places)),
        }

    def linear_format(
        self, dtype: np.dtype[np.generic], quantization: str, *, is_encoder: bool = False
    ) -> LinearFormat:
        """Tell how the linear weights of a model in `dtype` are stored."""
        has_kernels, is_whole = self.packed_dtype is not None, quantization == "none"
        return LinearFormat(
            packed=dtype == self.packed_dtype,
            int8=quantization == "int8",
            float32=has_kernels and is_encoder and is_whole and dtype == np.float32,
            codes=CodeForm(bits=4, zeros=False) if quantization == "int4" else None,
            experts=self.experts,
        )


def choose_backend(config: EngineConfig, *devices: jax.Device, memory: DeviceMemory | None = None) -> Backend:
    """Choose the backend of an engine on the first of these devices: as many as `tensor_parallel_size` says,
    or one, for each stage. This also limits the native kernels to the engine's threads. `memory` is that of
    accelerators that are not there, for which programs are compiled all the same; others tell it themselves.

    Raises ConfigError if there are too few devices, if the native kernels are required and cannot be used,
    and if nobody says how large the cache is on accelerators that have stages.
    """
    size, num_stages = config.tensor_parallel_size or 1, config.pipeline_parallel_size
    if size * num_stages > len(devices):
        by = "tensor_parallel_size" if num_stages == 1 else "pipeline_parallel_size"
        raise ConfigError(
            f"{by}: {size * num_stages} devices are needed, and {len(devices)} are here; lower it, or "
            "start the engine before other code uses JAX, because JAX makes a CPU's devices only once"
        )
    if config.context_parallel and config.native == "require":
        raise ConfigError("native: require does not go with context_parallel, whose attention XLA computes")
    begins = range(0, size * num_stages, size)
    own = _own_stage([devices[begin] for begin in begins])
    found = _of_platform(config, devices[(own or 0) * size :][:size], memory)
    if num_stages > 1:
        if config.kv_cache_bytes is None and found.memory() is not None:
            raise ConfigError(
                "kv_cache_bytes: must be given where pipeline_parallel_size is above 1, because the memory "
                "that is left on the devices of the stages differs"
            )
        stages = tuple(mesh_of(devices[begin : begin + size]) for begin in begins)
        found = replace(found, stages=stages, own_stage=own)
    return _with_dealt_pages(found) if config.context_parallel else found


def _own_stage(firsts: Sequence[jax.Device]) -> int | None:
    """See `Backend.own_stage`. `firsts`: the first device of each stage."""
    processes = [device.process_index for device in firsts]
    # One process has all stages, also of a program that is one of several processes of JAX's. And devices
    # that are not here may name processes that are not there.
    if len(set(processes)) == 1 or jax.process_count() == 1:
        return None
    return processes.index(jax.process_index())


def _of_platform(config: EngineConfig, devices: Sequence[jax.Device], memory: DeviceMemory | None) -> Backend:
    """Make the backend on all of these devices, see `choose_backend`."""
    device, mesh, size = devices[0], mesh_of(devices), len(devices)
    uses_kernels = _uses_kernels(config, device)
    if device.platform != "cpu":
        tells_memory = _memory_of(devices) if memory is None else lambda: memory
        now = tells_memory()
        on_accelerator = Backend(
            mesh=mesh,
            sizes=accelerator_sizes(None if now is None else now.limit_bytes),
            memory=tells_memory,
            compiler_options=_compiler_options(device),
            lanes=TPU_LANES if device.platform == "tpu" else 1,
        )
        if not uses_kernels:
            return on_accelerator
        if device.platform == "tpu":
            return _with_tpu_kernels(on_accelerator)
        return _with_gpu_kernels(on_accelerator, FORMS[capability_of(device)])
    threads = config.threads or available_processors()
    check_pool(threads)
    on_xla = Backend(
        mesh=mesh,
        attention=paged_attention,
        row_growth=CPU_ROW_GROWTH,
        fixed_windows=False,
        kv_storage_dtype=kv_storage_dtype,
        sizes=CPU_SIZES,
        host_memory=None,
        keeps_programs=True,
        use_huge_pages=huge_pages.advise,
    )
    if not uses_kernels:
        return on_xla
    library.limit_threads(threads)
    return replace(
        on_xla,
        attention=native_paged_attention,
        attends_batch_invariantly=attention_kernels.supports,
        decodes_natively=attention_kernels.supports,
        native_dtype=np.dtype(jnp.bfloat16),
        kernels_cannot="native: the kernels are required, but cannot compute all of this model: they take a "
        "page_size in multiples of 16, heads of 32, inputs of products of 64 and outputs of 16",
        recurrent=NATIVE_RECURRENT,
        recurs_batch_invariantly=True,
        sampler=native_sample,
        logprobs=native_token_logprobs,
        # On several devices the kernel would make what all of them have together, on each of them.
        zeros=huge_pages.zeros if size == 1 else jnp.zeros,
        write_row=native_write_row,
        packed_dtype=np.dtype(jnp.bfloat16),
    )


def _with_dealt_pages(backend: Backend) -> Backend:
    """Give a backend the attention of a cache whose pages are dealt over the devices. XLA computes it, and
    bits depend on which pages a request has.
    """
    span = SHORT_SPAN if backend.platform_name == "cpu" else LONG_SPAN
    return replace(
        backend,
        attention=partial(dealt_attention, axis=AXIS, pieces=backend.mesh.size, span=span),
        attends_batch_invariantly=_never,
        decodes_natively=_never,
    )


def most_devices(devices: Sequence[jax.Device]) -> int:
    """Say over how many of these devices a model is cut unless an operator says it. Those of a CPU share its
    processors, so nothing is gained there.
    """
    return 1 if devices[0].platform == "cpu" else len(devices)


def has_own_memory(device: jax.Device) -> bool:
    """Say whether a device has memory apart from the host's."""
    return bool(device.platform != "cpu")


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """Make a mesh of these devices, over which a model is cut."""
    return Mesh(np.array(devices), (AXIS,))


def lacking_kernels(asked: str, dtype: np.dtype[np.generic], backend: Backend) -> np.dtype[np.generic] | None:
    """Return the dtype that the kernels compute, where a checkpoint's own is another and nobody asked for
    that; else None.
    """
    return backend.packed_dtype if asked == "auto" and backend.packed_dtype != dtype else None


def check_required(config: EngineConfig, backend: Backend, dtype: np.dtype[np.generic]) -> None:
    """Raise ConfigError if the native kernels are required and cannot compute everything in this dtype."""
    if config.native == "require" and dtype != backend.native_dtype:
        raise ConfigError(
            "native: the kernels are required, and cannot be used: "
            f"a model in {dtype} is computed by XLA; serve it in bfloat16"
        )


def _with_gpu_kernels(backend: Backend, form: GpuForm) -> Backend:
    # Imported here, because Pallas for GPUs takes a second, which nobody else should wait for.
    from penstock.runtime.ops.gpu import attention  # noqa: PLC0415
    from penstock.runtime.ops.gpu.experts import gpu_experts  # noqa: PLC0415

    return replace(
        backend,
        attention=partial(attention.gpu_paged_attention, form=form),
        experts=partial(gpu_experts, form=form),
        decodes_natively=partial(attention.supports, form=form),
        needs_all_native=False,
        native_dtype=np.dtype(jnp.bfloat16),
        lanes=GPU_LANES,
        kernels_cannot="native: the kernels are required, but cannot compute this model's attention: they "
        f"take keys and values in bfloat16 or int8, {attention.sizes_supported(form)}, of which at most 64 "
        f"may read the same head of keys; and of latent attention {attention.latents_supported(form)}",
    )


def _with_tpu_kernels(backend: Backend) -> Backend:
    # Imported here, because Pallas for TPUs takes a second, which nobody else should wait for.
    from penstock.runtime.ops.tpu.attention import supports, tpu_paged_attention  # noqa: PLC0415
    from penstock.runtime.ops.tpu.experts import tpu_experts  # noqa: PLC0415

    return replace(
        backend,
        attention=tpu_paged_attention,
        experts=tpu_experts,
        decodes_natively=supports,
        needs_all_native=False,
        native_dtype=np.dtype(jnp.bfloat16),
        kernels_cannot="native: the kernels are required, but cannot compute this model's attention: they "
        "take a page_size in multiples of 16, and of 32 with kv_cache_dtype int8",
    )


def _uses_kernels(config: EngineConfig, device: jax.Device) -> bool:
    """Say whether programs for the device call kernels of ours."""
    if config.native == "off":
        return False
    problem = None
    if device.platform == "cpu":
        try:
            library.load(config.native_folder)
        except library.NotAvailable as error:
            problem = str(error)
    elif device.platform == "tpu":
        if device.device_kind not in TPUS:
            problem = f"those for TPUs need one of {', '.join(TPUS)}, and this one is a {device.device_kind}"
            log.info("TPU kernels are not used: %s", problem)
    elif device.platform != "gpu":
        problem = f"they are for CPUs, GPUs and TPUs, not {device.platform}"
    elif (form := FORMS.get(capability := capability_of(device))) is None:
        known = ", ".join(f"{each} ({form.name})" for each, form in FORMS.items())
        problem = (
            f"those for GPUs need one of the compute capabilities {known}, and this one has {capability}"
        )
        log.info("GPU kernels are not used: %s", problem)
    elif form.by_warps and jax.__version_info__ < (0, 11):
        problem = f"those for compute capability {capability} need JAX 0.11, and this is {jax.__version__}"
        log.info("GPU kernels are not used: %s", problem)
    if problem is not None and config.native == "require":
        raise ConfigError(f"native: the kernels are required, and cannot be used: {problem}")
    return problem is None


def _compiler_options(device: jax.Device) -> Mapping[str, str | bool] | None:
    if device.platform == "gpu":
        return GPU_OPTIONS
    return TPU7X_OPTIONS if device.device_kind == TPU7X else None


def capability_of(device: jax.Device) -> str:
    """Return a GPU's compute capability, as `FORMS` has it; "none" for other devices."""
    return str(getattr(device, "compute_capability", "none"))


def _memory_of(devices: Sequence[jax.Device]) -> Callable[[], DeviceMemory | None]:
    """Tell the memory of the device of this process that has the least left, because all get arrays of equal
    sizes.
    """

    own = [device for device in devices if device.process_index == jax.process_index()]

    def memory() -> DeviceMemory | None:
        told = [device.memory_stats() for device in own]
        if not all(stats and "bytes_limit" in stats for stats in told):
            return None
        fullest = min(told, key=lambda stats: stats["bytes_limit"] - stats["bytes_in_use"])
        return DeviceMemory(fullest["bytes_limit"], fullest["bytes_in_use"])

    return memory
