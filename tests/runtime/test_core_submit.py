"""Submitting: what grows with the prompt is done in the caller's thread, without the engine's lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest

from penstock.runtime.core import EngineCore
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.prefix_cache import PrefixCache
from penstock.runtime.request import CacheParams, Request, StoppingParams
from penstock.runtime.runner import ModelRunner
from penstock.runtime.scheduler import Scheduler, SchedulerConfig
from tests.support.collector import GREEDY, Collector
from tests.support.fake_runner import EOS, VOCAB, LazyRunner

PROMPT = tuple(range(40))
ONE = StoppingParams(1)


@pytest.fixture
def core() -> Iterator[EngineCore]:
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=60,
        page_size=4,
        num_pages=100,
        eos_token_ids=EOS,
        max_queued_requests=10,
    )
    core = EngineCore(cast("ModelRunner", LazyRunner(config)), Scheduler(config), vocab_size=VOCAB)
    yield core
    core.shutdown()


def test_a_prompt_is_hashed_without_the_lock(core, monkeypatch):
    """All of it, in `submit` or before it, and not once more by the engine's thread."""
    hashed: list[bool] = []
    make = PrefixCache._hash

    def noted(self: PrefixCache, data: bytes) -> bytes:
        is_free = core._lock.acquire(timeout=5)  # the engine's thread may have it for a moment
        if is_free:
            core._lock.release()
        hashed.append(is_free and threading.current_thread() is threading.main_thread())
        return make(self, data)

    monkeypatch.setattr(PrefixCache, "_hash", noted)
    sink = Collector()
    core.start()
    core.submit(Request("a", PROMPT, GREEDY, ONE), sink)
    sink.last("a")
    assert hashed == [True] * (1 + len(PROMPT) // 4)  # the root and every full page
    request = Request("b", PROMPT, GREEDY, ONE)
    prepared = core.prepare(request)
    assert len(hashed) == 2 * (1 + len(PROMPT) // 4)
    other = Collector()
    core.submit(request, other, prepared)
    last = other.last("b")
    assert hashed == [True] * (2 * (1 + len(PROMPT) // 4))
    assert last.timing is not None
    assert last.timing.cached_prompt_tokens == 36


def test_a_prepared_prompt_is_for_no_other_request(core):
    core.start()
    prepared = core.prepare(Request("a", PROMPT, GREEDY, ONE))
    for other in (
        Request("a", (*PROMPT[:-1], PROMPT[-1]), GREEDY, ONE),
        Request("a", PROMPT, GREEDY, ONE, cache=CacheParams("salt")),
    ):
        with pytest.raises(ValueError, match="another prompt"):
            core.submit(other, Collector(), prepared)


def test_ids_outside_the_vocabulary_are_told_by_submit(core):
    core.start()
    request = Request("a", (1, VOCAB, -1, 2**40), GREEDY, ONE)
    prepared = core.prepare(request)
    with pytest.raises(InvalidRequest) as caught:
        core.submit(request, Collector(), prepared)
    fields = [violation.field for violation in caught.value.violations]
    assert fields == [f"prompt_token_ids.ids[{i}]" for i in (1, 2, 3)]
