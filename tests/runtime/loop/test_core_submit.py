"""In `submit`, the work that grows with the prompt is done on the caller's thread, without the engine's
lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.requests import checks
from penstock.runtime.requests.request import CacheParams, Request, StoppingParams, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.prefix_cache import PrefixCache
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.collector import GREEDY, Collector
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner

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
    core = EngineCore(LazyRunner(config), Scheduler(config), vocab_size=VOCAB)
    yield core
    core.shutdown()


def test_a_prompt_is_hashed_without_the_lock(core, monkeypatch):
    """All of it is hashed in `submit` or before it, and the engine's thread does not hash it again."""
    hashed: list[bool] = []
    make = PrefixCache._hash

    def noted(self: PrefixCache, data: bytes) -> bytes:
        is_free = core.guard.lock.acquire(timeout=60)  # the engine's thread may hold it for a moment
        if is_free:
            core.guard.lock.release()
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


def test_submit_refuses_ids_outside_the_vocabulary(core):
    core.start()
    request = Request("a", (1, VOCAB, -1, 2**40), GREEDY, ONE)
    prepared = core.prepare(request)
    with pytest.raises(InvalidRequest) as caught:
        core.submit(request, Collector(), prepared)
    fields = [violation.field for violation in caught.value.violations]
    assert fields == [f"prompt_token_ids.ids[{i}]" for i in (1, 2, 3)]


def test_of_many_ids_outside_the_vocabulary_some_are_named(core):
    request = Request("a", (VOCAB,) * 1000, GREEDY, ONE)
    with pytest.raises(InvalidRequest) as caught:
        core.submit(request, Collector())
    assert len(caught.value.violations) == checks.MAX_BAD_IDS


def test_what_outputs_share_is_checked_once(core, monkeypatch):
    """Outputs share the prompt and the tokens that the sampling names. The array of many biases is also made
    once.
    """
    looked: list[int] = []
    is_in = checks.in_vocabulary

    def noted(ids, vocab_size):
        looked.append(len(ids))
        return is_in(ids, vocab_size)

    monkeypatch.setattr(checks, "in_vocabulary", noted)
    monkeypatch.setattr("penstock.runtime.loop.requests.in_vocabulary", noted)
    monkeypatch.setattr("penstock.runtime.loop.requests.MANY_BIASES", 30)
    bias = tuple((token, 1.0) for token in range(40))
    sampling = ResolvedSampling(temperature=0.0, seed=1, logit_bias=bias)
    requests = outputs_of(Request("a", PROMPT, sampling, ONE), 5)
    core.start()
    prepared = core.prepare(requests[0])
    assert sorted(looked) == [0, 0, 40, 40]
    assert prepared.bias_row is not None
    assert prepared.bias_row[:41].tolist() == [1.0] * 40 + [0.0]
    looked.clear()
    queued: list[Request] = []
    queue = Scheduler.queue

    def queue_noted(self, seq):
        queued.append(seq.request)
        queue(self, seq)

    monkeypatch.setattr(Scheduler, "queue", queue_noted)
    sink = Collector()
    for request in requests:
        core.submit(request, sink, prepared)
    assert sum(looked) == 0, "only the ids to stop at, of which there are none, may be checked again"
    assert all(request.bias_row is prepared.bias_row for request in queued)
    for request in requests:
        assert sink.last(request.request_id).finish is not None


@pytest.mark.parametrize("bias", [((VOCAB, 1.0),), ((1, 1.0),)])
def test_what_was_prepared_is_not_used_for_other_sampling(core, bias):
    """An embedder's callback may replace the sampling after the request was prepared."""
    core.start()
    request = Request("a", PROMPT, ResolvedSampling(logit_bias=((2, 1.0),)), ONE)
    prepared = core.prepare(request)
    other = Request("a", request.prompt_token_ids, ResolvedSampling(logit_bias=bias), ONE)
    assert prepared.covers(request.sampling.seeded(3))
    assert not prepared.covers(other.sampling)
    sink = Collector()
    if bias[0][0] >= VOCAB:
        with pytest.raises(InvalidRequest, match=r"sampling\.logit_bias\[0\]"):
            core.submit(other, sink, prepared)
    else:
        core.submit(other, sink, prepared)
        sink.last("a")


def test_few_biases_wait_without_an_array(core):
    """Otherwise each of a thousand waiting requests would hold an array as long as the vocabulary."""
    prepared = core.prepare(Request("a", PROMPT, ResolvedSampling(logit_bias=((2, 1.0),)), ONE))
    assert prepared.sampling is not None
    assert prepared.bias_row is None
