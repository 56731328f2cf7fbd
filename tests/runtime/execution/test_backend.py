"""`choose_backend` decides what an engine computes with, from the platform and the options, and is the only
place that asks for the platform.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock.runtime.execution.backend
from penstock.runtime import building
from penstock.runtime.config import ACCELERATOR_SIZES, CPU_SIZES, SMALL_SIZES, EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend, check_required, choose_backend, mesh_of, most_devices
from penstock.runtime.execution.compilation import compile_program
from penstock.runtime.execution.device_state import holds_for_attention
from penstock.runtime.execution.kv_sizing import DeviceMemory
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.attention import LONG_SPAN, paged_attention
from penstock.runtime.ops.cache_spec import CacheSpec, LatentKV, PagedKV
from penstock.runtime.ops.experts import experts
from penstock.runtime.ops.gpu.attention import gpu_paged_attention
from penstock.runtime.ops.gpu.experts import gpu_experts
from penstock.runtime.ops.gpu.forms import ON_B200, ON_HOPPER, ON_RTX_50, GpuForm
from penstock.runtime.ops.native import huge_pages, library
from penstock.runtime.ops.native.attention import native_paged_attention
from penstock.runtime.ops.native.sample import native_sample, native_token_logprobs
from penstock.runtime.ops.recurrent.native import NATIVE_RECURRENT
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT
from penstock.runtime.ops.sampler import sample, token_logprobs
from penstock.runtime.ops.tpu.attention import tpu_paged_attention
from penstock.runtime.ops.tpu.experts import tpu_experts
from penstock.runtime.requests.request import StoppingParams
from tests.support.collector import GREEDY_PARAMS
from tests.support.models.toy import toy_engine, toy_model, toy_tokens

needs_kernels = pytest.mark.skipif(not library.available(), reason="no native library on this machine")
CPU = jax.devices("cpu")[0]
BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
GIB = 2**30


@dataclass(eq=False)
class Accelerator:
    """A stand-in for a device of another platform than the CPU."""

    stats: dict[str, int] | None
    platform: str = "gpu"
    id: int = 0
    process_index: int = 0
    device_kind: str = "none"
    compute_capability: str = "8.0"
    asked: list[None] = field(default_factory=list)

    def memory_stats(self) -> dict[str, int] | None:
        self.asked.append(None)
        return self.stats


def chosen(stats: dict[str, int] | None, **options: Any) -> Backend:
    return choose_backend(EngineConfig(**options), cast("Any", Accelerator(stats)))


@needs_kernels
def test_cpu_has_the_native_kernels_if_they_can_be_used() -> None:
    backend = choose_backend(EngineConfig(native="require"), CPU)
    assert backend.attention is native_paged_attention
    assert backend.sampler is native_sample
    assert (backend.logprobs, backend.zeros) == (native_token_logprobs, huge_pages.zeros)
    assert (backend.recurrent, backend.recurs_batch_invariantly) == (NATIVE_RECURRENT, True)
    assert backend.linear_format(BF16, "int8").packed
    assert not backend.linear_format(F32, "int8").packed
    assert backend.linear_format(F32, "none", is_encoder=True).float32
    for dtype, quantization, is_encoder in ((F32, "none", False), (F32, "int8", True), (BF16, "none", True)):
        assert not backend.linear_format(dtype, quantization, is_encoder=is_encoder).float32
    query, cache = jax.ShapeDtypeStruct((1, 1, 32), F32), jax.ShapeDtypeStruct((1, 2, 1, 16, 32), F32)
    keys_only = jax.ShapeDtypeStruct((1, 1, 1, 16, 32), F32)
    assert backend.attends_batch_invariantly(query, cache, None)
    assert backend.attends_batch_invariantly(query, keys_only, 16)
    assert not backend.attends_batch_invariantly(query, keys_only, 24)
    assert not backend.attends_batch_invariantly(query, jax.ShapeDtypeStruct((1, 2, 1, 8, 32), F32), None)


def test_cpu_without_kernels_computes_with_xla() -> None:
    backend = choose_backend(EngineConfig(native="off"), CPU)
    assert backend.attention is paged_attention
    assert backend.sampler is sample
    assert (backend.logprobs, backend.zeros) == (token_logprobs, jnp.zeros)
    assert (backend.recurrent, backend.recurs_batch_invariantly) == (XLA_RECURRENT, False)
    assert not backend.linear_format(BF16, "none").packed
    assert not backend.linear_format(F32, "none", is_encoder=True).float32
    assert (backend.sizes, backend.row_growth, backend.fixed_windows) == (CPU_SIZES, 4, False)
    assert backend.memory() is None
    assert list(backend.mesh.devices.flat) == [CPU]


def test_an_accelerator_computes_with_xla_and_reports_its_memory() -> None:
    backend = chosen({"bytes_limit": 80 * GIB, "bytes_in_use": GIB})
    assert isinstance(backend.attention, partial)
    assert (backend.attention.func, backend.attention.keywords) == (paged_attention, {"span": LONG_SPAN})
    assert backend.sampler is sample
    assert (backend.logprobs, backend.zeros) == (token_logprobs, jnp.zeros)
    assert (backend.recurrent, backend.recurs_batch_invariantly) == (XLA_RECURRENT, False)
    assert not backend.linear_format(BF16, "none").packed
    assert (backend.sizes, backend.row_growth, backend.fixed_windows) == (ACCELERATOR_SIZES, 2, True)
    assert backend.memory() == DeviceMemory(80 * GIB, GIB)
    assert chosen({"bytes_limit": 16 * GIB, "bytes_in_use": 0}).sizes == SMALL_SIZES
    silent = chosen(None)  # some devices do not report their memory
    assert (silent.sizes, silent.memory()) == (ACCELERATOR_SIZES, None)


def test_loops_on_a_gpu_need_no_host() -> None:
    """Whether XLA knows the option and its values is seen on any platform: it refuses others."""
    options = chosen(None).compiler_options
    assert options is not None
    assert "WHILE" in str(options["xla_gpu_enable_command_buffer"]).split(",")
    number = jax.ShapeDtypeStruct((), F32)
    assert compile_program(lambda x: x + 1, number, options=options)(np.float32(2)) == 3
    with pytest.raises(Exception, match="not a valid enum value"):
        compile_program(lambda x: x + 1, number, options=dict.fromkeys(options, "LOOP"))
    tpu = choose_backend(EngineConfig(), cast("Any", Accelerator(None, platform="tpu")))
    assert (tpu.compiler_options, choose_backend(EngineConfig(), CPU).compiler_options) == (None, None)


def test_a_tpu7x_gets_its_own_option() -> None:
    """`tests/accelerators` compiles with it: without it each step copies all experts."""
    device = cast("Any", Accelerator(None, platform="tpu", device_kind="TPU7x"))
    options = choose_backend(EngineConfig(), device).compiler_options
    assert options == {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}


@needs_kernels
def test_required_kernels_take_cpu_and_bfloat16() -> None:
    required = EngineConfig(native="require")
    backend = choose_backend(required, CPU)
    check_required(required, backend, BF16)
    for dtype in (F16, F32):
        check_required(EngineConfig(), backend, dtype)
        with pytest.raises(ConfigError, match=rf"^native: .*a model in {dtype} .*serve it in bfloat16"):
            check_required(required, backend, dtype)
    tpu = Accelerator(None, platform="tpu")
    with pytest.raises(ConfigError, match=r"^native: .*those for TPUs need one of TPU v5 lite.* is a none$"):
        choose_backend(required, cast("Any", tpu))
    with pytest.raises(ConfigError, match=r"^native: .*they are for CPUs, GPUs and TPUs, not quantum"):
        choose_backend(required, cast("Any", Accelerator(None, platform="quantum")))


def test_hopper_has_kernels_for_attention_and_experts() -> None:
    hopper = cast("Any", Accelerator(None, compute_capability="9.0"))
    query, cache = jax.ShapeDtypeStruct((1, 1, 128), BF16), jax.ShapeDtypeStruct((9, 2, 8, 64, 128), BF16)
    sizes: dict[str, Any] = {"dtype": BF16, "page_size": 64, "num_slots": 4}
    for native in ("auto", "require"):
        backend = choose_backend(EngineConfig(native=native), hopper)
        assert cast("Any", backend.attention).func is gpu_paged_attention
        assert backend.decodes_natively(query, cache, None)
        assert not backend.attends_batch_invariantly(query, cache, None)
        latents = CacheSpec((LatentKV(512, 64),)), CacheSpec((LatentKV(32, 16),))
        found = [
            holds_for_attention(backend.decodes_natively, each, kv_dtype=BF16, **sizes) for each in latents
        ]
        assert found == [True, False]
        assert (backend.sampler, backend.recurrent) == (sample, XLA_RECURRENT)
        linear = backend.linear_format(BF16, "int8")
        of_experts = cast("Any", linear.experts)
        assert not linear.packed
        assert (of_experts.func, of_experts.keywords) == (gpu_experts, {"form": ON_HOPPER})
    in_int8 = CacheSpec((PagedKV(8, 128, group=2),)).laid_out(backend.lanes)
    assert holds_for_attention(backend.decodes_natively, in_int8, kv_dtype=np.dtype(np.int8), **sizes)
    required = EngineConfig(native="require")
    check_required(required, backend, BF16)
    with pytest.raises(ConfigError, match=r"^native: .*a model in float32 .*serve it in bfloat16"):
        check_required(required, backend, F32)
    off = choose_backend(EngineConfig(native="off"), hopper)
    assert off.lanes == 1
    assert isinstance(off.attention, partial)
    assert off.linear_format(BF16, "none").experts is experts
    assert not off.decodes_natively(query, cache, None)


@pytest.mark.parametrize(("num_heads", "is_native"), [(64, True), (71, False)])
def test_a_kernel_is_asked_with_the_heads_that_the_model_has(num_heads: int, is_native: bool) -> None:
    """Falcon 7B has 71 heads of queries for its only head of keys, and Hopper's kernel has rows for 64."""
    falcon = {
        "architectures": ["FalconForCausalLM"],
        "hidden_size": 64 * num_heads,
        "num_attention_heads": num_heads,
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "bias": False,
        "alibi": False,
        "eos_token_id": 11,
    }
    cache = parse_config(falcon).cache
    hopper = cast("Any", Accelerator(None, compute_capability="9.0"))
    backend = choose_backend(EngineConfig(native="require"), hopper)
    sizes = {"page_size": 64, "num_slots": 4}
    found = holds_for_attention(backend.decodes_natively, cache, dtype=BF16, kv_dtype=BF16, **sizes)
    assert found == is_native


def test_tpus_have_kernels_for_attention_and_experts() -> None:
    tpu = cast("Any", Accelerator(None, platform="tpu", device_kind="TPU v5 lite"))
    query = jax.ShapeDtypeStruct((1, 1, 128), BF16)
    wide, narrow = (jax.ShapeDtypeStruct((9, 2, 8, 64, dim), BF16) for dim in (128, 64))
    backend = choose_backend(EngineConfig(native="require"), tpu)
    assert backend.attention is tpu_paged_attention
    assert [backend.decodes_natively(query, cache, None) for cache in (wide, narrow)] == [True, False]
    latent = CacheSpec((LatentKV(512, 64),)).laid_out(backend.lanes)
    sizes = {"page_size": 64, "num_slots": 4}
    assert holds_for_attention(backend.decodes_natively, latent, dtype=BF16, kv_dtype=BF16, **sizes)
    assert backend.linear_format(BF16, "none").experts is tpu_experts
    off = choose_backend(EngineConfig(native="off"), tpu)
    assert isinstance(off.attention, partial)
    assert off.linear_format(BF16, "none").experts is experts


@pytest.mark.parametrize(
    ("capability", "form", "widest"),
    [("10.0", ON_B200, 256), ("12.0", ON_RTX_50, 128)],
    ids=["B200", "RTX 50"],
)
def test_blackwell_has_the_kernels_where_jax_can_make_them(
    capability: str,
    form: GpuForm,
    widest: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blackwell = cast("Any", Accelerator(None, compute_capability=capability))
    query = jax.ShapeDtypeStruct((1, 1, 128), BF16)
    wide, narrow = (jax.ShapeDtypeStruct((9, 2, 8, 64, dim), BF16) for dim in (widest + 64, widest))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    backend = choose_backend(EngineConfig(native="require"), blackwell)
    attention = cast("Any", backend.attention)
    assert (attention.func, attention.keywords) == (gpu_paged_attention, {"form": form})
    assert [backend.decodes_natively(query, cache, None) for cache in (wide, narrow)] == [False, True]
    of_experts = cast("Any", backend.linear_format(BF16, "none").experts)
    assert (of_experts.func, of_experts.keywords) == (gpu_experts, {"form": form})
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with caplog.at_level("INFO"):
        assert cast("Any", choose_backend(EngineConfig(), blackwell).attention).func is paged_attention
    said = f"compute capability {capability} need JAX 0.11"
    assert said in caplog.text
    with pytest.raises(ConfigError, match=rf"^native: .*{re.escape(said)}"):
        choose_backend(EngineConfig(native="require"), blackwell)


def test_other_gpus_have_xla_alone_and_a_line_of_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ada = cast("Any", Accelerator(None, compute_capability="8.9"))
    with caplog.at_level("INFO"):
        assert cast("Any", choose_backend(EngineConfig(), ada).attention).func is paged_attention
    said = "one of the compute capabilities 9.0 (Hopper), 10.0 (B200), 12.0 (RTX 50), and this one has 8.9"
    assert said in caplog.text
    with pytest.raises(ConfigError, match=rf"^native: .*{re.escape(said)}"):
        choose_backend(EngineConfig(native="require"), ada)


def test_only_a_cpu_stores_16_bits_of_the_cache_as_integers() -> None:
    gpu = chosen(None)
    assert [gpu.kv_storage_dtype(each) for each in (BF16, F16, F32)] == [BF16, F16, F32]
    for native in ("auto", "off"):
        cpu = choose_backend(EngineConfig(native=native), CPU)
        assert [cpu.kv_storage_dtype(each) for each in (BF16, F32)] == [np.uint16, F32]


@pytest.mark.ci
def test_an_engine_computes_with_the_backend_that_it_is_given() -> None:
    """The backend is made by hand: programs as on an accelerator, an attention of this test, and little
    memory.
    """
    called: list[int] = []

    def attention(
        q: Any, k_new: Any, v_new: Any, kv: Any, meta: Any, options: Any
    ) -> tuple[jax.Array, jax.Array]:
        called.append(q.shape[0])
        return paged_attention(q, k_new, v_new, kv, meta, options)

    backend = Backend(
        mesh=mesh_of([CPU]),
        attention=attention,
        sizes=CPU_SIZES,
        memory=lambda: DeviceMemory(1 << 30, (1 << 30) - (1 << 22)),
    )
    engine = toy_engine(start=False, backend=backend, hbm_utilization=1.0)
    try:
        page_bytes = 4 * 2 * 4 * 4  # keys and values of 4 positions, 4 values of 4 bytes each
        assert (1 << 21) < engine.info.num_pages * page_bytes < (1 << 22)  # programs take some of it
        engine.start()
        made = engine.generate([5, 6, 7], sampling=GREEDY_PARAMS, stopping=StoppingParams(max_tokens=9))
        assert list(made.token_ids) == toy_tokens([5, 6, 7], 9)[: len(made.token_ids)]
        assert {4, 16} <= set(called)  # programs for decodes and for chunks
    finally:
        engine.shutdown()


def test_an_engine_without_a_backend_computes_where_the_leaves_of_all_stages_are() -> None:
    two = [Accelerator(None, id=number) for number in range(2)]
    leaves = [mock.Mock(devices=mock.Mock(return_value={device})) for device in reversed(two)]
    model = dataclasses.replace(toy_model(), weights=leaves)
    options = EngineConfig(pipeline_parallel_size=2)
    stopped = ConfigError("stopped here")
    with (
        mock.patch.object(building, "choose_backend", side_effect=stopped) as chosen_backend,
        pytest.raises(ConfigError, match="stopped here"),
    ):
        building.build(model, options)
    chosen_backend.assert_called_once_with(options, *two)


def test_no_other_module_asks_for_the_platform() -> None:
    root = Path(penstock.runtime.execution.backend.__file__).parents[1]
    asks = re.compile(r"\.platform\b|default_backend|[=!]= \"cpu\"")
    found = {
        f"{file.relative_to(root)}: {line.strip()}"
        for file in root.rglob("*.py")
        for line in file.read_text().splitlines()
        if asks.search(line) and "sys.platform" not in line and file.name != "backend.py"
    }
    naming = [line for line in found if "device_kind" in line]  # an engine reports the kind of its device
    assert len(naming) == 1
    assert found == set(naming)


def test_a_model_is_cut_over_as_many_devices_as_the_operator_says() -> None:
    devices = cast("Any", [Accelerator(None, platform="tpu") for _ in range(4)])
    assert [most_devices(devices), most_devices([CPU, CPU])] == [4, 1]
    with pytest.raises(ConfigError, match="tensor_parallel_size: 8 devices are needed, and 4 are here"):
        choose_backend(EngineConfig(tensor_parallel_size=8), *devices)


def test_each_stage_has_devices_of_its_own() -> None:
    """On accelerators the size of the cache must be given, which is said before any weights are read."""
    devices = jax.devices("cpu")
    options = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_bytes=GIB)
    four = [Accelerator({"bytes_limit": 80 * GIB, "bytes_in_use": 0}, id=number) for number in range(4)]
    backend = choose_backend(options, *cast("Any", four))
    assert [stage.devices.tolist() for stage in backend.stages] == [four[:2], four[2:]]
    assert backend.of_stage(1).devices == four[2:]
    with pytest.raises(ConfigError, match="kv_cache_bytes: must be given where pipeline_parallel_size"):
        choose_backend(dataclasses.replace(options, kv_cache_bytes=None), *cast("Any", four))
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 4 devices are needed, and 3 are here"):
        choose_backend(
            EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
            *cast("Any", [Accelerator(None, platform="tpu") for _ in range(3)]),
        )
    assert choose_backend(EngineConfig(), *devices).devices == devices[:1]


def test_a_process_of_a_group_has_the_stage_whose_devices_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is that of its own devices. Devices that are not here may name processes that are none."""
    options = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_bytes=GIB)
    four = [
        Accelerator({"bytes_limit": 1, "bytes_in_use": 0}, id=i, process_index=1 - i // 2) for i in range(4)
    ]
    backend = choose_backend(options, *cast("Any", four), memory=DeviceMemory(1, 0))
    assert (backend.own_stage, backend.mesh.devices.tolist()) == (None, four[:2])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    backend = choose_backend(options, *cast("Any", four))
    assert (backend.own_stage, backend.mesh.devices.tolist()) == (1, four[2:])
    assert backend.of_stage(1).own_stage is None
    of_one = [Accelerator(None, id=i) for i in range(4)]
    assert choose_backend(options, *cast("Any", of_one)).own_stage is None
    found = backend.memory()
    assert found is not None
    assert found.limit_bytes == 1
