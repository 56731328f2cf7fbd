"""Sizing of the KV cache and of the context, by hand-computed figures."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.memory import DEFAULT_CPU_KV_BYTES, KVPlan, device_kv_bytes, plan_kv

CONFIG = EngineConfig(max_num_seqs=2, page_size=16)


def plan(
    config: EngineConfig = CONFIG, *, model: int = 64, page: int = 100, device: int | None = None
) -> KVPlan:
    return plan_kv(config, model_max_len=model, page_bytes=page, device_bytes=device)


def test_the_default_on_cpu_takes_no_more_pages_than_all_rows_can_fill() -> None:
    assert plan() == KVPlan(num_pages=8, max_model_len=64)  # 2 rows of 64 / 16 pages


def test_what_was_asked_for_is_taken_in_full() -> None:
    """Pages beyond what the rows can fill keep prefixes."""
    assert plan(dataclasses.replace(CONFIG, kv_cache_bytes=5050)) == KVPlan(num_pages=50, max_model_len=64)
    assert plan(device=5050) == KVPlan(num_pages=50, max_model_len=64)


def test_explicit_bytes_win_over_the_device_and_lower_the_context() -> None:
    config = dataclasses.replace(CONFIG, kv_cache_bytes=350)
    assert plan(config, device=10**9) == KVPlan(3, 49)  # 3 pages hold 48 positions; the last token needs none


def test_device_bytes_and_the_logged_default(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(device=250) == KVPlan(2, 33)
    with caplog.at_level("INFO"):
        assert plan(page=DEFAULT_CPU_KV_BYTES // 3) == KVPlan(3, 49)
    assert "kv_cache_bytes is not set: using 1.00 GiB" in caplog.text
    assert "max_model_len is 49, not the model's 64" in caplog.text


def test_an_explicit_context_is_kept_or_refused() -> None:
    config = dataclasses.replace(CONFIG, max_model_len=40, kv_cache_bytes=300)
    assert plan(config) == KVPlan(3, 40)
    with pytest.raises(ConfigError, match=r"needs? .*300 bytes.*at least 300"):
        plan(dataclasses.replace(config, kv_cache_bytes=200))
    with pytest.raises(ConfigError, match="more than the model's own 64"):
        plan(dataclasses.replace(config, max_model_len=65))
    with pytest.raises(ConfigError, match="less than one page"):
        plan(dataclasses.replace(config, kv_cache_bytes=99))


@dataclasses.dataclass
class FakeDevice:
    platform: str
    stats: dict[str, int] | None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def device_bytes(platform: str, stats: dict[str, int] | None, peak: int = 50) -> int | None:
    return device_kv_bytes(cast("jax.Device", cast("Any", FakeDevice(platform, stats))), 0.9, peak)


def test_what_a_device_has_left() -> None:
    assert device_bytes("gpu", {"bytes_limit": 1000, "bytes_in_use": 300}) == 550
    assert device_bytes("gpu", None) is None
    assert device_bytes("cpu", {"bytes_limit": 1000, "bytes_in_use": 0}) is None
    with pytest.raises(ConfigError, match="hbm_utilization"):
        device_bytes("gpu", {"bytes_limit": 1000, "bytes_in_use": 850})


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
