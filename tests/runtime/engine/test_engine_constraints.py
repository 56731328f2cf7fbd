"""Constraints on the real engine: masks together with every other feature, ends of outputs, failures, and
logits that are not finite. The model's logits are known; test_engine_schemas.py tests grammars on real
models.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from penstock.runtime import Engine, StoppingParams
from penstock.runtime.errors import GenerationError, InvalidRequest, NonFiniteLogits, Violation
from penstock.runtime.requests.constraint import Mask
from penstock.runtime.requests.request import Finish, FinishReason, Request
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.batch import Answer, answers
from tests.support.mix import Mixer, Turns
from tests.support.models.table import EOS, Tables, random_tables, serve, table_engine
from tests.support.models.witness import greedy_tokens

TABLES = random_tables(41)
GREEDY = ResolvedSampling(temperature=0.0)


@pytest.fixture(
    scope="module",
    # Every step is short compared with such a window, so rows under constraints have steps of their own.
    params=[
        {"decode_window_s": 10.0},
        *(pytest.param(o, marks=pytest.mark.ci) for o in ({"overlap": False}, {"native": "off"})),
    ],
    ids=["apart", "no overlap", "XLA"],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = table_engine(TABLES, feature_slots=2, **request.param)
    yield engine
    assert engine.ready
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def greedy(name: str, seed: int, max_tokens: int = 24) -> Request:
    """Make a greedy request that ends before any choice that is too close to call, with and without
    `Turns`.
    """
    request = Mixer(seed).greedy(name, TABLES, max_tokens)
    for rule in (None, Turns()):
        told = greedy_tokens(request, TABLES, max_tokens, rule)
        max_tokens = max(1, min(max_tokens, len(told.tokens)))
    stopping = dataclasses.replace(
        request.stopping, max_tokens=max_tokens, min_tokens=min(request.stopping.min_tokens, max_tokens)
    )
    return dataclasses.replace(request, stopping=stopping)


def expect(request: Request, rule: Turns | None = None) -> list[int]:
    assert request.stopping.max_tokens is not None
    return greedy_tokens(request, TABLES, request.stopping.max_tokens, rule).tokens


def test_constrained_and_free_rows_agree_with_the_witness(engine: Engine) -> None:
    """40 requests with random penalties, biases, words and min_tokens; every second is under a constraint
    that is complete after 3 to 11 tokens.
    """
    requests = [greedy(f"r{i}", 500 + i) for i in range(40)]
    rules = [Turns(limit=3 + i % 9) if i % 2 else None for i in range(40)]
    asked = [dataclasses.replace(r, constraint=rule) for r, rule in zip(requests, rules, strict=True)]
    results = answers(engine, asked, together=True)
    for i, (request, result) in enumerate(zip(requests, results, strict=True)):
        assert result.tokens == expect(request, Turns(limit=3 + i % 9) if i % 2 else None), request
    completed = [
        result
        for result, rule in zip(results, rules, strict=True)
        if rule is not None and rule.is_complete and result.finish == Finish(FinishReason.EOS)
    ]
    assert len(completed) > 5
    for rule, result in zip(rules, results, strict=True):
        assert rule is None or rule.accepted == result.tokens


def test_an_end_token_ends_a_constrained_output_by_its_id(engine: Engine) -> None:
    """If a constraint allows EOS, EOS ends the output as it does without one, and the finish has its id. If
    the constraint is complete, the finish has no id.
    """
    likes_eos = ResolvedSampling(temperature=0.0, logit_bias=((EOS, 100.0),))
    stop = StoppingParams(max_tokens=9)
    by_token, by_rule = answers(
        engine,
        [
            Request("token", (1,), likes_eos, stop, constraint=Turns()),  # EOS is 60, a multiple of 3
            Request("rule", (1,), likes_eos, stop, constraint=Turns(limit=1)),
        ],
    )
    assert len(by_token.tokens) == 2
    assert by_token.finish == Finish(FinishReason.EOS, token_id=EOS)
    assert len(by_rule.tokens) == 1
    assert by_rule.finish == Finish(FinishReason.EOS)


@dataclass(eq=False)
class Held(Turns):
    """A constraint whose masks, from the fourth token on, are not made before `gate` is set."""

    gate: threading.Event = field(default_factory=threading.Event)

    def fill(self, mask: Mask) -> None:
        if len(self.accepted) >= 3:
            assert self.gate.wait(60)
        super().fill(mask)


def test_a_late_mask_keeps_no_other_request_waiting(engine: Engine) -> None:
    """Free rows and other rows under constraints end meanwhile. When the masks are made at last, the slow
    request ends too, with the tokens that it would have had without the delay.
    """
    gate = threading.Event()
    held = [Request(f"held{i}", (i,), GREEDY, StoppingParams(max_tokens=9)) for i in (1,)]
    others = [greedy(f"other{i}", 900 + i) for i in range(8)]
    rules = [Turns(limit=5) if i % 2 else None for i in range(8)]
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(
            answers, engine, [dataclasses.replace(r, constraint=Held(gate=gate)) for r in held]
        )
        quick = pool.submit(
            answers,
            engine,
            [dataclasses.replace(r, constraint=rule) for r, rule in zip(others, rules, strict=True)],
        )
        try:
            for i, result in enumerate(quick.result(60)):
                assert result.tokens == expect(others[i], Turns(limit=5) if i % 2 else None)
            assert not slow.done()
        finally:
            gate.set()
        for request, result in zip(held, slow.result(60), strict=True):
            assert result.tokens == expect(request, Turns())


@dataclass(eq=False)
class Failing(Turns):
    """A constraint that raises `error` in `where` once it has accepted `fails_at` tokens."""

    fails_at: int = 4
    where: str = "fill"
    error: BaseException = field(
        default_factory=lambda: InvalidRequest([Violation("constraint.regex", "cannot go on")])
    )

    def fill(self, mask: Mask) -> None:
        if self.where == "fill" and len(self.accepted) >= self.fails_at:
            raise self.error
        super().fill(mask)

    def accept(self, token_ids: Sequence[int]) -> None:
        super().accept(token_ids)
        if self.where == "accept" and len(self.accepted) >= self.fails_at:
            raise self.error


def free(name: str, seed: int) -> Request:
    """Make a greedy request that shares the steps."""
    return greedy(name, seed, max_tokens=30)


@pytest.mark.parametrize("where", ["fill", "accept"])
@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_a_constraint_that_fails_ends_its_own_request_only(engine: Engine, where: str, fails_at: int) -> None:
    failing = dataclasses.replace(
        greedy("fails", 600), stopping=StoppingParams(max_tokens=20, ignore_eos=True)
    )
    others = [free(f"free{i}", 610 + i) for i in range(3)]
    fine = greedy("fine", 620)
    rule = Failing(fails_at=fails_at, where=where)
    results = answers(
        engine,
        [
            others[0],
            dataclasses.replace(failing, constraint=rule),
            dataclasses.replace(fine, constraint=Turns()),
            *others[1:],
        ],
        together=True,
    )
    ended = results.pop(1)
    assert ended.error is rule.error
    assert ended.finish is None
    made = greedy_tokens(failing, TABLES, 20, Turns()).tokens
    assert ended.tokens == made[: fails_at if where == "fill" else max(fails_at, 1)]
    assert results.pop(1).tokens == expect(fine, Turns())
    for request, result in zip(others, results, strict=True):
        assert result.tokens == expect(request)


class PanicException(BaseException):
    """Stands for pyo3's exception of this name: a panic in Rust, which `except Exception` does not catch."""


@pytest.mark.parametrize("where", ["fill", "accept"])
def test_a_panic_in_a_constraint_ends_its_own_request_only(engine: Engine, where: str) -> None:
    panic = PanicException("lost")
    failing = dataclasses.replace(greedy("fails", 600), constraint=Failing(where=where, error=panic))
    other = free("free", 610)
    ended, result = answers(engine, [failing, other], together=True)
    assert isinstance(ended.error, GenerationError)
    assert ended.error.__cause__ is panic
    assert "PanicException: lost" in str(ended.error)
    assert result.tokens == expect(other)


def poisoned(token: int, value: float) -> Tables:
    """Tables in which the logits after `token` hold `value`, so that the model cannot go on."""
    table = TABLES.table.copy()
    table[token, 11] = value
    return dataclasses.replace(TABLES, table=table)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "constrained"])
def test_logits_that_are_not_finite_end_the_request_that_has_them(
    engine: Engine, value: float, kind: str
) -> None:
    """The request keeps the tokens that it has, whether single steps or windows made them. The other requests
    and the engine go on.
    """
    requests = [dataclasses.replace(_unbiased(700 + i, kind), logprobs=2) for i in range(12)]

    def ask() -> list[Answer]:
        return answers(
            engine,
            [
                dataclasses.replace(request, constraint=Turns() if kind == "constrained" else None)
                for request in requests
            ],
            together=True,
        )

    before = ask()
    token = 9
    serve(engine, poisoned(token, value))
    try:
        after = ask()
    finally:
        serve(engine, TABLES)
    failed = 0
    for request, was, now in zip(requests, before, after, strict=True):
        history = [*request.prompt_token_ids[-1:], *was.tokens]
        if token in history[:-1]:
            failed += 1
            assert isinstance(now.error, NonFiniteLogits)
            assert now.tokens == was.tokens[: history.index(token)]
        else:
            assert now.error is None
            assert now.tokens == was.tokens
        assert len(now.logprobs) == len(now.tokens)
        assert all(np.isfinite(one.sampled) for one in now.logprobs)
    assert 0 < failed < len(requests)
    assert [result.tokens for result in ask()] == [result.tokens for result in before]


def _unbiased(seed: int, kind: str) -> Request:
    """Make a greedy or sampled request without biases or rules that forbid tokens."""
    mixer = Mixer(seed)
    request = mixer.sampled(f"r{seed}", 30) if kind == "sampled" else mixer.greedy(f"r{seed}", TABLES, 30)
    sampling = dataclasses.replace(request.sampling, bad_words=(), allowed_token_ids=(), logit_bias=())
    return dataclasses.replace(
        request, sampling=sampling, stopping=StoppingParams(max_tokens=30, ignore_eos=True)
    )


def test_a_model_may_forbid_tokens_itself(engine: Engine) -> None:
    """A logit of minus infinity is valid, unless all logits are."""
    table = np.where(np.arange(len(TABLES.table)) % 2 == 0, TABLES.table, -np.inf).astype(np.float32)
    table[8] = -np.inf
    serve(engine, dataclasses.replace(TABLES, table=table))
    try:
        requests = [
            Request("never", (8,), ResolvedSampling(temperature=0.0)),
            Request("even", (2,), ResolvedSampling(seed=1, logit_bias=((8, -np.inf),)), StoppingParams(50)),
        ]
        never, even = answers(engine, requests)
    finally:
        serve(engine, TABLES)
    assert isinstance(never.error, NonFiniteLogits)
    assert never.tokens == []
    assert even.error is None
    assert {token % 2 for token in even.tokens} == {0}
