"""Sizes of the KV cache and of the context, compared with values computed by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.runtime.config import (
    ACCELERATOR_SIZES,
    CPU_SIZES,
    DefaultSizes,
    EngineConfig,
    ResolvedConfig,
    accelerator_sizes,
    resolve,
)
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.buckets import Buckets, ProgramKey
from penstock.runtime.execution.device_state import DeviceState, peak_temp_bytes
from penstock.runtime.execution.kv_sizing import (
    DEFAULT_CPU_KV_BYTES,
    DeviceMemory,
    KVPlan,
    device_kv_bytes,
    plan_kv,
)
from penstock.runtime.execution.program_set import ProgramBuilder
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.ops.cache_spec import CacheGroup
from penstock.runtime.requests.sampling import GenerationDefaults
from tests.support.models.toy import toy_backend, toy_engine, toy_model

CONFIG = resolve(EngineConfig(max_num_seqs=2, page_size=16), CPU_SIZES)


def plan(
    config: ResolvedConfig = CONFIG, *, model: int = 64, page: int = 100, device: int | None = None
) -> KVPlan:
    return plan_kv(config, model_max_len=model, groups=(CacheGroup(None, page),), device_bytes=device)


def test_the_default_on_cpu_takes_no_more_pages_than_all_rows_can_fill() -> None:
    assert plan() == KVPlan((8,), 64)  # 2 rows of 64 / 16 pages


@pytest.mark.parametrize(("rows", "pages"), [(1, 4), (2, 4), (4, 8)])
def test_the_default_may_count_on_short_requests_but_holds_a_long_one(rows: int, pages: int) -> None:
    """Each row counts 32 tokens, which are 2 pages; one row of 64 tokens needs 4."""
    config = dataclasses.replace(CONFIG, max_num_seqs=rows)
    groups = (CacheGroup(None, 100),)
    found = plan_kv(config, model_max_len=64, groups=groups, tokens_per_row=32, device_bytes=None)
    assert found == KVPlan((pages,), 64)


def test_the_cache_takes_all_the_bytes_that_were_asked_for() -> None:
    """Pages beyond those that the rows can fill keep prefixes."""
    assert plan(dataclasses.replace(CONFIG, kv_cache_bytes=5050)) == KVPlan((50,), 64)
    assert plan(device=5050) == KVPlan((50,), 64)


def test_each_device_has_equally_many_of_dealt_pages() -> None:
    """A page takes 100 bytes, and rows of 64 tokens fill 4 pages each. Over 3 devices 8 pages become 9, and
    50 that fit become 48.
    """
    groups = (CacheGroup(None, 100, pieces=3),)
    for asked_for, pages in ((None, 9), (5050, 48)):
        config = dataclasses.replace(CONFIG, kv_cache_bytes=asked_for)
        assert plan_kv(config, model_max_len=64, groups=groups, device_bytes=None) == KVPlan((pages,), 64)
    config = dataclasses.replace(CONFIG, kv_cache_bytes=599, max_model_len=64)
    with pytest.raises(ConfigError, match="kv_cache_bytes to at least 600"):
        plan_kv(config, model_max_len=64, groups=groups, device_bytes=None)


def test_explicit_bytes_win_over_the_device_and_lower_the_context() -> None:
    config = dataclasses.replace(CONFIG, kv_cache_bytes=350)
    assert plan(config, device=10**9) == KVPlan(
        (3,), 49
    )  # 3 pages hold 48 positions; the last token needs none


def test_device_bytes_and_the_logged_default(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(device=250) == KVPlan((2,), 33)
    with caplog.at_level("INFO"):
        assert plan(page=DEFAULT_CPU_KV_BYTES // 3) == KVPlan((3,), 49)
    assert "kv_cache_bytes is not set: the KV cache takes 1.00 GiB" in caplog.text
    assert "the context is 49 tokens, not the model's 64" in caplog.text


def test_an_explicit_context_is_kept_or_refused() -> None:
    config = dataclasses.replace(CONFIG, max_model_len=40, kv_cache_bytes=300)
    assert plan(config) == KVPlan((3,), 40)
    with pytest.raises(ConfigError, match=r"needs? .*300 bytes.*at least 300"):
        plan(dataclasses.replace(config, kv_cache_bytes=200))
    with pytest.raises(ConfigError, match="more than the model's own 64"):
        plan(dataclasses.replace(config, max_model_len=65))
    with pytest.raises(ConfigError, match="less than one page"):
        plan(dataclasses.replace(config, kv_cache_bytes=99))


def test_bytes_that_a_device_has_left() -> None:
    assert device_kv_bytes(DeviceMemory(1000, 300), 0.9, 50) == 550
    with pytest.raises(ConfigError, match="hbm_utilization"):
        device_kv_bytes(DeviceMemory(1000, 850), 0.9, 50)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_seqs", 4097),
        ("max_num_batched_tokens", 15),
        ("max_queued_requests", 0),
        ("max_prefill_chunk", 0),
        ("target_itl_s", -0.1),
        ("target_itl_s", 61.0),
        ("scheduling_policy", "lifo"),
        ("prefix_cache_pages", -1),
        ("state_snapshots", -1),
        ("state_snapshots", 65_537),
        ("max_decode_steps", 0),
        ("max_decode_steps", 65),
        ("decode_window_s", 0.0),
        ("decode_window_s", 61.0),
        ("page_size", 12),
        ("page_size", 0),
        ("page_size", 2048),
        ("kv_cache_bytes", 0),
        ("hbm_utilization", 0.0),
        ("hbm_utilization", 1.1),
        ("max_logprobs", -1),
        ("native", "on"),
        ("threads", 0),
        ("max_logprobs", 1025),
    ],
)
def test_options_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("options", "sizes", "resolved"),
    [
        ({}, CPU_SIZES, (16, 512, 16)),
        ({}, accelerator_sizes(80 * 2**30), (256, 8192, 64)),
        ({}, accelerator_sizes(None), (256, 8192, 64)),  # it does not report how much it has
        ({}, accelerator_sizes(16 * 2**30), (64, 2048, 64)),
        ({"max_num_seqs": 3}, CPU_SIZES, (3, 512, 3)),
        ({"max_num_seqs": 1000}, CPU_SIZES, (1000, 1000, 64)),
        ({"max_num_batched_tokens": 100}, ACCELERATOR_SIZES, (100, 100, 64)),
        ({"max_num_batched_tokens": 1000}, CPU_SIZES, (16, 1000, 16)),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 99, "feature_slots": 2},
            ACCELERATOR_SIZES,
            (8, 99, 2),
        ),
        ({"max_num_seqs": 8, "feature_slots": 100}, ACCELERATOR_SIZES, (8, 8192, 8)),
    ],
)
def test_defaults_depend_on_the_platform(
    options: dict[str, int], sizes: DefaultSizes, resolved: tuple[int, int, int]
) -> None:
    config = EngineConfig(page_size=8, **cast("Any", options))
    found = resolve(config, sizes)
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.feature_slots) == resolved
    assert found.page_size == 8
    assert resolve(found, sizes) == found


@pytest.mark.parametrize(
    ("asked", "defaults", "slots"),
    [
        (None, GenerationDefaults(temperature=0.7, top_p=0.8), 64),
        (None, GenerationDefaults(repetition_penalty=1.05), 256),
        (None, GenerationDefaults(presence_penalty=1.5), 256),
        (32, GenerationDefaults(repetition_penalty=1.05), 32),
    ],
)
def test_if_all_requests_have_penalties_all_rows_have_feature_slots(
    asked: int | None, defaults: GenerationDefaults, slots: int
) -> None:
    """This does not hold if the operator gives a number."""
    found = resolve(EngineConfig(feature_slots=asked), ACCELERATOR_SIZES, defaults=defaults)
    assert (found.max_num_seqs, found.feature_slots) == (256, slots)


def test_an_engine_uses_the_served_defaults(caplog: pytest.LogCaptureFixture) -> None:
    model = dataclasses.replace(toy_model(), defaults=GenerationDefaults(repetition_penalty=1.05))
    with caplog.at_level("INFO"):
        engine = toy_engine(model, start=False, max_num_seqs=80, max_num_batched_tokens=80)
    engine.shutdown()
    assert engine.config.feature_slots == 80
    assert "80 feature slots" in caplog.text


def test_the_share_of_what_jax_may_take_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    memory = DeviceMemory(60 * 2**30, 2**30)
    with caplog.at_level("INFO"):
        assert device_kv_bytes(memory, 0.5, 2**30) == 28 * 2**30
    assert "60.0 GiB" in caplog.text
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in caplog.text


def test_scratch_memory_is_that_of_the_largest_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds whatever kind of program it is. Results that are written to a donated argument take no
    memory.
    """
    model = toy_model()
    config = RunnerConfig(
        buckets=Buckets((16,), (2, 4)),
        max_num_seqs=4,
        max_model_len=64,
        page_size=4,
        dtype=np.dtype(np.float32),
        kv_dtype=np.dtype(np.float32),
        vocab_size=model.vocab_size,
        eos_token_ids=(),
    )
    state = DeviceState(model.graphdef, model.weights, model.cache, config, toy_backend())
    asked: list[ProgramKey | int] = []

    def needs(**sizes: int) -> Any:
        analysis = SimpleNamespace(**{f"{kind}_size_in_bytes": size for kind, size in sizes.items()})
        return SimpleNamespace(memory_analysis=lambda: analysis)

    sizes = {"forward": 5, "window": 5, "choice": 5}

    def program(name: str) -> Any:
        def make(_: ProgramBuilder, key: ProgramKey | int) -> Any:
            asked.append(key)
            return needs(temp=sizes[name], output=107, alias=100)

        return make

    for name in sizes:
        monkeypatch.setattr(ProgramBuilder, name, program(name))
    for name in sizes:
        sizes[name] += 10
        assert peak_temp_bytes(state.builder((64,))) == 22
        sizes[name] -= 10
    assert set(asked) == {ProgramKey(16, 4), ProgramKey(4, 4, True, True), 4}
    asked.clear()
    generates_nothing = dataclasses.replace(config, buckets=Buckets((16,), (4,), decodes=False))
    builder = dataclasses.replace(state.builder((64,)), config=generates_nothing)
    assert peak_temp_bytes(builder) == 12
    assert set(asked) == {ProgramKey(16, 4), 4}
    state.free()
