"""Every sampling parameter through the whole engine. The expected tokens are computed by hand, or by
tests/support/models/witness.py, for a model whose logits are known (tests/support/models/table.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.runtime import Engine, StoppingParams
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.request import Finish, FinishReason, Request
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.batch import Answer, answer, answers
from tests.support.mix import Mixer
from tests.support.models.table import EOS, VOCAB, Tables, random_tables, serve, table_engine
from tests.support.models.witness import greedy_tokens, log_softmax, probabilities, shaped_logits

TABLES = random_tables()


@pytest.fixture(
    scope="module", params=["auto", pytest.param("off", marks=pytest.mark.ci)], ids=["native", "XLA"]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Yield an engine with the native sampler, and one with XLA's. Requests with penalties or a bias share
    two feature slots.
    """
    engine = table_engine(TABLES, native=request.param, feature_slots=2)
    yield engine
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


@pytest.fixture
def flat(engine: Engine) -> Iterator[Engine]:
    """Yield the engine with these logits after any tokens: 3.0, 2.9, 1.0, 0.9, then -50, and -5 for EOS."""
    logits = [3.0, 2.9, 1.0, 0.9, *[-50.0] * (VOCAB - 5), -5.0]
    serve(engine, Tables.constant(logits))
    yield engine
    serve(engine, TABLES)


def ask(
    engine: Engine,
    sampling: dict[str, Any],
    stopping: dict[str, Any] | None = None,
    prompt: tuple[int, ...] = (9,),
) -> Answer:
    """Return the answer to a request that is greedy, makes 6 tokens and ignores EOS, unless the parameters
    say otherwise.
    """
    params = ResolvedSampling(**{"temperature": 0.0, **sampling})
    rules = StoppingParams(**{"max_tokens": 6, "ignore_eos": True, **(stopping or {})})
    return answer(engine, Request("r", prompt, params, rules))


@pytest.mark.parametrize(
    ("sampling", "prompt", "expected"),
    [
        ({}, (9,), [0, 0, 0, 0, 0, 0]),
        # 3.0 - 0.2 = 2.8 and 2.9 - 0.2 = 2.7, once for a token that was generated, however often it was
        ({"presence_penalty": 0.2}, (9,), [0, 1, 0, 0, 0, 0]),
        # 3.0, 2.94, 2.88 against 2.9, 2.84, 2.78
        ({"frequency_penalty": 0.06}, (9,), [0, 0, 1, 0, 1, 0]),
        # 3.0, 2.74, 2.68, 2.62 against 2.9, 2.64, 2.58
        ({"frequency_penalty": 0.06, "presence_penalty": 0.2}, (9,), [0, 1, 0, 0, 1, 0]),
        ({"presence_penalty": -2.0}, (1,), [0, 0, 0, 0, 0, 0]),
        # the prompt does not count for these two penalties
        ({"presence_penalty": 0.2}, (0,), [0, 1, 0, 0, 0, 0]),
        ({"frequency_penalty": 2.0}, (0, 0, 0), [0, 1, 0, 2, 1, 3]),
        # for repetition the prompt counts: 3.0 / 2 = 1.5 from the start, 2.9 / 2 = 1.45 once generated
        ({"repetition_penalty": 2.0}, (0,), [1, 0, 0, 0, 0, 0]),
        ({"repetition_penalty": 2.0}, (9,), [0, 1, 0, 0, 0, 0]),
        ({"repetition_penalty": 2.0}, (0, 1), [0, 0, 0, 0, 0, 0]),
        ({"repetition_penalty": 4.0}, (0, 1), [2, 3, 0, 0, 0, 0]),  # 0.75, 0.725, then 0.25, 0.225
        ({"repetition_penalty": 0.5}, (1,), [1, 1, 1, 1, 1, 1]),  # 5.8
        ({"logit_bias": ((1, 0.2),)}, (9,), [1, 1, 1, 1, 1, 1]),
        ({"logit_bias": ((1, 0.05),)}, (9,), [0, 0, 0, 0, 0, 0]),
        ({"logit_bias": ((0, -math.inf), (1, -100.0))}, (9,), [2, 2, 2, 2, 2, 2]),
        ({"logit_bias": ((7, 53.5),), "presence_penalty": 1.0}, (9,), [7, 0, 1, 7, 7, 7]),  # 3.5, 2.5
        ({"bad_words": ((0,),)}, (9,), [1, 1, 1, 1, 1, 1]),
        ({"bad_words": ((0, 0),)}, (9,), [0, 1, 0, 1, 0, 1]),
        ({"bad_words": ((0, 0),)}, (0,), [0, 1, 0, 1, 0, 1]),  # a word cannot begin in the prompt
        ({"bad_words": ((0, 0), (0, 1, 0))}, (9,), [0, 1, 1, 0, 1, 1]),
        ({"bad_words": ((0, 0), (0, 1), (2,))}, (9,), [0, 3, 0, 3, 0, 3]),
        ({"bad_words": ((0, 0, 0, 0),)}, (9,), [0, 0, 0, 1, 0, 0]),
        ({"allowed_token_ids": (3, 2, 40)}, (9,), [2, 2, 2, 2, 2, 2]),
        ({"allowed_token_ids": (3, 2), "bad_words": ((2,),)}, (9,), [3, 3, 3, 3, 3, 3]),
        ({"allowed_token_ids": (3, 2), "logit_bias": ((2, -0.2),)}, (9,), [3, 3, 3, 3, 3, 3]),
        ({"allowed_token_ids": (3, 2), "logit_bias": ((0, 99.0),)}, (9,), [2, 2, 2, 2, 2, 2]),
        # if everything is forbidden, nothing is
        ({"allowed_token_ids": (2,), "bad_words": ((2,),)}, (9,), [0, 0, 0, 0, 0, 0]),
        ({"allowed_token_ids": (2,), "bad_words": ((2,),), "presence_penalty": 0.2}, (9,), [0, 1] + [0] * 4),
    ],
)  # fmt: skip
def test_penalties_biases_and_words_as_computed_by_hand(
    flat: Engine, sampling: dict[str, Any], prompt: tuple[int, ...], expected: list[int]
) -> None:
    assert ask(flat, sampling, prompt=prompt).tokens == expected


def test_a_repetition_penalty_multiplies_negative_logits(engine: Engine) -> None:
    serve(engine, Tables.constant([-1.0, -1.9, -2.5]))
    try:
        assert ask(engine, {"repetition_penalty": 2.0}).tokens == [0, 1, 0, 0, 0, 0]  # -2, -3.8
        assert ask(engine, {"repetition_penalty": 3.0}).tokens == [0, 1, 2, 0, 0, 0]  # -3, -5.7, -7.5
    finally:
        serve(engine, TABLES)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("extreme", "expected"),
    [
        ({"logit_bias": ((1, 1e39),)}, 1),
        ({"logit_bias": ((1, 1e300), (1, 1e300), (2, -1e300))}, 1),
        ({"logit_bias": ((0, -1e300), (1, -1e300)), "allowed_token_ids": (0, 1, 5)}, 5),
        ({"repetition_penalty": 1e-300}, 1),  # 2.9 becomes as large as can be
        ({"repetition_penalty": 1e300, "allowed_token_ids": (4, 5)}, 5),  # -50 becomes as small as can be
    ],
)
def test_values_beyond_float32_act_as_their_limits(
    flat: Engine, extreme: dict[str, Any], expected: int, temperature: float
) -> None:
    result = ask(flat, {**extreme, "temperature": temperature, "seed": 3}, {"max_tokens": 1}, (1, 4))
    assert result.tokens == [expected]


def test_of_equal_logits_the_first_is_chosen(engine: Engine) -> None:
    serve(engine, Tables.constant([1.0, 2.0, 2.0, 2.0]))
    try:
        assert ask(engine, {"presence_penalty": 0.5}).tokens == [1, 2, 3, 1, 1, 1]
    finally:
        serve(engine, TABLES)


EARLY = {"ignore_eos": False, "max_tokens": 6}
LIKES_EOS: dict[str, Any] = {"logit_bias": ((EOS, 20.0),)}  # 15.0


@pytest.mark.parametrize(
    ("sampling", "stopping", "expected", "reason"),
    [
        (LIKES_EOS, EARLY, [EOS], FinishReason.EOS),
        (LIKES_EOS, EARLY | {"min_tokens": 3}, [0, 0, 0, EOS], FinishReason.EOS),
        (LIKES_EOS, EARLY | {"min_tokens": 6}, [0] * 6, FinishReason.MAX_TOKENS),
        (LIKES_EOS, EARLY | {"min_tokens": 3, "ignore_eos": True}, [EOS] * 6, FinishReason.MAX_TOKENS),
        ({}, EARLY | {"stop_token_ids": (0,)}, [0], FinishReason.STOP),
        ({}, EARLY | {"stop_token_ids": (0, 1), "min_tokens": 2}, [2, 2, 0], FinishReason.STOP),
        (LIKES_EOS, EARLY | {"stop_token_ids": (0,), "min_tokens": 2}, [1, 1, EOS], FinishReason.EOS),
        ({"presence_penalty": 0.2}, EARLY | {"stop_token_ids": (1,)}, [0, 1], FinishReason.STOP),
        # tokens that min_tokens masks are allowed again if nothing else is left
        ({"allowed_token_ids": (EOS,)}, EARLY | {"min_tokens": 2}, [0, 0, EOS], FinishReason.EOS),
    ],
)
def test_min_tokens_masks_eos_and_stop_ids(
    flat: Engine,
    sampling: dict[str, Any],
    stopping: dict[str, Any],
    expected: list[int],
    reason: FinishReason,
) -> None:
    result = ask(flat, sampling, stopping)
    assert result.tokens == expected
    assert result.finish is not None
    assert result.finish.reason is reason
    if reason is not FinishReason.MAX_TOKENS:
        assert result.finish == Finish(reason, token_id=expected[-1])


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.5, 100.0])
def test_a_filter_that_leaves_one_token_is_greedy_at_any_temperature(
    engine: Engine, only: dict[str, Any], temperature: float
) -> None:
    request = Request(
        "r", (5, 6), ResolvedSampling(temperature=temperature, **only), StoppingParams(max_tokens=20)
    )
    told = greedy_tokens(request, TABLES, 20)
    assert not told.unclear
    assert answer(engine, request).tokens == told.tokens


@pytest.mark.parametrize("seed", range(4))
def test_greedy_tokens_under_any_combination_agree_with_the_witness(engine: Engine, seed: int) -> None:
    """40 requests with different features run at once on 4 rows."""
    mixer = Mixer(seed)
    requests = []
    for i in range(40):
        request = mixer.greedy(f"r{i}", TABLES)
        told = greedy_tokens(request, TABLES, 24)
        if told.tokens:  # the request ends before a choice that is too close to call
            stopping = dataclasses.replace(
                request.stopping,
                max_tokens=len(told.tokens),
                min_tokens=min(request.stopping.min_tokens, len(told.tokens)),
            )
            requests.append(dataclasses.replace(request, stopping=stopping))
    assert len(requests) > 30
    for request, result in zip(requests, answers(engine, requests), strict=True):
        assert result.tokens == greedy_tokens(request, TABLES, 24).tokens, request
    assert sum(len(r.prompt_token_ids) > 16 for r in requests) > 5  # some prompts take several chunks


@pytest.mark.parametrize("seed", range(2))
def test_sampled_tokens_are_among_those_that_the_filters_leave(engine: Engine, seed: int) -> None:
    mixer = Mixer(100 + seed)
    requests = [mixer.sampled(f"r{i}") for i in range(40)]
    cut = 0
    for request, result in zip(requests, answers(engine, requests), strict=True):
        for i, token in enumerate(result.tokens):
            logits = shaped_logits(request, TABLES, result.tokens[:i])
            assert probabilities(logits, request.sampling, nudge=-1e-5)[token] > 0, (request, i)
            cut += int((probabilities(logits, request.sampling) == 0).sum())
    assert cut > 1_000


def test_logprobs_are_those_of_the_raw_logits_whatever_shapes_them(engine: Engine) -> None:
    """Log-probabilities are computed before penalties, biases and temperature, as `TokenLogprobs` says, and
    the likeliest come first.
    """
    mixer = Mixer(200)
    requests = [dataclasses.replace(mixer.sampled(f"r{i}"), logprobs=i % 7) for i in range(20)]
    for request, result in zip(requests, answers(engine, requests), strict=True):
        assert len(result.logprobs) == len(result.tokens)
        for i, (token, told) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
            raw = log_softmax(TABLES.logits([*request.prompt_token_ids, *result.tokens[:i]]))
            assert told.sampled == pytest.approx(raw[token], rel=1e-5, abs=1e-5)
            assert [t for t, _ in told.top] == np.argsort(-raw)[: request.logprobs].tolist()
            for candidate, logprob in told.top:
                assert logprob == pytest.approx(raw[candidate], rel=1e-5, abs=1e-5)


def test_ids_outside_the_vocabulary_are_refused_by_field(engine: Engine) -> None:
    sampling = ResolvedSampling(
        logit_bias=((VOCAB, 1.0),), allowed_token_ids=(3, -1), bad_words=((1,), (2, VOCAB))
    )
    with pytest.raises(InvalidRequest) as caught:
        answer(engine, Request("r", (1,), sampling))
    assert [v.field for v in caught.value.violations] == [
        "sampling.allowed_token_ids[1]",
        "sampling.logit_bias[0]",
        "sampling.bad_words[2]",
    ]
