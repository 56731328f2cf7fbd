"""The embedding API's `sampling_params_callback` may replace the sampling parameters of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from penstock.runtime.engine import Engine
from penstock.runtime.errors import InvalidRequest, UnsupportedFeature
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling, SamplingParams
from tests.support.models.toy import VOCAB, toy_config, toy_model, toy_tokens

PROMPT = (5, 9, 2)
GREEDY = ResolvedSampling(temperature=0.0)
GREEDY_PARAMS = SamplingParams(temperature=0.0)
TOKENS = toy_tokens(PROMPT, 6)
STOPPING = StoppingParams(max_tokens=6, ignore_eos=True)


class Hook:
    """A callback that does the `work` that each test gives it."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.work: Callable[[Request], Any] = lambda request: request.sampling

    def __call__(self, request: Request) -> ResolvedSampling:
        self.seen.append(request)
        return cast("ResolvedSampling", self.work(request))


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Engine, Hook]]:
    hook = Hook()
    engine = Engine(toy_model(), toy_config(), sampling_params_callback=hook)
    engine.start()
    yield engine, hook
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


@pytest.fixture
def engine(started: tuple[Engine, Hook]) -> Engine:
    return started[0]


@pytest.fixture
def hook(started: tuple[Engine, Hook]) -> Hook:
    """Return the callback, reset."""
    started[1].__init__()  # type: ignore[misc]  # there is nothing else to reset
    return started[1]


def tokens(engine: Engine, sampling: SamplingParams | None = GREEDY_PARAMS) -> tuple[int, ...]:
    return engine.generate(PROMPT, sampling=sampling, stopping=STOPPING, request_id="r").token_ids


def test_it_sees_each_request_and_may_leave_it_unchanged(engine: Engine, hook: Hook) -> None:
    assert tokens(engine) == tuple(TOKENS)
    (request,) = hook.seen
    assert (request.request_id, request.prompt_token_ids) == ("r", PROMPT)
    assert dataclasses.replace(request.sampling, seed=None) == GREEDY
    assert request.stopping == STOPPING


def test_its_result_replaces_the_callers_parameters(engine: Engine, hook: Hook) -> None:
    """It makes any request greedy, or allows a single token."""
    wild = SamplingParams(temperature=50.0, seed=1)
    assert tokens(engine, wild) != tuple(TOKENS)
    hook.work = lambda request: GREEDY
    assert tokens(engine, wild) == tuple(TOKENS)
    hook.work = lambda request: dataclasses.replace(request.sampling, allowed_token_ids=(7,))
    assert tokens(engine, wild) == (7,) * 6


def test_words_of_several_tokens_are_forbidden_too(engine: Engine, hook: Hook) -> None:
    """All other logits of the toy model are 0, so token 0 is chosen if the model's own token is forbidden."""
    hook.work = lambda request: dataclasses.replace(GREEDY, bad_words=((TOKENS[0], TOKENS[1]),))
    assert tokens(engine)[:2] == (TOKENS[0], 0)
    assert TOKENS[1] != 0


def test_a_seed_that_it_leaves_out_is_drawn(engine: Engine, hook: Hook) -> None:
    hook.work = lambda request: ResolvedSampling(temperature=50.0)
    first, second = (tokens(engine, SamplingParams(temperature=50.0, seed=1)) for _ in range(2))
    assert first != second


@pytest.mark.parametrize("nonsense", [None, {"temperature": 0.0}, "greedy", 0, object()])
def test_nonsense_is_a_type_error(engine: Engine, hook: Hook, nonsense: Any) -> None:
    hook.work = lambda request: nonsense
    with pytest.raises(TypeError, match="sampling_params_callback must return ResolvedSampling, not"):
        tokens(engine)
    assert engine.load().num_running + engine.load().num_waiting == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"allowed_token_ids": (3, VOCAB)}, r"sampling\.allowed_token_ids\[1\]"),
        ({"logit_bias": ((-1, 1.0),)}, r"sampling\.logit_bias\[0\]"),
        ({"bad_words": ((1, VOCAB),)}, r"sampling\.bad_words\[1\]"),
        ({"temperature": -1.0}, r"sampling\.temperature"),
        ({"repetition_penalty": 0.0}, r"sampling\.repetition_penalty"),
    ],
)
def test_what_it_returns_is_checked(engine: Engine, hook: Hook, changes: dict[str, Any], field: str) -> None:
    """Its result is checked as a caller's own parameters would be."""
    hook.work = lambda request: dataclasses.replace(request.sampling, **changes)
    with pytest.raises(InvalidRequest, match=field):
        tokens(engine)
    assert engine.load().num_running + engine.load().num_waiting == 0


@pytest.mark.parametrize(
    "error", [UnsupportedFeature(["sampling.temperature"]), PermissionError("not today")]
)
def test_its_errors_reach_the_caller(engine: Engine, hook: Hook, error: Exception) -> None:
    """This holds for every way to submit a request, and the engine goes on."""

    def refuse(request: Request) -> ResolvedSampling:
        raise error

    hook.work = refuse
    request = Request("r", PROMPT, GREEDY, STOPPING)
    for ask in (
        lambda: engine.submit(request, lambda outputs: None),
        lambda: engine.stream(PROMPT, sampling=GREEDY_PARAMS),
        lambda: tokens(engine),
    ):
        with pytest.raises(type(error)) as caught:
            ask()
        assert caught.value is error
    hook.work = lambda request: request.sampling
    assert tokens(engine) == tuple(TOKENS), "the id must be free again"
