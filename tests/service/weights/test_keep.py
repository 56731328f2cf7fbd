"""What a request makes of old KV and new weights, computed by hand; and that nobody else is ever given such
KV.

The model is `tests.support.models.stamped`, whose KV tells which weights wrote it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from penstock.runtime.engine import Engine
from penstock.v1 import control_pb2, inference_pb2, types_pb2, weights_pb2
from tests.service.rig import WAIT_S, Kept, Rig, generate, serving, until
from tests.service.weights.answers import counts
from tests.service.weights.brake import Brake
from tests.service.weights.pushing import KEEP, RECOMPUTE, push
from tests.support.chunks import set_chunk
from tests.support.models.stamped import START, Stamp, fresh_tokens, kept_tokens, stamp_of, stamped_engine
from tests.support.models.toy import VOCAB

pytestmark = pytest.mark.ci

ROWS = 16
NUM_TOKENS = 60
STAMPS = (START, Stamp(2, 17), Stamp(5, 40), Stamp(3, 29), Stamp(4, 8))


@pytest.fixture(scope="module")
def kept_engine() -> Iterator[Engine]:
    made = stamped_engine(max_num_seqs=ROWS, max_num_batched_tokens=128, max_decode_steps=4)
    yield made
    assert made.compiles_after_warmup == 0
    made.shutdown()


@pytest.fixture
def engine(kept_engine: Engine) -> Engine:
    """Return the engine, which has the weights START, and no limit on the chunks of a prompt."""
    set_chunk(kept_engine, None)
    if stamp_of(kept_engine.weights.label) != START:
        kept_engine.update_weights(START.tensors(), label=START.label).result(WAIT_S)
    return kept_engine


@pytest.fixture
def brake(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(engine, monkeypatch)


@pytest.fixture
async def rig(engine: Engine, brake: Brake) -> AsyncIterator[Rig]:
    async with serving(Kept(engine)) as served:
        yield served
        brake.release()


async def ask(
    rig: Rig, prompt: Sequence[int], num_tokens: int, **fields: Any
) -> inference_pb2.GenerateResponse:
    reply: inference_pb2.GenerateResponse = await rig.inference.Generate(
        generate(
            prompt_token_ids=types_pb2.TokenIds(ids=prompt),
            sampling={"temperature": 0.0},
            stopping={"max_tokens": num_tokens, "ignore_eos": True},
            output={"text": False},
            **fields,
        )
    )
    return reply


async def update(rig: Rig, stamp: Stamp, **fields: Any) -> weights_pb2.UpdateWeightsResponse:
    return await push(rig, stamp.tensors(), version_label=stamp.label, **fields)


def made_by(output: inference_pb2.Output) -> list[Stamp]:
    """Return the weights that made each token, as the spans tell."""
    starts = [span.first_output_token for span in output.weights]
    ends = [*starts[1:], len(output.token_ids)]
    stamps = []
    for start, end, span in zip(starts, ends, output.weights, strict=True):
        stamps += [stamp_of(span.version.label)] * (end - start)
    return stamps


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts so short that one step computes all of them."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))] for _ in range(count)]


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
async def test_every_token_is_what_its_kv_and_its_weights_make(rig: Rig, brake: Brake, policy: int) -> None:
    """Sixteen requests live through four updates. Under KEEP each token's KV stays as it was written; under
    RECOMPUTE all of it is of the newest weights.
    """
    base = rig.engine.weights.generation
    questions = prompts(ROWS, seed=1)
    brake.hold()
    tasks = [asyncio.create_task(ask(rig, prompt, NUM_TOKENS)) for prompt in questions]
    await brake.running(ROWS, steps=4)
    for number, stamp in enumerate(STAMPS[1:], 1):
        pushing = asyncio.create_task(update(rig, stamp, in_flight=policy))
        await brake.queued("update", number)
        brake.hold(tokens_of=ROWS, generation=base + number)
        report = counts((await pushing).in_flight)
        assert report == ((0, 0, ROWS, 0) if policy == KEEP else (0, 0, 0, ROWS))
        await brake.holding()
    brake.release()
    told_apart = 0
    for prompt, reply in zip(questions, await asyncio.gather(*tasks), strict=True):
        (output,) = reply.outputs
        stamps = made_by(output)
        assert [stamp_of(span.version.label) for span in output.weights] == list(STAMPS)
        assert len(stamps) == NUM_TOKENS
        kept = kept_tokens(prompt, [START] * (len(prompt) - 1), stamps)
        expected: list[int] = []
        for stamp in stamps:
            expected += fresh_tokens([*prompt, *expected], 1, stamp)
        told_apart += kept != expected
        assert list(output.token_ids) == (kept if policy == KEEP else expected)
    assert told_apart == ROWS, "the two policies give different tokens, or this shows nothing"


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
async def test_nobody_is_given_pages_of_older_weights(rig: Rig, brake: Brake, policy: int) -> None:
    """A request that an update overtook leaves its pages to the prefix cache: written by old weights, by
    both, or after the update. What goes on with its text answers as a fresh server on the new weights does.
    """
    prompt = prompts(1, seed=2)[0]
    brake.hold()
    overtaken = asyncio.create_task(ask(rig, prompt, NUM_TOKENS))
    await brake.running(1, steps=5)
    pushing = asyncio.create_task(update(rig, STAMPS[1], in_flight=policy))
    await brake.queued("update")
    brake.release()
    await pushing
    (output,) = (await overtaken).outputs
    assert [stamp_of(span.version.label) for span in output.weights] == [START, STAMPS[1]]
    text = [*prompt, *output.token_ids]
    for end in (len(text), output.weights[1].first_output_token + len(prompt), 30):
        (after,) = (await ask(rig, text[:end], 20)).outputs
        assert list(after.token_ids) == fresh_tokens(text[:end], 20, STAMPS[1])
    # What the new weights alone have written may be shared, so an equal request finds it.
    again = await ask(rig, text, 20)
    assert again.usage.cached_prompt_tokens > len(text) // 2
    assert list(again.outputs[0].token_ids) == fresh_tokens(text, 20, STAMPS[1])


async def test_a_prompt_that_an_update_overtakes_is_nobody_elses(
    rig: Rig, brake: Brake, engine: Engine
) -> None:
    """KEEP in the middle of a prefill: the first chunks of the prompt are old KV, and the rest is new."""
    chunk, rng = 4, random.Random(3)
    cuts = range(0, 64, chunk)
    while True:  # until a prompt whose outputs tell how many of its tokens are old
        prompt = [rng.randrange(VOCAB) for _ in range(64)]
        ways = {
            cut: kept_tokens(prompt, [START] * cut + [STAMPS[1]] * (len(prompt) - 1 - cut), [STAMPS[1]] * 20)
            for cut in cuts
        }
        if len({tuple(tokens) for tokens in ways.values()}) == len(ways):
            break
    set_chunk(engine, chunk)
    other = prompts(1, seed=4)[0]
    brake.hold()
    decoding = asyncio.create_task(ask(rig, other, NUM_TOKENS))  # its tokens show how far the prefill is
    await brake.running(1, steps=2)
    overtaken = asyncio.create_task(ask(rig, prompt, 20))
    await until(lambda: engine.load().num_running + engine.load().num_waiting == 2)
    brake.hold(steps=5)
    await brake.holding()
    pushing = asyncio.create_task(update(rig, STAMPS[1], in_flight=KEEP))
    await brake.queued("update")
    brake.release()
    assert counts((await pushing).in_flight) == (0, 0, 2, 0)
    (output,) = (await overtaken).outputs
    assert [(s.first_output_token, s.version.label) for s in output.weights] == [(0, STAMPS[1].label)]
    (cut,) = [cut for cut, tokens in ways.items() if tokens == list(output.token_ids)]
    assert cut > 0, "the update came in the middle of the prompt"
    (after,) = (await ask(rig, prompt, 20)).outputs
    assert list(after.token_ids) == fresh_tokens(prompt, 20, STAMPS[1])
    (first,) = (await decoding).outputs
    assert list(first.token_ids) == kept_tokens(other, [START] * (len(other) - 1), made_by(first))


async def test_pages_of_the_same_weights_come_back_with_no_generation(rig: Rig) -> None:
    """There and back: each generation computes a prompt anew, then shares it."""
    prompt = [7, 3, 50, 2, 9, 9, 1, 30, 4, 4, 12, 60, 5]
    for stamp in (START, STAMPS[1], START, STAMPS[1]):
        await update(rig, stamp)
        for cached in (0, 12):
            reply = await ask(rig, prompt, 10)
            assert reply.usage.cached_prompt_tokens == cached
            assert list(reply.outputs[0].token_ids) == fresh_tokens(prompt, 10, stamp)


async def test_half_an_update_is_never_seen(rig: Rig, brake: Brake) -> None:
    """Both tensors change with each update, and are pushed in either order; each answer is of one pair."""
    over = asyncio.Event()
    wrong: list[str] = []
    seen: set[Stamp] = set()

    async def caller(number: int) -> None:
        rng = random.Random(number)
        while not over.is_set():
            (prompt,) = prompts(1, seed=rng.getrandbits(30))
            (output,) = (await ask(rig, prompt, 20)).outputs
            (span,) = output.weights
            stamp = stamp_of(span.version.label)
            if list(output.token_ids) != fresh_tokens(prompt, 20, stamp):
                wrong.append(f"{stamp}: {prompt} {list(output.token_ids)}")
            seen.add(stamp)

    async with asyncio.TaskGroup() as group:
        for number in range(ROWS):
            group.create_task(caller(number))
        for number in range(2, 9):
            stamp = Stamp(1 + number % 5, (7 * number) % VOCAB)
            tensors = stamp.tensors()
            order = sorted(tensors, reverse=number % 2 == 0)
            await push(rig, {name: tensors[name] for name in order}, version_label=stamp.label)
            await until(lambda newest=stamp: newest in seen or bool(wrong))  # type: ignore[misc]  # a default
        over.set()
    assert wrong == []


async def test_an_offloaded_and_freed_server_answers_as_before(rig: Rig) -> None:
    """Sleep: nothing of the freed KV cache is believed afterwards, and new weights may come meanwhile."""
    prompt = [7, 3, 50, 2, 9, 9, 1, 30]
    assert list((await ask(rig, prompt, 20)).outputs[0].token_ids) == fresh_tokens(prompt, 20, START)
    sleep = control_pb2.PauseRequest(free_kv_cache=True, offload_weights=True)
    assert (await rig.control.Pause(sleep)).freed_bytes > 0
    await update(rig, STAMPS[2])
    waiting = asyncio.create_task(ask(rig, prompt, 20))
    await rig.control.Resume(control_pb2.ResumeRequest())
    answered = await waiting
    assert answered.usage.cached_prompt_tokens == 0
    assert list(answered.outputs[0].token_ids) == fresh_tokens(prompt, 20, STAMPS[2])
