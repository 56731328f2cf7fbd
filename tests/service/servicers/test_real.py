"""The service on the real engine with a golden checkpoint: what only both together can show.

Tokens against PyTorch are tests/service/servicers/test_goldens.py's; here text, stops, seeds, aborts and
traces meet the real scheduler and its timing.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.runtime.loop.requests import Delivery
from penstock.runtime.requests.request import output_seed
from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import Kept, Rig, collect, failure_of, generate, joined, serving, stream, until
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.otlp import Recorder
from tests.support.suite.drawing import few

pytestmark = pytest.mark.ci

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3"
PROMPT = "def decode(self, text):"


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        page_size=8,
        max_model_len=512,
        kv_cache_bytes=4 << 20,
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    loaded = Engine.from_pretrained(str(GOLDEN), config)
    loaded.start()
    yield Kept(loaded)
    assert loaded.compiles_after_warmup == 0
    assert loaded.load().pages_used == 0
    loaded.shutdown()


async def answer(rig: Rig, prompt: str = PROMPT, **fields: Any) -> inference_pb2.GenerateResponse:
    reply: inference_pb2.GenerateResponse = await asyncio.wait_for(
        rig.inference.Generate(generate(prompt, **fields)), 60
    )
    return reply


FREE = {"ignore_eos": True, "max_tokens": 60}
SEEDED = {"temperature": 1.0, "seed": 7}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": {"temperature": 0}},
    "filters": {"sampling": {**SEEDED, "top_k": 40, "top_p": 0.9, "min_p": 0.01}},
    "logprobs": {"output": {"logprobs": 3}},
    "specials": {"output": {"skip_special_tokens": False}},
    "eos": {"stopping": {"max_tokens": 400}},
    "stop_ids": {"stopping": {**FREE, "stop_token_ids": list(range(10, 25))}},
    "penalties": {
        "sampling": {
            **SEEDED, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3,
            "logit_bias": {20: 3.0, 21: -3.0}, "bad_words": ["re", "def"],
        },
    },
    "several": {"sampling": {**SEEDED, "n": 3}, "stopping": {**FREE, "stop": ["e"]}},
    "prompt_logprobs": {"output": {"logprobs": 3, "prompt_logprobs": 2}},
    "cut": {"context": {"truncation": 2, "reserve_tokens": 508}},
    "regex": {"constraint": {"regex": "[a-f]{20,40}"}},
    "schema": {
        "sampling": {**SEEDED, "n": 2},
        "constraint": {"json_schema": '{"type": "array", "items": {"enum": ["x", 1, null]}, "minItems": 5}'},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
async def test_deltas_are_generates_output(engine: Any, name: str) -> None:
    """The seed is equal, so the tokens are, whatever else runs: here four streams at once."""
    fields = {"request_id": "", "sampling": SEEDED, "stopping": FREE, **OPTIONS[name]}
    async with serving(engine) as rig:
        answered = await answer(rig, **fields)
        prompt = rounded(answered.prompt)
        streams = [
            rig.inference.Stream(stream(PROMPT, **fields, min_tokens_per_message=n)) for n in (1, 1, 7, 500)
        ]
        for messages in await asyncio.gather(*(collect(s) for s in streams)):
            parts, whole = joined(messages), inference_pb2.GenerateResponse()
            whole.CopyFrom(answered)
            logprobs = parts.outputs[0].logprobs.sampled, whole.outputs[0].logprobs.sampled
            assert len(logprobs[0]) == (60 if "logprobs" in name else 0)
            assert list(logprobs[0]) == pytest.approx(list(logprobs[1]), rel=1e-4)
            assert rounded(parts.prompt) == pytest.approx(prompt, rel=1e-4, nan_ok=True)
            for output in (*parts.outputs, *whole.outputs):
                output.ClearField("logprobs")  # another batch shape rounds differently in the last bits
            assert parts.outputs == whole.outputs
            for usage in (parts.usage, whole.usage):
                usage.ClearField("cached_prompt_tokens")  # the first request found less in the prefix cache
            assert parts.usage == whole.usage
    num_prompt = len(engine.text.encode(PROMPT))
    left = 4 if name == "cut" else num_prompt
    assert (whole.usage.prompt_tokens, whole.prompt.truncated_tokens) == (left, num_prompt - left)
    assert len(whole.outputs) == fields["sampling"].get("n", 1)
    for output in whole.outputs:
        text = engine.text.decode(list(output.token_ids), skip_special_tokens=name != "specials")
        assert output.text == (text.partition("e")[0] if name == "several" else text)
        if name == "regex":
            assert re.fullmatch("[a-f]{20,40}", output.text)
        elif name == "schema" and output.finish.reason == types_pb2.FINISH_REASON_EOS:
            assert set(json.loads(output.text)) <= {"x", 1, None}


def rounded(prompt: types_pb2.PromptInfo) -> list[float]:
    """Return the output with rounded log-probabilities, also of the candidates."""
    values = list(prompt.logprobs.sampled)
    return [*values, *(c.logprob for top in prompt.logprobs.top for c in top.candidates)]


async def test_outputs_of_one_prompt(engine: Any) -> None:
    """Output i equals what a request with seed (seed, i) gives alone, and the prompt is computed once."""
    async with serving(engine) as rig:
        engine.flush_prefix_cache()
        several = await answer(rig, sampling={**SEEDED, "n": 3}, stopping=FREE)
        assert several.usage.cached_prompt_tokens == 0
        for i, output in enumerate(several.outputs):
            alone = await answer(rig, sampling={**SEEDED, "seed": output_seed(7, i)}, stopping=FREE)
            assert (alone.outputs[0].text, alone.outputs[0].token_ids) == (output.text, output.token_ids)
    assert len({output.text for output in several.outputs}) == 3
    assert several.usage.completion_tokens == 180


async def test_seeds(engine: Any) -> None:
    async with serving(engine) as rig:
        texts = [
            (await answer(rig, sampling={"temperature": 1.0, "seed": seed}, stopping=FREE)).outputs[0].text
            for seed in (1, 1, 2)
        ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings(engine: Any, include: bool) -> None:
    """Every substring of three characters that the free run generated becomes a stop of a run
    with its seed.
    """
    async with serving(engine) as rig:
        free = (await answer(rig, sampling=SEEDED, stopping=FREE)).outputs[0].text
        stops = sorted({free[i : i + 3] for i in range(0, 60, 5)})
        for stop in stops:
            asked = {**FREE, "stop": [stop], "include_stop": include}
            whole, messages = await asyncio.gather(
                answer(rig, sampling=SEEDED, stopping=asked),
                collect(rig.inference.Stream(stream(PROMPT, sampling=SEEDED, stopping=asked))),
            )
            expected = free.split(stop)[0] + (stop if include else "")
            for output in (whole.outputs[0], joined(messages).outputs[0]):
                assert output.text == expected
                assert output.finish.reason == types_pb2.FINISH_REASON_STOP
                assert output.finish.match.stop == stop
            assert list(whole.outputs[0].token_ids) == list(joined(messages).outputs[0].token_ids)


async def test_limits(engine: Any) -> None:
    async with serving(engine) as rig:
        full = await answer(rig, stopping={"ignore_eos": True, "max_tokens": 2**32 - 1})
        assert full.outputs[0].finish.reason == types_pb2.FINISH_REASON_CONTEXT_FULL
        assert full.usage.prompt_tokens + full.usage.completion_tokens == 512
        soft = await answer(rig, stopping={"ignore_eos": True, "time_limit": Duration(nanos=1)})
        assert soft.outputs[0].finish.reason == types_pb2.FINISH_REASON_TIME_LIMIT
        ids = {"ids": [5] * 512}
        failure = await failure_of(rig.inference.Generate(generate(prompt_token_ids=ids)))
        assert (failure.reason, failure.info.metadata["max_prompt_tokens"]) == ("PROMPT_TOO_LONG", "511")


LONG: dict[str, Any] = {"stopping": {"ignore_eos": True}, "sampling": {"temperature": 0}}


async def test_abort_and_duplicate(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is held after its first delivery, so that the request cannot end before the abort."""
    goes_on, deliver = threading.Event(), Delivery.deliver

    def deliver_and_wait(delivery: Delivery) -> None:
        is_due = delivery.is_pending
        deliver(delivery)
        assert not is_due or goes_on.wait(60)

    monkeypatch.setattr(Delivery, "deliver", deliver_and_wait)
    async with serving(engine) as rig:
        call = rig.inference.Stream(stream(PROMPT, request_id="r", **LONG))
        assert (await call.read()).WhichOneof("event") == "started"
        assert (await call.read()).delta.token_ids
        failure = await failure_of(rig.inference.Generate(generate("x", request_id="r")))
        assert failure.reason == "DUPLICATE_REQUEST_ID"
        request = inference_pb2.AbortRequest(request_id_prefix="r", reason="enough")
        (result,) = (await rig.inference.Abort(request)).results
        assert (result.request_id, result.outcome) == ("r", inference_pb2.ABORT_OUTCOME_ABORTED)
        assert engine.load().pages_used == 0, "free before the answer"
        goes_on.set()
        messages = []
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert messages[-2].finished.finish.reason == types_pb2.FINISH_REASON_ABORTED
        assert messages[-2].finished.finish.message == "enough"


@pytest.mark.parametrize(
    ("state", "how"),
    few(
        product(("waiting", "prefill", "decode"), ("cancel", "deadline")),
        (),
        ci=[("waiting", "deadline"), ("prefill", "cancel"), ("decode", "cancel")],
    ),
)
async def test_vanished_clients_free_everything(engine: Any, state: str, how: str) -> None:
    """`prefill` has a prompt of many chunks; `waiting` waits behind four requests that fill the rows."""
    async with serving(engine) as rig:
        others = [
            asyncio.ensure_future(answer(rig, stopping={"ignore_eos": True}))
            for _ in range(4 if state == "waiting" else 1)
        ]
        await until(lambda: engine.load().num_running == len(others))
        prompt = {"ids": [9] * (500 if state == "prefill" else 5)}
        timeout = 0.05 if how == "deadline" else None
        call = rig.inference.Stream(stream(prompt_token_ids=prompt, **LONG), timeout=timeout)
        if how == "cancel":
            if state == "decode":
                await call.read()
                assert (await call.read()).delta.token_ids
            else:
                await call.read()
            call.cancel()
        await call.code()
        replies = await asyncio.gather(*others)
        assert {r.usage.completion_tokens for r in replies} == {512 - replies[0].usage.prompt_tokens}
        await until(lambda: engine.load().pages_used == 0)


async def test_spans_have_the_engines_times(engine: Any) -> None:
    recorder = Recorder()
    async with serving(engine, tracing=recorder.tracing) as rig:
        reply = await answer(rig, stopping=FREE)
    spans = recorder.spans
    lengths = {name: spans[name].duration_ns for name in ("queue", "prefill", "decode")}
    timing = reply.timing
    assert lengths["queue"] == timing.queue.ToNanoseconds()
    assert lengths["queue"] + lengths["prefill"] == timing.time_to_first_token.ToNanoseconds()
    assert sum(lengths.values()) == timing.total.ToNanoseconds()
