"""Several outputs of one prompt on the real engine: the prompt is computed once, its pages are shared, each
output has its own seed, and an abort ends all of them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from penstock.runtime import Engine, StoppingParams
from penstock.runtime.errors import DuplicateRequestId
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import AbortOutcome, StepRecord
from penstock.runtime.requests.request import (
    CacheParams,
    FinishReason,
    Request,
    StepOutput,
    output_id,
    output_seed,
    outputs_of,
    request_id_of,
)
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.batch import answer, answers
from tests.support.collector import Collector
from tests.support.mix import Turns
from tests.support.models.table import VOCAB, random_tables, table_engine

pytestmark = pytest.mark.ci

TABLES = random_tables(31)
PAGE = 4
PAGE_BYTES = PAGE * 2 * 4 * 4


class Watch:
    """An observer that keeps the records of all steps."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[Engine, Watch]]:
    watch = Watch()
    engine = table_engine(TABLES, observer=watch, max_decode_steps=1)
    yield engine, watch
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


@pytest.fixture
def engine(watched: tuple[Engine, Watch]) -> Engine:
    """Return the engine with nothing in its prefix cache."""
    watched[0].flush_prefix_cache()
    return watched[0]


@pytest.fixture
def watch(engine: Engine, watched: tuple[Engine, Watch]) -> Watch:
    """Return the observer, without records."""
    watched[1].records.clear()
    return watched[1]


def ask(num_prompt: int, max_tokens: int, name: str = "r", seed: int | None = 1234567) -> Request:
    """Make a request whose prompt depends only on its length, and whose tokens depend on the seed."""
    return Request(
        name,
        tuple((3 * i + 1) % VOCAB for i in range(num_prompt)),
        ResolvedSampling(temperature=2.0, seed=seed),
        StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def num_computed(watch: Watch) -> int:
    """Return the number of input tokens of all rows of all steps, without those of the request with which
    `answers` holds the engine.
    """
    records = [record for record in watch.records if record.request_ids != ("gate",)]
    assert all(record.num_steps == 1 for record in records)
    return sum(record.num_tokens for record in records)


@pytest.mark.parametrize("num_prompt", [41, 40, 3, 17, 1])
@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_a_prompt_is_computed_once(engine: Engine, watch: Watch, num_prompt: int, n: int) -> None:
    """Of the prompt, every output after the first computes only the last token, for its logits; then 3 of its
    4 tokens are inputs. This holds for 9 outputs over 4 rows too.
    """
    results = answers(engine, outputs_of(ask(num_prompt, 4), n), together=True)
    assert [len(result.tokens) for result in results] == [4] * n
    assert [result.cached_prompt_tokens for result in results] == [0] + [num_prompt - 1] * (n - 1)
    assert num_computed(watch) == num_prompt + (n - 1) + n * 3


@pytest.mark.parametrize(
    ("num_prompt", "alone"),
    [
        (41, 1),  # ten full pages are shared, and each output computes the token after them
        (40, 4),  # nine are, because a prompt's last token is always computed, for its logits
        (3, 3),  # no page is full
    ],
)
def test_outputs_that_enter_after_the_others_ended_share_full_pages(
    engine: Engine, watch: Watch, num_prompt: int, alone: int
) -> None:
    """Of nine outputs over four rows, the later ones may find no running output to fork from, but they find
    the prompt's full pages in the prefix cache.
    """
    results = answers(engine, outputs_of(ask(num_prompt, 1), 9), together=True)
    cached = [result.cached_prompt_tokens for result in results]
    assert cached[:4] == [0] + [num_prompt - 1] * 3
    assert set(cached[4:]) <= {num_prompt - 1, num_prompt - alone}
    assert num_computed(watch) == 9 * num_prompt - sum(cached)


def test_outputs_share_the_prompts_pages(engine: Engine, watch: Watch) -> None:
    """The prompt has 41 tokens, and of the 3 more the last needs no KV: so ten pages are shared, and each
    output has one of its own.
    """
    answers(engine, outputs_of(ask(41, 3), 4), together=True)
    assert max(record.pages_used for record in watch.records) == 10 + 4
    watch.records.clear()
    engine.flush_prefix_cache()
    # Four requests with the same prompt share its pages likewise.
    answers(engine, [ask(41, 3, f"r{i}") for i in range(4)], together=True)
    assert max(record.pages_used for record in watch.records) == 10 + 4


def test_seeds_are_splitmix64() -> None:
    """The expected seeds are the published outputs of the generator for seed 1234567 (Rosetta Code:
    Pseudo-random numbers/Splitmix64).
    """
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [output_seed(1234567, i) for i in range(6)] == [1234567, *published]


def test_each_output_has_its_own_seed(engine: Engine) -> None:
    """Output i has the tokens of a request with the i-th seed, which runs alone. Fewer outputs are the first
    ones of more.
    """
    request = ask(22, 20)
    nine = answers(engine, outputs_of(request, 9))
    for i, result in enumerate(nine):
        sampling = dataclasses.replace(request.sampling, seed=output_seed(1234567, i))
        assert answer(engine, dataclasses.replace(request, sampling=sampling)).tokens == result.tokens
    assert len({tuple(result.tokens) for result in nine}) == 9
    three = answers(engine, outputs_of(request, 3))
    assert [result.tokens for result in three] == [result.tokens for result in nine[:3]]
    assert answer(engine, request).tokens == nine[0].tokens
    unseeded = [answers(engine, outputs_of(ask(22, 20, seed=None), 3)) for _ in range(2)]
    assert len({tuple(result.tokens) for results in unseeded for result in results}) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache_pages": 0},
        {"kv_cache_bytes": 14 * PAGE_BYTES, "max_model_len": 56},
        {"overlap": False, "max_decode_steps": 8},
    ],
)
def test_outputs_are_the_same_without_sharing_and_under_preemption(
    engine: Engine, options: dict[str, Any]
) -> None:
    request = ask(22, 30)
    expected = [result.tokens for result in answers(engine, outputs_of(request, 6))]
    other = table_engine(TABLES, **options)
    try:
        results = answers(other, outputs_of(request, 6), together=True)
        assert [result.tokens for result in results] == expected
        assert any(result.preemptions for result in results) == ("kv_cache_bytes" in options)
        assert other.load().pages_used == 0
    finally:
        other.shutdown()


class Hold:
    """A sink that stops the engine's thread, as soon as all of these ids have a token, until `open` is
    called.
    """

    def __init__(self, *request_ids: str) -> None:
        self.sink = Collector()
        self._request_ids = set(request_ids)
        self._reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, outputs: Sequence[StepOutput]) -> None:
        self.sink(outputs)
        if not self._reached.is_set() and self._request_ids <= self.sink.outputs.keys():
            self._reached.set()
            assert self._opened.wait(60)

    def wait(self) -> None:
        assert self._reached.wait(60)

    def open(self) -> None:
        self._opened.set()

    def reason(self, request_id: str) -> FinishReason:
        finish = self.sink.last(request_id).finish
        assert finish is not None
        return finish.reason


@pytest.mark.parametrize("how", ["id", "prefix", "all"])
def test_an_abort_ends_all_outputs(engine: Engine, how: str) -> None:
    """Six outputs run on four rows, so two still wait. Other requests go on, unless all are aborted."""
    group = outputs_of(ask(12, 110, "group"), 6)
    hold = Hold(*[request.request_id for request in group[:4]])
    for request in group:
        engine.submit(request, hold)
    hold.wait()
    engine.submit(ask(2, 5, "groom"), hold)
    if how == "id":
        told = engine.abort(["group"], message="enough")
    elif how == "prefix":
        told = engine.abort(prefix="group", message="enough")
    else:
        told = engine.abort(all_requests=True, message="enough")
    assert told[0] == ("group", AbortOutcome.ABORTED)
    assert told[1:] == ([("groom", AbortOutcome.ABORTED)] if how == "all" else [])
    assert engine.load().pages_used == 0
    assert engine.abort(["group"]) == [("group", AbortOutcome.ALREADY_FINISHED)]
    hold.open()
    for i in range(6):
        finish = hold.sink.last(output_id("group", i)).finish
        assert finish is not None
        assert (finish.reason, finish.message) == (FinishReason.ABORTED, "enough")
    assert hold.reason("groom") is (FinishReason.ABORTED if how == "all" else FinishReason.MAX_TOKENS)
    answers(engine, outputs_of(ask(12, 2, "group"), 6))  # the id is free again


def test_an_abort_reaches_outputs_whose_first_has_ended(engine: Engine) -> None:
    """The request's id is then the id of no running output, but it is still in use."""
    first, *others = outputs_of(ask(12, 110), 3)
    short = dataclasses.replace(first, stopping=StoppingParams(max_tokens=1, ignore_eos=True))
    hold = Hold(*[request.request_id for request in (short, *others)])
    for request in (short, *others):
        engine.submit(request, hold)
    hold.wait()
    assert hold.reason("r") is FinishReason.MAX_TOKENS
    with pytest.raises(DuplicateRequestId):
        engine.submit(ask(12, 1), Collector())
    assert engine.abort(["r"]) == [("r", AbortOutcome.ABORTED)]
    assert engine.load().pages_used == 0
    hold.open()
    for other in others:
        assert hold.reason(other.request_id) is FinishReason.ABORTED
        assert request_id_of(other.request_id) == "r"


def test_bypass_shares_among_the_outputs_and_with_no_other_request(engine: Engine, watch: Watch) -> None:
    group = dataclasses.replace(ask(41, 3), cache=CacheParams(bypass=True))
    for _ in range(2):  # the second group must reuse nothing of the first
        watch.records.clear()
        answers(engine, outputs_of(group, 4), together=True)
        assert num_computed(watch) == 41 + 3 + 4 * 2
    for request in (ask(41, 1), group):
        assert answer(engine, dataclasses.replace(request, request_id="other")).cached_prompt_tokens == 0
    # The group does not read what other requests have cached by now either.
    for request, cached in ((group, [0, 40]), (ask(41, 3), [40, 40])):
        results = answers(engine, outputs_of(request, 2), together=True)
        assert [result.cached_prompt_tokens for result in results] == cached


def test_the_prompts_log_probabilities_come_with_the_first(engine: Engine, watch: Watch) -> None:
    request = dataclasses.replace(ask(41, 3), prompt_logprobs=2)
    results = answers(engine, outputs_of(request, 3), together=True)
    assert [len(result.prompt_logprobs) for result in results] == [40, 0, 0]
    assert num_computed(watch) == 41 + 2 + 3 * 2


def test_each_output_has_its_own_constraint(engine: Engine) -> None:
    constraints = [Turns(limit=3 + i) for i in range(5)]
    results = answers(engine, outputs_of(ask(9, 40), 5, constraints))
    assert [len(result.tokens) for result in results] == [3, 4, 5, 6, 7]
    assert [constraint.accepted for constraint in constraints] == [result.tokens for result in results]
    assert {result.finish.reason for result in results if result.finish} == {FinishReason.EOS}


def test_outputs_share_one_table_of_bad_words(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table holds a thousand words and a mask as long as the vocabulary, so it is made once. What was
    generated is kept for each output.
    """
    sampling = ResolvedSampling(seed=1, bad_words=((1, 2), (3,), (4, 5, 6)))
    requests = outputs_of(dataclasses.replace(ask(3, 2), sampling=sampling), 3)
    prepared = engine.prepare(requests[0])
    submitted: list[Request] = []
    monkeypatch.setattr(EngineCore, "submit", lambda engine, request, *_: submitted.append(request))
    for request in requests:
        engine.submit(request, lambda outputs: None, prepared)
    constraints = [request.constraint for request in submitted]
    assert len({id(constraint) for constraint in constraints}) == 3
    assert {id(c._table) for c in constraints if isinstance(c, BadWords)} == {id(prepared.words)}
