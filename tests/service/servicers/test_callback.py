"""`sampling_params_callback` behind the server: its changes to requests, and its errors, reach clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.runtime.engine import Engine
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.request import Request
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.service.rig import Kept, collect, failure_of, generate, joined, serving, stream, until
from tests.support.models.toy import toy_config, toy_model, toy_tokens

PROMPT = [4, 8, 15]
WILD = {"temperature": 50.0, "seed": 3}
GREEDY = ResolvedSampling(temperature=0.0)
Work = Callable[[Request], Any]


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Any, list[Work]]]:
    work: list[Work] = []
    engine = Engine(toy_model(), toy_config(), sampling_params_callback=lambda request: work[-1](request))
    engine.start()
    yield Kept(engine), work
    assert engine.load().pages_used == 0
    engine.shutdown()


def ask(make: Any = generate, **sampling: Any) -> Any:
    stopping = {"max_tokens": 5, "ignore_eos": True}
    return make(
        prompt_token_ids={"ids": PROMPT}, stopping=stopping, sampling={**WILD, **sampling}, request_id="r"
    )


async def test_what_it_makes_of_a_request_is_what_is_done(started) -> None:
    """For each output: the first is made greedy, the second may only generate token 7."""
    engine, work = started

    def rewrite(request: Request) -> ResolvedSampling:
        if request.request_id == "r":
            return GREEDY
        return dataclasses.replace(request.sampling, allowed_token_ids=(7,))

    work.append(rewrite)
    async with serving(engine) as rig:
        reply = await rig.inference.Generate(ask(n=2))
        streamed = joined(await collect(rig.inference.Stream(ask(stream, n=2))))
    for outputs in (reply.outputs, streamed.outputs):
        assert [list(o.token_ids) for o in outputs] == [toy_tokens(PROMPT, 5), [7] * 5]


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (
            InvalidRequest([Violation("sampling.temperature", "not here")]),
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
        ),
        (PermissionError("secret"), "INTERNAL", "INTERNAL"),
    ],
    ids=["refusal", "bug"],
)
async def test_its_errors_end_the_request(started, error, code, reason, last) -> None:
    """Also if it refuses only the second output; then the first is freed."""
    engine, work = started

    def refuse(request: Request) -> ResolvedSampling:
        if request.request_id.endswith("\x001") or not last:
            raise error
        return request.sampling

    work.append(refuse)
    async with serving(engine) as rig:
        for call in (
            rig.inference.Generate(ask(n=1 + last)),
            rig.inference.Stream(ask(stream, n=1 + last)).read(),
        ):
            failure = await failure_of(call)
            assert (failure.code.name, failure.reason) == (code, reason)
            assert "secret" not in failure.message
            await until(lambda: engine.load().num_running + engine.load().num_waiting == 0)
        work.append(lambda request: GREEDY)
        assert list((await rig.inference.Generate(ask())).outputs[0].token_ids) == toy_tokens(PROMPT, 5)


async def test_nonsense_is_a_bug(started) -> None:
    engine, work = started
    work.append(lambda request: {"temperature": 0})
    async with serving(engine) as rig:
        failure = await failure_of(rig.inference.Generate(ask()))
        assert (failure.code.name, failure.reason) == ("INTERNAL", "INTERNAL")
