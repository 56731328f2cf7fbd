"""Requests of every kind that are running when an update comes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from penstock.runtime.engine import Engine
from penstock.v1 import inference_pb2, types_pb2
from tests.service.codecs import byte_codec
from tests.service.rig import WAIT_S, Kept, Rig, collect, generate, joined, serving, stream, until
from tests.service.weights.answers import Ask, ask_one, bits, counts, explain, spans
from tests.service.weights.brake import Brake
from tests.service.weights.fleet import Fleet, Version, fleet
from tests.service.weights.pushing import ABORT, KEEP, RECOMPUTE, WAIT, push
from tests.support.models.table import Tables, table_model
from tests.support.models.toy import toy_engine

pytestmark = pytest.mark.ci

PROMPT = (5, 17, 300, 41, 8)
NUM_TOKENS = 48


@pytest.fixture
def brake(subject: Any, monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(subject, monkeypatch)


@pytest.fixture
async def all_of(subject: Any, references: Mapping[str, Any], brake: Brake) -> AsyncIterator[Fleet]:
    async with fleet(subject, references) as servers:
        yield servers
        brake.release()


async def several(rig: Rig, n: int, **fields: Any) -> inference_pb2.GenerateResponse:
    question = Ask(PROMPT, NUM_TOKENS, seed=11).fields | fields
    question["sampling"] = {**question["sampling"], "n": n}
    reply: inference_pb2.GenerateResponse = await rig.inference.Generate(generate(**question))
    return reply


@pytest.mark.parametrize(("policy", "report"), [(RECOMPUTE, (0, 0, 0, 1)), (WAIT, (1, 0, 0, 0))])
async def test_outputs_of_one_request(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version], policy: int, report: tuple[int, ...]
) -> None:
    """Each of four outputs has its own spans, and output i is drawn with (seed, i) whatever the weights; the
    report counts the request once.
    """
    brake.hold()
    asking = asyncio.create_task(several(all_of.rig, 4))
    await brake.running(4, steps=4)
    pushing = asyncio.create_task(
        push(all_of.rig, versions["b"].tensors, version_label="b", in_flight=policy)
    )
    await brake.queued("update")
    brake.release()
    assert counts((await pushing).in_flight) == report
    reply = await asking
    assert len({tuple(output.token_ids) for output in reply.outputs}) == 4
    for output in reply.outputs:
        cut = spans(output)
        assert [span.version for span in cut] == (["initial", "b"] if policy == RECOMPUTE else ["initial"])
        for span in cut:
            assert span.tokens
            question = Ask(PROMPT, 0, seed=11).after(output.token_ids[: span.start], len(span.tokens))
            fields = question.fields
            fields["sampling"] = {**fields["sampling"], "n": output.index + 1}
            told = await all_of.references[span.version].inference.Generate(generate(**fields))
            expected = told.outputs[output.index]
            assert tuple(expected.token_ids) == span.tokens
            assert bits(expected.logprobs, 0, len(span.tokens)) == span.logprobs


@pytest.mark.parametrize("policy", [WAIT, ABORT, KEEP, RECOMPUTE], ids=["wait", "abort", "keep", "recompute"])
async def test_more_outputs_than_rows(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version], policy: int
) -> None:
    """Twenty outputs and sixteen rows: four have not begun when the update comes, and none hangs. To WAIT is
    to wait for the whole request, so all of its outputs are of the old weights.
    """
    brake.hold()
    asking = asyncio.create_task(several(all_of.rig, 20))
    load = all_of.rig.engine.load
    await until(lambda: load().num_running + load().num_waiting == 20)
    brake.hold(steps=5)
    await brake.holding()
    assert load().num_waiting == 4
    pushing = asyncio.create_task(
        push(all_of.rig, versions["b"].tensors, version_label="b", in_flight=policy)
    )
    await brake.queued("update")
    brake.release()
    report = counts((await asyncio.wait_for(pushing, 3 * WAIT_S)).in_flight)
    assert sum(report) == 1
    reply = await asyncio.wait_for(asking, 3 * WAIT_S)
    assert len(reply.outputs) == 20
    for output in reply.outputs:
        labels = [span.version.label for span in output.weights]
        if policy == WAIT:
            assert labels == ["initial"]
        elif output.token_ids and policy != ABORT:
            assert labels in (["initial", "b"], ["b"])
        if policy == ABORT:
            assert "b" not in labels or output.finish.reason != types_pb2.FINISH_REASON_ABORTED
        else:
            assert len(output.token_ids) == NUM_TOKENS
    assert all_of.rig.engine.load().pages_used == 0


async def test_a_constraint_holds_across_an_update(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version]
) -> None:
    """The regex counts its characters, each of which is one token: so what comes after the update is what the
    new weights generate for as many as were left.
    """

    def constrained(num: int) -> dict[str, Any]:
        return {
            "constraint": types_pb2.Constraint(regex=f"[a-f]{{{num}}}"),
            "output": {"text": True, "logprobs": 2},
        }

    question = Ask(PROMPT, 100, seed=3)
    brake.hold()
    asking = asyncio.create_task(ask_one(all_of.rig, question, **constrained(NUM_TOKENS)))
    await brake.running(1, steps=10)
    pushing = asyncio.create_task(
        push(all_of.rig, versions["b"].tensors, version_label="b", in_flight=RECOMPUTE)
    )
    await brake.queued("update")
    brake.release()
    assert counts((await pushing).in_flight) == (0, 0, 0, 1)
    output = await asking
    assert re.fullmatch(f"[a-f]{{{NUM_TOKENS}}}", output.text)
    cut = spans(output)
    assert [span.version for span in cut] == ["initial", "b"]
    for span in cut:
        left = NUM_TOKENS - span.start
        after = question.after(output.token_ids[: span.start], 100)
        told = await ask_one(all_of.references[span.version], after, **constrained(left))
        count = len(span.tokens)
        assert tuple(told.token_ids[:count]) == span.tokens
        assert bits(told.logprobs, 0, count) == span.logprobs


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
async def test_json_stays_json_across_updates(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version], policy: int
) -> None:
    schema = {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 12, "maxItems": 12}
    question = Ask(PROMPT, 200, seed=4)
    brake.hold()
    asking = asyncio.create_task(
        ask_one(
            all_of.rig,
            question,
            constraint=types_pb2.Constraint(json_schema=json.dumps(schema)),
            output={"text": True},
        )
    )
    await brake.running(1, steps=6)
    pushing = asyncio.create_task(push(all_of.rig, versions["b"].tensors, in_flight=policy))
    await brake.queued("update")
    brake.release()
    await pushing
    output = await asking
    assert len(output.weights) == 2
    found = json.loads(output.text)
    assert len(found) == 12
    assert all(item in ("x", 1, None) for item in found)


async def test_a_stream_tells_of_new_weights_where_they_begin(
    all_of: Fleet, brake: Brake, versions: Mapping[str, Version]
) -> None:
    """OutputDelta.weights is set with the first delta of the new weights and no other, and deltas that wait
    for their reader are not merged across the change.
    """
    question = Ask(PROMPT, NUM_TOKENS)
    brake.hold()
    call = all_of.rig.inference.Stream(stream(**question.fields, min_tokens_per_message=1000))
    collecting = asyncio.create_task(collect(call))
    await brake.running(1, steps=5)
    pushing = asyncio.create_task(
        push(all_of.rig, versions["b"].tensors, version_label="b", in_flight=RECOMPUTE)
    )
    await brake.queued("update")
    brake.release()
    await pushing
    messages = await collecting
    told = [m.delta.weights.label for m in messages if m.HasField("delta") and m.delta.HasField("weights")]
    assert messages[0].started.weights.label == "initial"
    assert [label for label in told if label != "initial"] == ["b"]
    (output,) = joined(messages).outputs
    cut = await explain(all_of.references, question, output)
    assert [span.version for span in cut] == ["initial", "b"]


# -- stop strings, with models that say one character for ever --


def saying(character: str) -> Tables:
    """Weights that generate this character, whatever came before."""
    return Tables.constant([9.0 if token == ord(character) else 0.0 for token in range(61)])


@pytest.fixture(scope="module")
def sayer() -> Iterator[Engine]:
    """Yield an engine for which a token is a byte."""
    model = dataclasses.replace(table_model(saying("0")), text=byte_codec())
    engine = toy_engine(model, max_decode_steps=2)
    yield engine
    engine.shutdown()


@pytest.fixture
def monotone(sayer: Engine) -> Engine:
    """Return an engine that says "0" until its weights change."""
    sayer.update_weights(saying("0").tensors(), label="0").result(WAIT_S)
    return sayer


@pytest.mark.parametrize("stop", ["001", "01", "0011", "0111"])
@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
async def test_a_stop_string_may_begin_on_old_weights_and_end_on_new_ones(
    monotone: Engine, monkeypatch: pytest.MonkeyPatch, policy: int, stop: str
) -> None:
    brake = Brake(monotone, monkeypatch)
    async with serving(Kept(monotone)) as rig:
        brake.hold()
        fields: dict[str, Any] = {
            "sampling": {"temperature": 0.0, "n": 2},
            "stopping": {"max_tokens": 100, "stop": [stop]},
            "output": {"logprobs": 0},
        }
        asking = asyncio.ensure_future(rig.inference.Generate(generate("0", **fields)))
        streaming = asyncio.create_task(collect(rig.inference.Stream(stream("0", **fields))))
        await brake.running(4, steps=5)
        pushing = asyncio.create_task(push(rig, saying("1").tensors(), in_flight=policy))
        await brake.queued("update")
        brake.release()
        await pushing
        for reply in (await asking, joined(await streaming)):
            for output in reply.outputs:
                first, second = output.weights
                num_old = second.first_output_token
                assert first.first_output_token == 0
                zeros, ones = stop.count("0"), stop.count("1")
                assert num_old >= zeros
                assert list(output.token_ids) == [ord("0")] * num_old + [ord("1")] * ones
                assert output.text == "0" * (num_old - zeros)
                assert output.finish.reason == types_pb2.FINISH_REASON_STOP
                assert output.finish.match.stop == stop
                assert len(output.logprobs.sampled) == len(output.token_ids)
