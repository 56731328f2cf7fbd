"""Ids and seeds of the outputs of one request."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.request import (
    MAX_OUTPUTS,
    CacheParams,
    Request,
    output_id,
    output_seed,
    outputs_of,
    request_id_of,
)
from penstock.runtime.requests.sampling import ResolvedSampling

SEEDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)),
        (1234567, (6457827717110365317, 3203168211198807973, 9817491932198370423)),
    ],
)
def test_seeds_are_splitmix64s(seed: int, expected: tuple[int, ...]) -> None:
    """From the second output on, the seeds are the published sequences of SplitMix64."""
    assert tuple(output_seed(seed, i) for i in (1, 2, 3)) == expected
    assert output_seed(seed, 0) == seed


@given(SEEDS)
def test_seeds_of_one_request_differ(seed: int) -> None:
    seeds = [output_seed(seed, i) for i in range(1, MAX_OUTPUTS)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= value < 2**64 for value in seeds)


def test_outputs_have_ids_and_seeds_of_their_own() -> None:
    request = Request("r", (1, 2), ResolvedSampling(seed=7), logprobs=1, prompt_logprobs=2, priority=3)
    outputs = outputs_of(request, 3)
    assert outputs[0] == request
    assert [o.request_id for o in outputs] == ["r", "r\x001", "r\x002"]
    assert [request_id_of(o.request_id) for o in outputs] == ["r"] * 3
    assert [o.request_id for o in outputs] == [output_id("r", i) for i in range(3)]
    assert [o.sampling.seed for o in outputs] == [7, output_seed(7, 1), output_seed(7, 2)]
    assert [o.prompt_logprobs for o in outputs] == [2, None, None]
    assert {(o.prompt_token_ids, o.logprobs, o.priority) for o in outputs} == {((1, 2), 1, 3)}


def test_without_a_seed_one_is_drawn_for_all_outputs() -> None:
    first, second = (outputs_of(Request("r", (1,)), 2) for _ in range(2))
    for outputs in (first, second):
        seed = outputs[0].sampling.seed
        assert seed is not None
        assert outputs[1].sampling.seed == output_seed(seed, 1)
    assert first[0].sampling.seed != second[0].sampling.seed


def test_each_output_has_its_own_constraint() -> None:
    constraints: list[Any] = [object(), object()]
    outputs = outputs_of(Request("r", (1,)), 2, cast("Any", constraints))
    assert [o.constraint for o in outputs] == constraints


def test_bypass_and_salt_stay_as_they_are() -> None:
    """Outputs share the prompt by forking, for which no page need be published."""
    for cache in (CacheParams("tenant", bypass=True), CacheParams("tenant")):
        made = outputs_of(Request("r", (1,), cache=cache), 2)
        assert [output.cache for output in made] == [cache, cache]
        assert [output.fork_of for output in made] == [None, "r"]


def test_many_outputs_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs share everything that may be large, because only the seed differs. Checking the bias of a whole
    vocabulary again for each of 128 outputs took seconds.
    """
    bias = tuple((i, 0.5) for i in range(1000))
    sampling = ResolvedSampling(temperature=0.5, seed=7, logit_bias=bias, allowed_token_ids=(1, 2), min_p=0.1)
    request = Request("r", (1, 2), sampling)
    checked: list[ResolvedSampling] = []
    with monkeypatch.context() as patch:
        patch.setattr(ResolvedSampling, "__post_init__", lambda self: checked.append(self))
        outputs = outputs_of(request, 128)
    assert not checked
    for i, output in enumerate(outputs):
        assert output.prompt_token_ids is request.prompt_token_ids
        assert output.sampling.shares_tokens(sampling)
        assert output.sampling == dataclasses.replace(sampling, seed=output_seed(7, i))
    assert sampling.seed == 7


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_is_checked(seed: int) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.seed"):
        ResolvedSampling().seeded(seed)
