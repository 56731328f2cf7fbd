"""Windows that guess by a text change no token: engines with a text and without make the same outputs, to the
bit of each log-probability, whatever the text is.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import pytest

from bench.texts import STORIES
from penstock.runtime import Engine, EngineConfig, StoppingParams
from penstock.runtime.execution.text_guesses import CONTEXT, NO_TOKEN
from penstock.runtime.requests.request import CacheParams, Request
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.text_windows import TextWindows
from tests.support.batch import Answer, answers
from tests.support.mix import Mixer
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.table import VOCAB, random_tables, table_model
from tests.support.models.toy import toy_engine

TABLES = random_tables()
MOST = 3


def requests_of(seed: int, count: int = 12) -> list[Request]:
    """Random requests with every feature, of which some bound what is proposed."""
    mixer = Mixer(seed)
    made = [mixer.sampled(f"r{i}", 40) if i % 2 else mixer.greedy(f"r{i}", TABLES, 40) for i in range(count)]
    return [
        dataclasses.replace(
            request, logprobs=[None, 0, 3][i % 3], max_proposed_tokens=[None, 2, None, 1, 0][i % 5]
        )
        for i, request in enumerate(made)
    ]


def free(name: str, **changes: object) -> Request:
    rules = StoppingParams(**{"max_tokens": 40, "ignore_eos": True, **changes})  # type: ignore[arg-type]
    return Request(name, (9, 8, 7), ResolvedSampling(seed=int(name[1:]) + 1), rules, logprobs=1)


REQUESTS = [
    dataclasses.replace(request, cache=CacheParams(bypass=True))  # nothing is proposed from earlier requests
    for request in [*requests_of(3), *(free(f"f{i}") for i in range(3)), free("f9", ignore_eos=False)]
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    engine = toy_engine(table_model(TABLES), speculation="off")
    yield engine
    engine.shutdown()


def with_text(tokens: Sequence[int]) -> Engine:
    """Start an engine whose windows always guess by these tokens."""
    text = np.array(tokens, np.int32)
    model = dataclasses.replace(table_model(TABLES), skips_padding=True, lookup_tokens=text)
    return toy_engine(model, speculation="lookup", lookup_text="demo", max_proposed_tokens=MOST)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "least", "most"), [("right", 0.4, 0.75), ("half", 0.1, 0.7), ("random", 0.0, 0.1)]
)
def test_outputs_are_the_same_whatever_the_text_is(
    plain: Engine, kind: str, least: float, most: float
) -> None:
    """All together, in windows of several rows, and one after the other. Texts of the same length have the
    same programs.
    """
    rng = random.Random(7)
    expected = answers(plain, REQUESTS)
    said = [token for each in expected for token in each.tokens]
    if kind == "half":
        said = [token if rng.random() < 0.8 else rng.randrange(VOCAB + 9) for token in said]
    elif kind == "random":
        said = rng.choices(range(VOCAB), k=len(said))
    with mock.patch.object(TextWindows, "choose", lambda self, num_rows: num_rows < 16):
        engine = with_text(said)
        together = answers(engine, REQUESTS)
        alone = [answers(engine, [request])[0] for request in REQUESTS]
        totals = engine.metrics().totals
        if kind == "right":
            check_that_a_slot_forgets(engine)
        assert engine.compiles_after_warmup == 0
        assert engine.load().pages_used == 0
        engine.shutdown()
    for one, other, request, right in zip(together, alone, REQUESTS, expected, strict=True):
        for got in (one, other):
            assert (got.tokens, got.logprobs) == (right.tokens, right.logprobs), request
            assert (got.finish, got.error) == (right.finish, right.error), request
            assert got.accepted_tokens <= min(got.proposed_tokens, len(got.tokens))
    for request, one in zip(REQUESTS, alone, strict=True):
        if request.max_proposed_tokens == 0:
            assert one.proposed_tokens == 0
    assert totals.proposed_tokens == sum(each.proposed_tokens for each in (*together, *alone))
    assert totals.accepted_tokens == sum(each.accepted_tokens for each in (*together, *alone))
    ends = alone[-4:]
    accepted = sum(each.accepted_tokens for each in ends) / sum(len(each.tokens) for each in ends)
    assert least <= accepted <= most


def check_that_a_slot_forgets(engine: Engine) -> None:
    """See that what is guessed for a request comes of its own tokens, and not of those of the one before."""

    def recent(request: Request) -> tuple[list[list[int]], Answer]:
        (answer,) = answers(engine, [request])
        assert engine.runner.device.rows.recent is not None
        return np.asarray(engine.runner.device.rows.recent).tolist(), answer

    before, long = recent(free("f0"))
    after, short = recent(free("f1", max_tokens=1))
    assert long.tokens[-1] != short.tokens[0]
    (found,) = [own for own, left in zip(after, before, strict=True) if own != left]
    assert found == [*[NO_TOKEN] * (CONTEXT - 1), *short.tokens]


@pytest.mark.sweep("the demo model's text")
def test_the_demo_model_tells_the_same_stories_with_its_text() -> None:
    """On native kernels in bfloat16, greedy and sampled, one and seven at a time. The stories are not those
    of the text.
    """
    requests = [
        Request(
            f"s{i}",
            story[:12],
            ResolvedSampling(temperature=0.6 * (i % 2), seed=i),
            StoppingParams(max_tokens=60),
            logprobs=2,
        )
        for i, story in enumerate(STORIES[:7])
    ]
    made: dict[bool, list[list[Answer]]] = {}
    for has_text in (False, True):
        options = EngineConfig(
            dtype="bfloat16",
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=128,
            max_proposed_tokens=8 if has_text else None,
            speculation="auto" if has_text else "off",
            lookup_text="demo" if has_text else None,
            compilation_cache=TEST_CACHE,
            show_progress=False,
        )
        guesses = mock.patch.object(TextWindows, "choose", return_value=True)
        with guesses, Engine.from_pretrained("demo", options) as engine:
            made[has_text] = [answers(engine, requests), *(answers(engine, [each]) for each in requests)]
            assert engine.compiles_after_warmup == 0
    for with_it, without in zip(made[True], made[False], strict=True):
        assert [(one.tokens, one.logprobs) for one in with_it] == [
            (one.tokens, one.logprobs) for one in without
        ]
    alone = [each for one in made[True][1:] for each in one]
    assert sum(one.accepted_tokens for one in alone) > 0.2 * sum(len(one.tokens) for one in alone)
