"""What the answers of the OpenAI front say of the tokens of a model's reasoning."""

from __future__ import annotations

from tests.service.codecs import END_THINK, EOS, QWEN_VOCAB, THINK, qwen_codec
from tests.service.openai.rig import front_rig
from tests.service.rig import fake, ids

WRITTEN = [THINK, *ids("Hm."), END_THINK, *ids("Hi"), EOS]


async def test_every_endpoint_tells_them() -> None:
    """Five tokens are the reasoning: three letters and the two tags."""
    engine = fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB, scripts={"u:hi|a:": WRITTEN})
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
    for usage in (chat.usage, last.usage):
        assert usage is not None
        assert usage.completion_tokens == len(WRITTEN)
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 5
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 5
