"""What becomes of sixteen running requests under each policy, and which weights made each of their tokens.

A server for each version that never saw an update explains every answer: the tokens of a span, and the bits
of their log-probabilities, are those that it generates after the tokens before the span.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeAlias

import pytest

from penstock.v1 import control_pb2, inference_pb2, types_pb2, weights_pb2
from tests.service.rig import WAIT_S, failure_of, until
from tests.service.weights.answers import Ask, ask_one, asks, counts, explain, spans, stream_one
from tests.service.weights.brake import Brake
from tests.service.weights.fleet import ROWS, Fleet, Version, fleet
from tests.service.weights.pushing import (
    ABORT,
    COMMITTED,
    KEEP,
    RECOMPUTE,
    STAGED,
    WAIT,
    push,
    send,
    whole,
)
from tests.support.models.tiny import VOCAB

pytestmark = pytest.mark.ci

Policy: TypeAlias = weights_pb2.InFlightPolicy.ValueType
NUM_TOKENS = 60
FEW_STEPS = 5
"""Steps of at most four tokens each, so every request has tokens by then and none has all."""
LABELS = ("initial", "b", "c")
WAITING = 4
"""Requests that wait for a row when the update comes."""


@pytest.fixture
def brake(subject: Any, monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(subject, monkeypatch)


@pytest.fixture
async def all_of(subject: Any, references: Mapping[str, Any], brake: Brake) -> AsyncIterator[Fleet]:
    async with fleet(subject, references) as servers:
        yield servers
        brake.release()


async def stage(all_of: Fleet, version: Version, label: str) -> str:
    """Send new weights, which wait for CommitWeights. Returns the update's id."""
    messages = whole(version.tensors, version_label=label, stage_only=True)
    assert (await send(all_of.rig, messages)).outcome == STAGED
    return messages[0].begin.update_id


def start(all_of: Fleet, questions: list[Ask]) -> list[asyncio.Task[inference_pb2.Output]]:
    """Half of them are streams, half are answered once."""
    return [
        asyncio.create_task((stream_one if i % 4 < 2 else ask_one)(all_of.rig, question))
        for i, question in enumerate(questions)
    ]


async def sixteen_running(
    all_of: Fleet, brake: Brake, questions: list[Ask]
) -> list[asyncio.Task[inference_pb2.Output]]:
    """Start requests, and hold the engine when each has some tokens."""
    brake.hold()
    tasks = start(all_of, questions)
    await brake.running(len(questions), steps=FEW_STEPS)
    return tasks


async def commit(
    all_of: Fleet, update_id: str, policy: Policy, **fields: Any
) -> control_pb2.CommitWeightsResponse:
    reply: control_pb2.CommitWeightsResponse = await all_of.rig.control.CommitWeights(
        control_pb2.CommitWeightsRequest(update_id=update_id, in_flight=policy, **fields)
    )
    return reply


EXPECTED = {WAIT: (ROWS, 0, 0, 0), ABORT: (0, ROWS, 0, 0), KEEP: (0, 0, ROWS, 0), RECOMPUTE: (0, 0, 0, ROWS)}
POLICIES = pytest.mark.parametrize(
    "policy", EXPECTED, ids=lambda policy: weights_pb2.InFlightPolicy.Name(policy).rpartition("_")[2].lower()
)


@POLICIES
async def test_every_stream_ends_as_documented_and_no_token_is_of_mixed_weights(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version], policy: Policy
) -> None:
    """Sixteen requests run and four wait when the update is committed."""
    base = all_of.rig.engine.weights.generation
    questions = asks(ROWS + WAITING, vocab=VOCAB, num_tokens=NUM_TOKENS)
    update_id = await stage(all_of, versions["b"], "b")
    tasks = await sixteen_running(all_of, brake, questions[:ROWS])
    tasks += start(all_of, questions[ROWS:])
    await until(lambda: all_of.rig.engine.load().num_waiting == WAITING)
    committing = asyncio.create_task(commit(all_of, update_id, policy))
    await brake.queued("update")
    brake.release()
    reply = await asyncio.wait_for(committing, 3 * WAIT_S)
    assert reply.outcome == COMMITTED
    assert reply.current == types_pb2.WeightsVersion(label="b", generation=base + 1)
    assert reply.previous == types_pb2.WeightsVersion(label="initial", generation=base)
    assert counts(reply.in_flight) == EXPECTED[policy]
    assert reply.paused_for.ToNanoseconds() > 0
    outputs = await asyncio.wait_for(asyncio.gather(*tasks), 3 * WAIT_S)
    for question, output in zip(questions[:ROWS], outputs[:ROWS], strict=True):
        await check_running(all_of, base, policy, question, output)
    for question, output in zip(questions[ROWS:], outputs[ROWS:], strict=True):
        (span,) = await explain(all_of.references, question, output)
        assert (span.version, span.generation, len(span.tokens)) == ("b", base + 1, NUM_TOKENS)
    load = all_of.rig.engine.load()
    assert (load.num_running, load.num_waiting, load.pages_used) == (0, 0, 0)


async def check_running(
    all_of: Fleet, base: int, policy: Policy, question: Ask, output: inference_pb2.Output
) -> None:
    """Check what weights.proto says of a request that ran when the update came. `base`: the old
    generation.
    """
    if policy == KEEP:  # what the new weights make of the old KV, no server explains; test_keep.py does
        first, second = output.weights
        old = types_pb2.WeightsVersion(label="initial", generation=base)
        assert (first.first_output_token, first.version) == (0, old)
        assert second.version == types_pb2.WeightsVersion(label="b", generation=base + 1)
        kept = inference_pb2.Output(weights=[first], token_ids=output.token_ids[: second.first_output_token])
        kept.logprobs.sampled.extend(output.logprobs.sampled[: second.first_output_token])
        kept.logprobs.top.extend(output.logprobs.top[: second.first_output_token])
        assert len((await explain(all_of.references, question, kept))[0].tokens) > 0
        assert len(output.token_ids) == NUM_TOKENS
        assert output.finish.reason == types_pb2.FINISH_REASON_MAX_TOKENS
        return
    cut = await explain(all_of.references, question, output)
    versions = [span.version for span in cut]
    assert cut[0].tokens, "it ran before the update"
    if policy == WAIT:
        assert (versions, len(cut[0].tokens)) == (["initial"], NUM_TOKENS)
    elif policy == ABORT:
        assert versions == ["initial"]
        assert len(cut[0].tokens) < NUM_TOKENS
        assert output.finish.reason == types_pb2.FINISH_REASON_ABORTED
        assert output.finish.message
    else:
        assert versions == ["initial", "b"]
        assert len(output.token_ids) == NUM_TOKENS
        assert cut[1].tokens


async def test_a_request_lives_through_many_updates(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version]
) -> None:
    """RECOMPUTE four times: each of the five spans is what its own weights make of all tokens before it."""
    base = all_of.rig.engine.weights.generation
    questions = asks(ROWS, vocab=VOCAB, num_tokens=100, seed=3)
    labels = ["b", "c", "initial", "b"]
    tasks = await sixteen_running(all_of, brake, questions)
    for number, label in enumerate(labels, 1):
        pushing = asyncio.create_task(
            push(all_of.rig, versions[label].tensors, version_label=label, in_flight=RECOMPUTE)
        )
        await brake.queued("update", number)
        brake.hold(tokens_of=ROWS, generation=base + number)
        assert counts((await pushing).in_flight) == EXPECTED[RECOMPUTE]
        await brake.holding()
    brake.release()
    for question, output in zip(questions, await asyncio.gather(*tasks), strict=True):
        cut = await explain(all_of.references, question, output)
        assert [span.version for span in cut] == ["initial", *labels]
        assert [span.generation for span in cut] == list(range(base, base + 5))
        assert all(span.tokens for span in cut)


@pytest.mark.parametrize(
    ("rounds", "policy"),
    [
        pytest.param(4, WAIT, id="4-wait"),
        *(
            pytest.param(rounds, policy, id=f"{rounds}-{name}", marks=pytest.mark.sweep)
            for rounds, policy, name in [
                (4, ABORT, "abort"),
                (4, RECOMPUTE, "recompute"),
                (10, WAIT, "wait"),
                (10, ABORT, "abort"),
                (10, RECOMPUTE, "recompute"),
            ]
        ),
    ],
)
@pytest.mark.timeout(900)
async def test_nothing_is_mixed_whatever_the_moment(
    all_of: Fleet, versions: Mapping[str, Version], policy: Policy, rounds: int
) -> None:
    """Sixteen callers ask again and again, while new weights are pushed one after the other; nothing is held
    up, so the updates come at any moment of prefill and decode.
    """
    base, over = all_of.rig.engine.weights.generation, asyncio.Event()
    answered: list[tuple[Ask, inference_pb2.Output]] = []
    seen: set[int] = set()

    async def caller(number: int) -> None:
        rng = random.Random(number)
        while not over.is_set():
            (question,) = asks(1, vocab=VOCAB, num_tokens=rng.randint(1, 40), seed=rng.getrandbits(30))
            one = (stream_one if number % 2 else ask_one)(all_of.rig, question)
            output = await asyncio.wait_for(one, 6 * WAIT_S)
            answered.append((question, output))
            seen.update(span.version.generation for span in output.weights)

    async with asyncio.TaskGroup() as callers:
        for number in range(ROWS):
            callers.create_task(caller(number))
        for number in range(rounds):
            label = LABELS[(number + 1) % 3]
            reply = await push(all_of.rig, versions[label].tensors, version_label=label, in_flight=policy)
            assert reply.current.generation == base + number + 1
            await until(lambda newest=base + number + 1: newest in seen)  # type: ignore[misc]  # a default
        over.set()
    for question, output in answered[:: max(1, len(answered) // 200)]:
        for span in await explain(all_of.references, question, output):
            assert span.version == LABELS[(span.generation - base) % 3], "the labels come in turn"
    if policy != RECOMPUTE:
        assert all(len(spans(output)) == 1 for _, output in answered)
    assert seen >= {*range(base + 1, base + rounds + 1)}


async def test_a_wait_that_takes_too_long_changes_nothing(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version]
) -> None:
    """The running requests go on, those that waited enter, and the update is still staged."""
    questions = asks(ROWS + 1, vocab=VOCAB, num_tokens=NUM_TOKENS, seed=4)
    update_id = await stage(all_of, versions["b"], "b")
    tasks = await sixteen_running(all_of, brake, questions[:ROWS])
    request = control_pb2.CommitWeightsRequest(update_id=update_id, in_flight=WAIT)
    request.drain_timeout.FromMilliseconds(1)
    committing = asyncio.create_task(failure_of(all_of.rig.control.CommitWeights(request)))
    await brake.queued("update")
    await asyncio.sleep(0.05)
    tasks += start(all_of, questions[ROWS:])
    brake.hold(steps=2)  # the engine sees that the time is over, while all still run
    failure = await committing
    assert (failure.code.name, failure.reason) == ("DEADLINE_EXCEEDED", "DRAIN_TIMEOUT")
    brake.release()
    for question, output in zip(questions, await asyncio.gather(*tasks), strict=True):
        (span,) = await explain(all_of.references, question, output)
        assert (span.version, len(span.tokens)) == ("initial", NUM_TOKENS)
    info = await all_of.rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert (info.weights.label, info.staged_update_id) == ("initial", update_id)
    assert (await commit(all_of, update_id, WAIT)).outcome == COMMITTED


@pytest.mark.parametrize("policy", [ABORT, KEEP, RECOMPUTE], ids=["abort", "keep", "recompute"])
async def test_weights_change_while_the_server_is_paused(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version], policy: Policy
) -> None:
    """A pause keeps sixteen requests, an update comes meanwhile, and Resume lets them go on."""
    base = all_of.rig.engine.weights.generation
    questions = asks(ROWS + WAITING, vocab=VOCAB, num_tokens=NUM_TOKENS, seed=5)
    tasks = await sixteen_running(all_of, brake, questions[:ROWS])
    pausing = asyncio.ensure_future(all_of.rig.control.Pause(control_pb2.PauseRequest(in_flight=KEEP)))
    await brake.queued("pause")
    brake.release()
    assert counts((await pausing).in_flight) == EXPECTED[KEEP]
    tasks += start(all_of, questions[ROWS:])
    load = await all_of.rig.control.GetLoad(control_pb2.GetLoadRequest())
    assert load.paused
    reply = await push(all_of.rig, versions["b"].tensors, version_label="b", in_flight=policy)
    assert counts(reply.in_flight) == EXPECTED[policy]
    await all_of.rig.control.Resume(control_pb2.ResumeRequest())
    outputs = await asyncio.wait_for(asyncio.gather(*tasks), 3 * WAIT_S)
    for question, output in zip(questions[:ROWS], outputs[:ROWS], strict=True):
        await check_running(all_of, base, policy, question, output)
    for question, output in zip(questions[ROWS:], outputs[ROWS:], strict=True):
        (span,) = await explain(all_of.references, question, output)
        assert (span.version, len(span.tokens)) == ("b", NUM_TOKENS)
