"""Parameters out of range are refused, and every violation is listed by the contract's path of its field."""

from __future__ import annotations

import math

import pytest

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.request import (
    MAX_ENGINE_ID_CHARS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Finish,
    FinishReason,
    Request,
    StepOutput,
    StoppingParams,
)
from penstock.runtime.requests.sampling import ResolvedSampling

NAN, INF = math.nan, math.inf


def violations(make, **fields) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        make(**fields)
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("temperature", (0.0, 1e-9, 1.0, 100.0), (-1e-9, 100.1, NAN, INF, -INF)),
        ("top_k", (0, 1, 2**31 - 1), (-1, 2**31)),
        ("top_p", (1e-9, 0.5, 1.0), (0.0, -0.1, 1.0 + 1e-9, NAN, INF, -INF)),
        ("min_p", (0.0, 0.5, 1.0), (-1e-9, 1.0 + 1e-9, NAN, INF, -INF)),
        ("seed", (None, 0, 2**64 - 1), (-1, 2**64)),
    ],
)
def test_sampling_ranges(field, allowed, refused):
    for value in allowed:
        assert getattr(ResolvedSampling(**{field: value}), field) == value
    for value in refused:
        assert violations(ResolvedSampling, **{field: value}) == [f"sampling.{field}"], value


@pytest.mark.parametrize(
    ("field", "path", "allowed", "refused"),
    [
        ("max_tokens", "max_tokens", (None, 1, 10**9), (0, -1)),
        ("min_tokens", "min_tokens", (0, 1, 10**9), (-1,)),
        ("time_limit_s", "time_limit", (None, 1e-9, 1e9), (0.0, -1.0, NAN, INF)),
        ("stop", "stop", ((), ("a",) * MAX_STOP_STRINGS), (("a",) * (MAX_STOP_STRINGS + 1),)),
        ("stop", "stop[0]", (("a" * MAX_STOP_STRING_CHARS,),), (("",), ("a" * (MAX_STOP_STRING_CHARS + 1),))),
        ("stop", "stop[1]", (("a", "b"),), (("a", ""),)),
        (
            "stop_token_ids",
            "stop_token_ids",
            ((), tuple(range(MAX_STOP_TOKEN_IDS))),
            (tuple(range(MAX_STOP_TOKEN_IDS + 1)),),
        ),
    ],
)
def test_stopping_ranges(field, path, allowed, refused):
    for value in allowed:
        assert getattr(StoppingParams(**{field: value}), field) == value
    for value in refused:
        assert violations(StoppingParams, **{field: value}) == [f"stopping.{path}"], value


def test_min_tokens_may_equal_but_not_pass_max_tokens():
    assert StoppingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    assert violations(StoppingParams, max_tokens=3, min_tokens=4) == ["stopping.min_tokens"]
    # Only max_tokens is to blame if no min_tokens could be right.
    assert violations(StoppingParams, max_tokens=0, min_tokens=4) == ["stopping.max_tokens"]


def test_request_ranges():
    assert Request("r" * MAX_ENGINE_ID_CHARS, (1,), logprobs=0).logprobs == 0
    assert violations(Request, request_id="", prompt_token_ids=(1,)) == ["request_id"]
    too_long = "r" * (MAX_ENGINE_ID_CHARS + 1)
    assert violations(Request, request_id=too_long, prompt_token_ids=(1,)) == ["request_id"]
    assert violations(Request, request_id="r", prompt_token_ids=()) == ["input"]
    assert violations(Request, request_id="r", prompt_token_ids=(1,), logprobs=-1) == ["output.logprobs"]


def test_every_violation_is_listed_at_once():
    assert violations(ResolvedSampling, temperature=-1.0, top_k=-1, top_p=2.0, min_p=2.0, seed=-1) == [
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.seed",
    ]
    assert violations(
        StoppingParams,
        max_tokens=0,
        min_tokens=-1,
        stop=("",) * (MAX_STOP_STRINGS + 1),
        stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1)),
        time_limit_s=-1.0,
    ) == [
        "stopping.max_tokens",
        "stopping.min_tokens",
        "stopping.stop",
        # Strings beyond the limit are not listed one by one.
        *(f"stopping.stop[{i}]" for i in range(MAX_STOP_STRINGS)),
        "stopping.stop_token_ids",
        "stopping.time_limit",
    ]
    assert violations(Request, request_id="", prompt_token_ids=(), logprobs=-1) == [
        "request_id",
        "input",
        "output.logprobs",
    ]


def test_the_message_names_field_and_value():
    with pytest.raises(InvalidRequest, match=r"sampling\.top_p: must be above 0 and at most 1, not 1\.5"):
        ResolvedSampling(top_p=1.5)


def test_an_invalid_request_without_violations_is_a_bug():
    with pytest.raises(ValueError, match="at least one"):
        InvalidRequest([])
    assert str(InvalidRequest([Violation("a", "b"), Violation("c", "d")])) == "a: b; c: d"


def test_greedy_is_temperature_zero():
    assert ResolvedSampling(temperature=0.0).greedy
    assert not ResolvedSampling(temperature=1e-9).greedy


def test_an_output_is_the_last_with_a_finish_or_an_error():
    assert not StepOutput("r", (1,)).last
    assert StepOutput("r", finish=Finish(FinishReason.EOS, token_id=1)).last
    assert StepOutput("r", error=RuntimeError("dead")).last
