"""Sizes of the KV cache of models in which only some layers have a sliding window, by hand, and by rules that
hold for all budgets.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.config import CPU_SIZES, EngineConfig, ResolvedConfig, resolve
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.kv_sizing import KVPlan, plan_kv
from penstock.runtime.ops.cache_spec import CacheGroup, CacheSpec, PagedKV
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.scheduling.plan import StepResult
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.scheduler_config import GroupLimits, SchedulerConfig

CONFIG = resolve(
    EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, page_size=16, max_decode_steps=8), CPU_SIZES
)
GROUPS = (CacheGroup(None, 10), CacheGroup(64, 50))
"""A layer without a window, and five with one. A row needs 6 pages for the window: 4, one more because a
window may begin within a page, and one to write. A chunk of 32 tokens takes up to 3."""
USED = 4 * 6 + 2 * 3


def plan(budget: int, config: ResolvedConfig = CONFIG, model: int = 100_000) -> KVPlan:
    config = dataclasses.replace(config, kv_cache_bytes=budget)
    return plan_kv(config, model_max_len=model, groups=GROUPS, device_bytes=None)


def test_windows_of_all_rows_and_as_many_pages_for_prefixes() -> None:
    """Of a large budget the layers without a window get all the rest."""
    assert plan(60 * 1000) == KVPlan(((60 * 1000 - 50 * 2 * USED) // 10, 2 * USED), 16 * 5700 + 1)


def test_prefixes_get_at_most_half_of_what_is_left() -> None:
    """There is room for 40 pages of all layers. All rows use 30, and 5 are for prefixes."""
    assert plan(60 * 40).num_pages == ((2400 - 50 * 35) // 10, 35)


def test_a_small_budget_is_shared_as_if_all_layers_were_alike() -> None:
    assert plan(60 * 20 + 7).num_pages == (20, 20)


def test_rows_of_short_contexts_use_no_whole_window() -> None:
    """A request of 32 tokens has 2 pages."""
    assert plan(60 * 1000, model=32).num_pages[1] == 2 * (4 * 2 + 2 * 3)


def test_nothing_that_nobody_asked_for_is_taken() -> None:
    """4 rows of 640 tokens fill 160 pages."""
    made = plan_kv(CONFIG, model_max_len=640, groups=GROUPS, device_bytes=None)
    assert made == KVPlan((160, 2 * USED), 640)


def test_a_context_that_was_asked_for_takes_pages_of_the_windows() -> None:
    """1,600 tokens are 100 pages, and one request needs 6 + 3 pages for windows and a chunk."""
    config = dataclasses.replace(CONFIG, max_model_len=1600)
    assert plan(60 * 40).num_pages[0] < 100
    assert plan(60 * 40, config) == KVPlan((2400 // 10 - 9 * 5, 9), 1600)
    with pytest.raises(ConfigError, match=r"needs? 1450 bytes .* at least 1450"):
        plan(1449, config)
    assert plan(1450, config) == KVPlan((100, 9), 1600)


@given(budget=st.integers(60, 60_000), max_model_len=st.one_of(st.none(), st.integers(2, 5000)))
def test_no_budget_holds_less_than_without_groups(budget: int, max_model_len: int | None) -> None:
    """A budget that is refused says what would do, and that does."""
    config = dataclasses.replace(CONFIG, max_model_len=max_model_len)
    alike = budget // 60
    try:
        made = plan(budget, config)
    except ConfigError as error:
        assert max_model_len is not None
        assert max_model_len > 16 * alike
        found = re.search(r"kv_cache_bytes to at least (\d+)", str(error))
        assert found is not None
        assert plan(int(found[1]), config).max_model_len == max_model_len
        return
    assert made.num_pages[0] >= alike
    used = sum(pages * group.page_bytes for pages, group in zip(made.num_pages, GROUPS, strict=True))
    assert budget - 10 < used <= budget
    assert made.max_model_len >= min(max_model_len or 100_000, 16 * alike + 1)


# -- Gemma 3's pattern --

GEMMA_3_4B = CacheSpec(tuple(PagedKV(4, 256, None if i % 6 == 5 else 1024) for i in range(34)))
BF16 = np.dtype(np.float16)  # has as many bytes


def most_running(
    config: ResolvedConfig, groups: tuple[CacheGroup, ...], num_prompt: int
) -> tuple[KVPlan, int]:
    """How many requests with prompts of this length a scheduler runs at a time."""
    sizes = plan_kv(config, model_max_len=131_072, groups=groups, device_bytes=None)
    limits = [GroupLimits(n, group.window) for n, group in zip(sizes.num_pages, groups, strict=True)]
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            page_size=config.page_size,
            num_pages=limits[0].num_pages,
            further_groups=tuple(limits[1:]),
            eos_token_ids=frozenset(),
            max_queued_requests=100,
            prefix_cache_pages=0,
        )
    )
    for i in range(config.max_num_seqs):
        request = Request(f"r{i}", (1,) * num_prompt, stopping=StoppingParams(max_tokens=500))
        scheduler.add(request, 1)
    most = 0
    for _ in range(300):
        made = scheduler.schedule(2)
        assert made is not None
        most = max(most, scheduler.load().num_running)
        sampled = [(7,) * row.max_samples if row.samples else () for row in made.rows]
        scheduler.commit(made, StepResult(sampled, [()] * len(sampled)), 3)
    scheduler.check()
    assert scheduler.totals().preemptions == 0
    return sizes, most


def test_the_capacity_that_the_pages_tell_of_gemma_3() -> None:
    """4 GiB for Gemma 3 4B on a CPU: `docs/how-to/tune.md` has these numbers."""
    config = resolve(EngineConfig(kv_cache_bytes=4 << 30), CPU_SIZES)
    groups = GEMMA_3_4B.groups(config.page_size, BF16)
    assert [group.window for group in groups] == [None, 1024]
    alike = (CacheGroup(None, sum(group.page_bytes for group in groups)),)
    assert most_running(config, alike, 8000) == (KVPlan((481,), 30_785), 3)
    assert most_running(config, groups, 8000) == (KVPlan((997, 393), 63_809), 7)
