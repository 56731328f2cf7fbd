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

from penstock.runtime import Engine, StoppingParams
from penstock.runtime.requests.request import CacheParams, Request
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.text_windows import TextWindows
from tests.support.batch import answers
from tests.support.mix import Mixer
from tests.support.models.table import VOCAB, random_tables, table_model
from tests.support.models.toy import toy_engine

pytestmark = pytest.mark.ci
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
