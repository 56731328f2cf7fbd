"""Tokens that are proposed change no token: engines with a proposer and without make the same outputs, to the
bit of each log-probability, whatever is proposed.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest

from penstock.runtime import StoppingParams, building
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.request import CacheParams, Request, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.sequence import Sequence as Output
from tests.support.batch import Answer, answers
from tests.support.mix import ForeseenTurns, Mixer, Turns
from tests.support.models.table import EOS, VOCAB, random_tables, table_engine
from tests.support.scheduler.proposing import Guess, Guesses, lies

TABLES = random_tables()


class Pair:
    """An engine that proposes, and one that does not."""

    def __init__(self, native: str, **limits: Any) -> None:
        self.rng = random.Random(5)
        self.proposer = Guesses(lambda seq, most: (), self.rng)
        self.plain = table_engine(TABLES, native=native, **limits)
        with mock.patch.object(building, "Lookup", return_value=self.proposer):
            self.speculating = table_engine(TABLES, native=native, speculation="lookup", **limits)

    def compare(
        self, requests: Sequence[Request], guess: Callable[[Guess], Guess], *, together: bool = True
    ) -> list[Answer]:
        """Ask both engines, and compare. `guess` makes what is proposed of a guess that is right. Returns the
        answers of the one that proposes.
        """
        own = [dataclasses.replace(r, constraint=copy.deepcopy(r.constraint)) for r in requests]
        expected = answers(self.plain, own)
        known = {request.request_id: each.tokens for request, each in zip(requests, expected, strict=True)}
        self.proposer.guess = guess(lambda seq, most: known[seq.request_id][seq.num_generated :][:most])
        if together:
            got = answers(self.speculating, requests)
        else:
            got = [answers(self.speculating, [request])[0] for request in requests]
        for request, one, other in zip(requests, got, expected, strict=True):
            assert one.tokens == other.tokens, request
            assert one.logprobs == other.logprobs, request
            assert one.prompt_logprobs == other.prompt_logprobs, request
            assert (one.finish, one.error) == (other.finish, other.error), request
            np.testing.assert_array_equal(one.hidden, other.hidden, str(request))
        return got

    def close(self) -> None:
        for engine in (self.plain, self.speculating):
            assert engine.compiles_after_warmup == 0
            assert engine.load().pages_used == 0
            engine.shutdown()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("auto", marks=pytest.mark.ci),
        pytest.param("off", marks=pytest.mark.sweep("XLA beside proposals")),
    ],
    ids=["native", "XLA"],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param, max_num_seqs=3, feature_slots=2)
    yield pair
    pair.close()


def requests_of(seed: int, count: int = 12) -> list[Request]:
    """Random requests with every feature."""
    mixer = Mixer(seed)
    made = [mixer.sampled(f"r{i}") if i % 2 else mixer.greedy(f"r{i}", TABLES) for i in range(count)]
    return [
        dataclasses.replace(
            request,
            logprobs=[None, 0, 3][i % 3],
            max_proposed_tokens=[None, 2, None, 1, 0][i % 5],
        )
        for i, request in enumerate(made)
    ]


def wrong(right: Guess) -> Guess:
    return lambda seq, most: [(token + 1) % VOCAB for token in right(seq, most)]


def by_chance(right: Guess) -> Guess:
    rng = random.Random(3)
    return lambda seq, most: rng.choices(range(VOCAB), k=most)


def lying(right: Guess) -> Guess:
    return lies(random.Random(4), VOCAB, right)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(
    "guess", [lambda right: right, wrong, by_chance, lying], ids=["right", "wrong", "random", "lies"]
)
def test_outputs_are_the_same_whatever_is_proposed(
    pair: Pair, guess: Callable[[Guess], Guess], together: bool
) -> None:
    requests = requests_of(seed=1)
    got = pair.compare(requests, guess, together=together)
    penalised = [request.sampling.has_penalties for request in requests]
    for kind in () if guess is lying else (False, True):  # of lies, what cannot be proposed is dropped
        assert sum(each.proposed_tokens for each, has in zip(got, penalised, strict=True) if has is kind) > 0


def free(name: str, prompt: Sequence[int] = (9, 8, 7), **stopping: object) -> Request:
    """Make a request that is sampled, and makes 20 tokens unless `stopping` says otherwise."""
    given: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, **stopping}
    rules = StoppingParams(**given)
    return Request(name, tuple(prompt), ResolvedSampling(seed=11), rules, logprobs=1)


def test_each_step_takes_what_was_proposed_rightly_and_one_token_more(pair: Pair) -> None:
    """Of 20 tokens the prompt's step makes the first. The others come in steps of five, four of which were
    proposed; the last step has room for three.
    """
    pair.proposer.patience = 1.0
    (got,) = pair.compare([free("all")], lambda right: right)
    assert (got.proposed_tokens, got.accepted_tokens) == (15, 15)
    (got,) = pair.compare([free("none")], wrong)
    assert got.accepted_tokens == 0
    assert got.proposed_tokens > 40
    pair.proposer.patience = 0.5


def test_an_output_ends_within_what_was_proposed(pair: Pair) -> None:
    """By a stop id, by EOS, and not before min_tokens: then the same id is forbidden at each position."""
    tokens = answers(pair.plain, [free("tell", max_tokens=40)])[0].tokens
    stops = tokens[6], next(token for token in tokens if token != tokens[6])
    requests = [
        free("stop", stop_token_ids=(stops[0],)),
        free("later", stop_token_ids=stops, min_tokens=9, max_tokens=40),
        free("eos", ignore_eos=False, max_tokens=60),
        free("banned", ignore_eos=False, min_tokens=55, max_tokens=60, stop_token_ids=(EOS - 1,)),
    ]
    pair.proposer.patience = 1.0
    for together in (False, True):
        got = pair.compare(requests, lambda right: right, together=together)
        assert len(got[0].tokens) == tokens.index(stops[0]) + 1
        assert sum(one.accepted_tokens for one in got) > 20
    pair.proposer.patience = 0.5


def test_rows_under_a_constraint_step_with_those_that_have_proposals(pair: Pair) -> None:
    """Nothing is proposed for those that do not know what may follow proposed tokens."""
    requests = [
        dataclasses.replace(free(f"c{i}", (i + 1,), max_tokens=30), constraint=Turns(25) if i % 2 else None)
        for i in range(6)
    ]
    pair.proposer.patience = 1.0
    got = pair.compare(requests, lambda right: right)
    pair.proposer.patience = 0.5
    assert [one.proposed_tokens > 0 for one in got] == [True, False] * 3


@pytest.mark.parametrize("guess", [lambda right: right, wrong, lying], ids=["right", "wrong", "lies"])
def test_tokens_are_proposed_for_rows_under_a_constraint(pair: Pair, guess: Callable[[Guess], Guess]) -> None:
    """Each has its own mask behind every token that is proposed, and ends where the constraint is complete,
    also within what was proposed. Words of several tokens are forbidden there, too.
    """
    words = [(a, b) for a in range(0, VOCAB, 2) for b in range(VOCAB) if (a + b) % 3 == 0]

    def constraint(i: int) -> TokenConstraint | None:
        inner: list[TokenConstraint | None] = [None, ForeseenTurns(22), Turns(25)]
        if i in (1, 2, 3):
            return BadWords(words, inner[i - 1], VOCAB)
        return None if i == 4 else ForeseenTurns(25)

    requests = [
        dataclasses.replace(
            free(f"g{i}", (i + 1,), max_tokens=30, min_tokens=5 * (i % 2), ignore_eos=i % 2 == 0),
            constraint=constraint(i % 5),
        )
        for i in range(15)
    ]
    pair.proposer.patience = 1.0
    got = pair.compare(requests, guess)
    pair.proposer.patience = 0.5
    lengths = [len(one.tokens) for one in got]
    assert lengths[0] == lengths[10] == 25
    assert lengths[2] == 22
    if guess is not lying:
        accepted = [one.accepted_tokens for one in got[:5]]
        assert accepted[3] == 0  # its inner constraint does not know what may follow
        assert [count > 10 for count in accepted[:3]] == 3 * [guess is not wrong]


def test_hidden_states_and_prompts_that_are_read_beside_proposals(pair: Pair) -> None:
    """Requests enter while tokens are proposed for others, but for none that wants hidden states."""
    requests = [
        dataclasses.replace(
            free(f"h{i}", range(i + 1, i + 6), max_tokens=15 + 2 * i),
            hidden_states=i % 3 == 0,
            prompt_logprobs=[None, 2, 0][i % 3],
        )
        for i in range(12)
    ]
    pair.proposer.patience = 1.0
    got = pair.compare(requests, lambda right: right)
    pair.proposer.patience = 0.5
    assert [len(one.hidden) > 0 for one in got] == [True, False, False] * 4
    assert [one.accepted_tokens > 0 for one in got] == [False, True, True] * 4


def test_outputs_of_one_prompt_and_prompts_that_share_pages(pair: Pair) -> None:
    """Pages with tokens that were wrongly proposed are never shared: the next requests begin with what the
    others generated.
    """
    first = outputs_of(dataclasses.replace(free("n", range(14)), logprobs=None), 3)
    for guess in (lying, wrong, lambda right: right):
        got = pair.compare(first, guess)
        again = [
            free(f"again{i}", (*range(14), *one.tokens, i)) for i, one in enumerate(got) for _ in range(1)
        ]
        shared = pair.compare(again, guess)
        assert all(one.cached_prompt_tokens >= 28 for one in shared)
        salted = [dataclasses.replace(request, cache=CacheParams(bypass=True)) for request in again]
        fresh = pair.compare(salted, guess)
        assert [one.tokens for one in fresh] == [one.tokens for one in shared]


def test_new_weights_that_are_the_same_change_nothing(pair: Pair) -> None:
    """An update comes while tokens are proposed; requests go on with their KV."""
    requests = [free(f"u{i}", (i + 1,), max_tokens=100) for i in range(9)]
    begun = threading.Event()

    def update() -> list[int]:
        assert begun.wait(60)
        engine, keep = pair.speculating, InFlightPolicy.KEEP
        updates = (engine.update_weights(TABLES.tensors(), label="same", in_flight=keep) for _ in range(3))
        return [update.result(60).in_flight.kept for update in updates]

    def noticed(right: Guess) -> Guess:
        def guess(seq: Output, most: int) -> Sequence[int]:
            begun.set()
            if not updates.done():
                time.sleep(0.01)  # so that the updates come before the requests have ended
            return lying(right)(seq, most)

        return guess

    with ThreadPoolExecutor(1) as pool:
        updates = pool.submit(update)
        pair.compare(requests, noticed)
        assert max(updates.result()) > 0


@pytest.mark.sweep
def test_preempted_outputs_are_the_same() -> None:
    pair = Pair("auto", max_num_seqs=3, kv_cache_bytes=20 * 4 * 2 * 4 * 4)
    requests = [free(f"p{i}", range(i + 1, i + 9), max_tokens=40) for i in range(6)]
    got = pair.compare(requests, lying)
    assert sum(one.preemptions for one in got) > 0
    pair.close()
