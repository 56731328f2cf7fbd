"""Random combinations of every field of the contract against a running server with the demo model.

Whatever is asked for: an answer or a typed refusal, in bounded time; afterwards no request, no page and no
compile is left over, and the server answers as before. Seeded: `PENSTOCK_FUZZ_SEED` tries others. Under
`make test-all` there are more requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.service.requests.generate import Features
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import Rig, serving, taken_apart, until
from tests.support.models.compilation_cache import TEST_CACHE

SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "20261121"))
AT_ONCE = 12
CONTEXT = 160
REFUSALS = {
    (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
    (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_KV_CAPACITY"),
    (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FEATURE"),
    (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_TOO_OLD"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY"),  # many callers' templates at once
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", "y", None]}, "maxItems": 4},
    {"type": "string", "format": "date"},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}},
    {},
)
WORDS = ("one", "Olga", " and", "\n", "<|im_end|>", "é", "🙂", "{", "9", "", "a" * 300)
TOOL = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})


class Maker:
    """Makes random messages. Most values are in range, so that most requests run; every field is set
    sometimes.
    """

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._wild = False

    def maybe(self, share: float = 0.25) -> bool:
        return self._rng.random() < share

    def pick(self, *values: Any) -> Any:
        return self._rng.choice(values)

    def bad(self, value: Any, good: Any) -> Any:
        """`value`, which must be refused, sometimes and only in wild requests."""
        return value if self._wild and self.maybe(0.3) else good

    def token(self) -> int:
        return self._rng.randrange(self._vocab_size) + (
            self._vocab_size if self._wild and self.maybe(0.01) else 0
        )

    def tokens(self, most: int) -> list[int]:
        return [self.token() for _ in range(self._rng.randint(0, most))]

    def text(self) -> str:
        return "".join(self._rng.choices(WORDS, k=self._rng.randint(1, 6)))[:400]

    def fill(self, message: Any, **makers: Any) -> None:
        """Set each field sometimes, by its maker, which returns a value, or a list for repeated fields."""
        for name, (share, make) in makers.items():
            if not self.maybe(share):
                continue
            value = make()
            if isinstance(value, list):
                getattr(message, name).extend(value)
            elif isinstance(value, Duration):
                getattr(message, name).CopyFrom(value)
            else:
                setattr(message, name, value)

    def sampling(self, message: types_pb2.SamplingParams) -> None:
        rng = self._rng
        self.fill(
            message,
            temperature=(0.7, lambda: self.bad(float("nan"), self.pick(0.0, 0.5, 1.0, 2.0, 30.0))),
            top_p=(0.3, lambda: self.pick(0.1, 0.9, 1.0, 1.0, 1e-9)),
            top_k=(0.3, lambda: self.bad(2**31, self.pick(0, 1, 5, 10**6))),
            min_p=(0.3, lambda: self.bad(1.5, self.pick(0.0, 0.05, 0.5, 1.0))),
            presence_penalty=(0.3, lambda: self.bad(2.1, rng.uniform(-2, 2))),
            frequency_penalty=(0.3, lambda: self.bad(2.1, rng.uniform(-2, 2))),
            repetition_penalty=(0.3, lambda: self.bad(0.0, self.pick(0.5, 1.0, 1.3, 50.0))),
            seed=(0.4, lambda: rng.getrandbits(64)),
            n=(0.3, lambda: self.bad(0, self.pick(1, 2, 3, 5))),
            bad_words=(0.2, lambda: self.bad([self.pick(*WORDS) for _ in range(3)], ["one", " and a"])),
            allowed_token_ids=(0.15, lambda: self.tokens(40)),
        )
        if self.maybe(0.25):
            for _ in range(rng.randint(1, 20)):
                message.logit_bias[self.token()] = self.pick(-100.0, -1.0, 3.0, 100.0, float("-inf"))

    def stopping(self, message: types_pb2.StoppingParams) -> None:
        rng = self._rng
        message.max_tokens = rng.randint(1, 24)
        self.fill(
            message,
            min_tokens=(0.2, lambda: self.bad(99, rng.randint(0, message.max_tokens))),
            stop=(0.3, lambda: [self.bad("", self.pick("e", "\n\n", ". ", "zzz"))]),
            stop_token_ids=(0.2, lambda: self.tokens(5)),
            ignore_eos=(0.3, lambda: True),
            include_stop=(0.3, lambda: True),
            time_limit=(0.1, lambda: Duration(nanos=self.bad(-5, self.pick(1, 10**6, 5 * 10**8)))),
        )
        message.max_tokens = self.bad(0, message.max_tokens)

    def output(self, message: types_pb2.OutputOptions) -> None:
        self.fill(
            message,
            text=(0.1, lambda: self.pick(True, False)),
            token_ids=(0.1, lambda: self.pick(True, False)),
            logprobs=(0.3, lambda: self.bad(21, self.pick(0, 1, 5, 20))),
            prompt_logprobs=(0.25, lambda: self.bad(21, self.pick(0, 1, 5, 20))),
            skip_special_tokens=(0.3, lambda: self.pick(True, False)),
            echo_prompt_token_ids=(0.3, lambda: True),
        )

    def constraint(self, message: types_pb2.Constraint) -> None:
        kind = self.pick("json_schema", "json_object", "regex", "ebnf", "choice", self.bad("none", "choice"))
        if kind == "json_schema":
            message.json_schema = self.bad('{"type": "nonsense"}', json.dumps(self.pick(*SCHEMAS)))
        elif kind == "json_object":
            message.json_object.SetInParent()
        elif kind == "regex":
            message.regex = self.bad("(", self.pick("[a-z]{3,9}", "(yes|no)", "a*", r"\d{2}:\d{2}"))
        elif kind == "ebnf":
            message.ebnf = self.bad("start: nowhere", self.pick('start: "a" start | "b"', "start: /[0-9]+/"))
        elif kind == "choice":
            message.choice.choices.extend(self.bad([], self.pick(["yes", "no"], ["", "a"], ["one"])))

    def chat(self, message: types_pb2.ChatPrompt) -> None:
        message.messages.add(role="user", content=self.pick("What is the weather in Paris?", self.text()))
        if self.maybe(0.3):
            message.messages.add(role=self.bad("nobody", self.pick("assistant", "user")), content=self.text())
        if self.maybe(0.2):
            turn = message.messages.add(role="assistant")
            turn.tool_calls.add(
                id="c1", name="get_weather", arguments_json=self.bad("[]", '{"city": "Rome"}')
            )
            message.messages.add(role="tool", content="rain", tool_call_id=self.bad("c2", "c1"))
        if self.maybe(0.5):
            message.tools.add(
                name="get_weather",
                description="of a city",
                parameters_json=self.bad("3", self.pick(TOOL, "")),
            )
        self.fill(
            message,
            tool_choice=(0.4, lambda: self.bad("elsewhere", self._choice(message))),
            chat_template=(
                0.1,
                lambda: self.bad("{{", "{{ messages[0].content }}"),
            ),
            template_options_json=(0.1, lambda: self.bad('{"tools": 1}', '{"x": 1}')),
        )

    def _choice(self, message: types_pb2.ChatPrompt) -> str:
        return str(self.pick("auto", "none", *(["required", "get_weather"] if message.tools else ())))

    def fields(self, message: Any) -> None:
        """Every field of a GenerateRequest or StreamRequest; one request in three may be refused."""
        self._wild = self.maybe(0.33)
        kind = self.pick("prompt", "prompt_token_ids", "chat", "prompt", "chat")
        if kind == "prompt":
            message.prompt = self.text() * self.pick(1, 1, 1, 60)
        elif kind == "prompt_token_ids":
            message.prompt_token_ids.ids.extend(self.tokens(self.pick(8, 60, 2 * CONTEXT)))
        else:
            self.chat(message.chat)
        self.sampling(message.sampling)
        self.stopping(message.stopping)
        self.output(message.output)
        if self.maybe(0.3):
            self.constraint(message.constraint)
        self.fill(
            message,
            request_id=(0.2, lambda: self.bad("a\x00b", self.pick("same", f"id-{self._rng.random()}"))),
            model=(0.1, lambda: self.bad("other", "demo")),
            adapter=(0.1, lambda: self.bad("lora", "")),
            priority=(0.2, lambda: self._rng.randint(-3, 3)),
        )
        if self.bad(self.maybe(0.1), False):
            message.min_weights.generation = 1000
        self.fill(
            message.cache,
            cache_salt=(0.2, lambda: self.bad("s" * 300, self.pick("a", "b"))),
            bypass_prefix_cache=(0.2, lambda: True),
        )
        self.fill(
            message.context,
            truncation=(0.5, lambda: self._rng.randint(0, 4)),
            reserve_tokens=(0.2, lambda: self.bad(10**6, self.pick(0, 1, 30))),
            cap_max_tokens=(0.3, lambda: True),
        )


async def ask(rig: Rig, maker: Maker, ended: Counter[str]) -> None:
    """Make one request and read it to its end, or leave midway."""
    timeout_s = 60.0
    try:
        if maker.maybe(0.5):
            request = inference_pb2.GenerateRequest()
            maker.fields(request)
            reply = await rig.inference.Generate(request, timeout=timeout_s)
            assert len(reply.outputs) == max(request.sampling.n, 1)
            ended["generated"] += 1
            return
        message = inference_pb2.StreamRequest()
        maker.fields(message)
        call = rig.inference.Stream(message, timeout=timeout_s)
        leave = maker.maybe(0.2)
        async for _ in call:
            if leave:
                call.cancel()
                ended["left"] += 1
                return
        ended["streamed"] += 1
    except grpc.aio.AioRpcError as error:
        failure = taken_apart(error)
        if failure.info is None or (failure.code, failure.reason) not in REFUSALS:
            pytest.fail(f"no refusal that a caller may expect: {failure}")
        ended[failure.reason] += 1


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    config = EngineConfig(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        max_model_len=CONTEXT,
        page_size=16,
        kv_cache_bytes=40 * 16 * 1024 * 4,
        max_queued_requests=64,
        scheduling_policy="priority",
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    features = Features(request_templates=True)
    async with serving(Engine.from_pretrained("demo", config), features=features) as rig:
        yield rig


@pytest.mark.ci
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_requests", [120, pytest.param(1000, marks=pytest.mark.sweep)])
async def test_random_requests_are_answered_or_refused_and_leave_nothing_behind(
    rig: Rig, num_requests: int
) -> None:
    rng = random.Random(SEED)
    maker = Maker(rng, rig.engine.info.vocab_size)
    ended: Counter[str] = Counter()
    plain = inference_pb2.GenerateRequest(prompt="Once upon a time")
    plain.sampling.temperature, plain.stopping.max_tokens = 0.0, 16
    before = (await rig.inference.Generate(plain)).outputs[0]
    waiting = num_requests

    async def worker() -> None:
        nonlocal waiting
        while waiting > 0:
            waiting -= 1
            await ask(rig, maker, ended)

    async with asyncio.timeout(1000):
        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    await until(lambda: rig.engine.load().num_running + rig.engine.load().num_waiting == 0)
    assert sum(ended.values()) == num_requests
    assert ended["generated"] + ended["streamed"] > num_requests // 5, ended
    assert ended["INVALID_FIELD"] > 0
    load = await rig.control.GetLoad(control_pb2.GetLoadRequest())
    assert (load.running_requests, load.queued_requests, load.kv_pages_used) == (0, 0, 0)
    assert rig.engine.compiles_after_warmup == 0
    after = (await rig.inference.Generate(plain)).outputs[0]
    assert (list(after.token_ids), after.text) == (list(before.token_ids), before.text)
