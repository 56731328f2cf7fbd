"""Prompts and outputs may be longer than the pool: with a sliding window, a row gives back pages that it no
longer reads, and gets others for them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams
from penstock.runtime.config import CPU_SIZES, resolve
from penstock.runtime.errors import ExceedsKVCapacity
from penstock.runtime.execution.kv_sizing import plan_kv
from penstock.runtime.ops.cache_spec import CacheGroup
from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.scheduler_config import capacity_tokens
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.scheduler.scheduling import commit, dispatch, make

pytestmark = pytest.mark.ci

GOLDEN = Path(__file__).parents[2] / "golden" / "mistral_swa"
WINDOW = 32
PAGE_BYTES = 8 * 2 * 2 * 2 * 16 * 4  # positions * layers * key and value * heads * channels * bytes


def test_a_prompt_longer_than_the_pool_runs_in_a_few_pages():
    """The prompt has 9,000 tokens, and the pool holds 8,192. The window is 4,096 tokens, and a chunk takes
    512.
    """
    scheduler = make(
        max_num_batched_tokens=512, max_model_len=10_000, page_size=16, num_pages=512, sliding_window=4096
    )
    scheduler.add(
        Request("a", tuple(range(9000)), stopping=StoppingParams(max_tokens=500, ignore_eos=True)), 1
    )
    plans = [dispatch(scheduler)]
    most = 0
    while scheduler.has_work:
        commit(scheduler, plans[-1])
        most = max(most, scheduler.load().pages_used)
        if scheduler.has_work:
            plans.append(dispatch(scheduler))
    assert [row.num_tokens for plan in plans for row in plan.rows][:18] == [512] * 17 + [9000 - 17 * 512]
    assert len(plans) == 18 + 499
    assert most == (4096 + 512) // 16 + 1
    assert scheduler.totals().preemptions == 0


def test_two_long_prompts_share_a_pool_that_holds_their_windows():
    """A window of 8 and chunks of 8 need 5 pages of 4 for each request, however long its prompt.
    Nothing more is kept for the first, which gives back as many pages as it takes.
    """
    limits = {"sliding_window": 8, "max_num_batched_tokens": 16, "max_prefill_chunk": 8, "max_model_len": 200}
    for num_pages, num_rows in ((9, 1), (10, 2)):
        scheduler = make(num_pages=num_pages, **limits)
        for name in ("a", "b"):
            scheduler.add(Request(name, tuple(range(100)), stopping=StoppingParams(max_tokens=1)), 1)
        assert len(dispatch(scheduler).rows) == num_rows


@pytest.mark.parametrize(("num_pages", "fits"), [(3, False), (4, True)])
def test_a_window_that_does_not_fit_the_pool_is_refused(num_pages, fits):
    """A window of 8 may span three pages of 4, depending on where it begins, and the next position may need
    one more.
    """
    scheduler = make(num_pages=num_pages, sliding_window=8, max_model_len=200)
    request = Request("a", tuple(range(20)), stopping=StoppingParams(max_tokens=30, ignore_eos=True))
    if not fits:
        with pytest.raises(ExceedsKVCapacity, match="49 tokens"):
            scheduler.add(request, 1)
        return
    scheduler.add(request, 1)
    made = 0
    while scheduler.has_work:
        made += sum(len(output.token_ids) for output in commit(scheduler, dispatch(scheduler)))
    assert made == 30
    assert scheduler.totals().preemptions == 0


def test_the_context_is_not_cut_to_a_pool_that_holds_the_window():
    config = resolve(EngineConfig(kv_cache_bytes=100 * 10, page_size=4), CPU_SIZES)
    assert capacity_tokens(100, 4, None, 5000) == 400
    assert capacity_tokens(100, 4, 392, 5000) == 5000
    assert capacity_tokens(100, 4, 393, 5000) == 400
    for window, length in ((None, 401), (392, 5000), (393, 401)):
        plan = plan_kv(config, model_max_len=5000, groups=(CacheGroup(window, 10),), device_bytes=None)
        assert (plan.num_pages, plan.max_model_len) == ((100,), length)


def test_tokens_are_pytorchs_though_the_pool_is_shorter_than_the_prompt():
    cases = json.loads((GOLDEN / "expected.json").read_text())["cases"]
    num_pages = (WINDOW + 8) // 8 + 1
    longest = max(cases, key=lambda case: len(case["prompt"]))
    assert len(longest["prompt"]) > 8 * num_pages
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_prefill_chunk=8,
        page_size=8,
        max_model_len=256,
        kv_cache_bytes=num_pages * PAGE_BYTES,
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    engine = Engine.from_pretrained(str(GOLDEN), config)
    try:
        assert (engine.info.num_pages, engine.info.max_model_len) == (num_pages, 256)
        engine.start()
        for case in cases:
            stopping = StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True)
            made = engine.generate(
                case["prompt"], sampling=SamplingParams(temperature=0.0), stopping=stopping
            )
            assert list(made.token_ids) == case["tokens"]
        assert engine.load().pages_used == 0
    finally:
        engine.shutdown()
