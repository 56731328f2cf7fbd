"""What answers of the OpenAI front say of tokens: of reasoning, of proposals, and all the ledger counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.service.usage.ledger import Counts, read_usage
from tests.service.codecs import END_THINK, QWEN_VOCAB, THINK, qwen_codec
from tests.service.openai.rig import front_rig
from tests.service.rig import fake, ids
from tests.support.models.byte_text import EOS

WRITTEN = [THINK, *ids("Hm."), END_THINK, *ids("Hi"), EOS]


async def test_every_endpoint_tells_them() -> None:
    """Five tokens are the reasoning: three letters and the two tags. Of five that were proposed, three were
    accepted; two prompts with two choices each have four times as many.
    """
    scripts = {"u:hi|a:": WRITTEN}
    engine = fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB, scripts=scripts, guesses=(5, 3))
    async with front_rig(engine) as rig:
        chat = await rig.openai.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}]
        )
        chunks = await rig.openai.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        last = [chunk async for chunk in chunks][-1]
        response = await rig.openai.responses.create(model="fake", input="hi")
        texts = await rig.openai.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=9)
    for usage in (chat.usage, last.usage):
        assert usage is not None
        assert usage.completion_tokens == len(WRITTEN)
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 5
        assert usage.completion_tokens_details.accepted_prediction_tokens == 3
        assert usage.completion_tokens_details.rejected_prediction_tokens == 2
    assert texts.usage is not None
    assert texts.usage.completion_tokens_details is not None
    assert texts.usage.completion_tokens_details.accepted_prediction_tokens == 12
    assert texts.usage.completion_tokens_details.rejected_prediction_tokens == 8
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 5


async def test_usage_is_what_the_ledger_counts(tmp_path: Path) -> None:
    """Of streams and whole answers, several choices, and several prompts."""
    engine = fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB, scripts={"u:hi|a:": WRITTEN})
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    texts = {"model": "fake", "prompt": ["a", "bcd"], "n": 2, "max_tokens": 3}
    told: list[dict[str, Any]] = []
    async with front_rig(engine, usage_file=tmp_path / "usage.db") as rig:
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "n": 2}),
            ("/v1/completions", texts),
            ("/v1/responses", {"model": "fake", "input": "hi"}),
        ):
            reply = await rig.http.post(path, json=body)
            told.append(reply.json()["usage"])
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", texts)):
            asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
            lines = (await rig.http.post(path, json=asked)).text.split("\n\n")
            assert lines[-2] == "data: [DONE]"
            told.append(json.loads(lines[-3].removeprefix("data: "))["usage"])
    counted = sum(read_usage(tmp_path / "usage.db").values(), Counts())
    assert counted.completion_tokens > 0
    assert counted.requests == len(told) + 2, "each of two prompts is a request of its own"
    assert (counted.prompt_tokens, counted.completion_tokens, counted.reasoning_tokens) == (
        sum(usage.get("prompt_tokens", 0) + usage.get("input_tokens", 0) for usage in told),
        sum(usage.get("completion_tokens", 0) + usage.get("output_tokens", 0) for usage in told),
        sum(
            (usage.get("completion_tokens_details") or usage["output_tokens_details"])["reasoning_tokens"]
            for usage in told
        ),
    )
