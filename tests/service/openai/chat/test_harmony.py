"""A model that writes Harmony, as gpt-oss does, behind the OpenAI front: what its messages become in answers
of chats and of responses, and what its template is told.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.service.codecs import HARMONY_ENDS, harmony_codec
from tests.service.openai.responses.sent_events import accumulated, events_of
from tests.service.openai.rig import front_rig
from tests.service.rig import fake

CODEC = harmony_codec()
HI: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "get", "parameters": PARAMETERS}}
PROMPT = "get|<|start|>user<|message|>hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
CALLED = f"{THOUGHT}{PREAMBLE}{CALL}"
REASONING_TOKENS = 1 + 8 + 1 + 3 + 1
"""<|channel|> analysis <|message|> Hm. <|end|>"""


def engine(scripts: dict[str, str]) -> Any:
    """Make an engine that writes these texts to these prompts."""
    tokens = {prompt: CODEC.encode(text, add_special_tokens=False) for prompt, text in scripts.items()}
    return fake(codec=CODEC, vocab_size=264, max_model_len=2000, eos_token_ids=HARMONY_ENDS, scripts=tokens)


async def test_a_chat() -> None:
    async with front_rig(engine({PROMPT: CALLED})) as rig:
        answer = await rig.openai.chat.completions.create(model="fake", messages=HI, tools=[TOOL])
        made = await rig.openai.chat.completions.create(
            model="fake", messages=HI, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in made]
    (choice,) = answer.choices
    message: Any = choice.message
    assert (message.content, message.reasoning, choice.finish_reason) == ("I look.", "Hm.", "tool_calls")
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get", '{"city": "Rome"}')
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Hm."
    called = [piece.function for delta in deltas for piece in delta.tool_calls or ()]
    assert called[0].name == "get"
    assert "".join(piece.arguments for piece in called) == '{"city": "Rome"}'
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    for usage in (answer.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == REASONING_TOKENS


async def test_a_final_message() -> None:
    final = f"{THOUGHT}<|channel|>final<|message|>Four.<|return|>"
    async with front_rig(engine({PROMPT.removeprefix("get|"): final})) as rig:
        answer = await rig.openai.chat.completions.create(model="fake", messages=HI)
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning, message.tool_calls) == ("Four.", "Hm.", None)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("effort", ["low", "high"])
async def test_the_effort_reaches_the_template(effort: Any) -> None:
    scripts = {PROMPT.replace("get|", f"{effort}|"): "<|channel|>final<|message|>Yes."}
    async with front_rig(engine(scripts)) as rig:
        answer = await rig.openai.chat.completions.create(model="fake", messages=HI, reasoning_effort=effort)
        response = await rig.openai.responses.create(model="fake", input="hi", reasoning={"effort": effort})
    assert (answer.choices[0].message.content, response.output_text) == ("Yes.", "Yes.")


async def test_an_agent_sends_the_call_back() -> None:
    """With what the model thought and said before it, as clients do that keep the whole message."""
    after = (
        f"{PROMPT}<|message|>Hm.\n\nI look."
        'get{"city": "Rome"}<|end|><|start|>tool<|message|>28<|end|><|start|>assistant'
    )
    scripts = {PROMPT: CALLED, after: f"{THOUGHT}<|channel|>final<|message|>Warm."}
    async with front_rig(engine(scripts)) as rig:
        first = await rig.openai.chat.completions.create(model="fake", messages=HI, tools=[TOOL])
        message = first.choices[0].message
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "28"}
        messages = [*HI, message.to_dict(), result]
        second = await rig.openai.chat.completions.create(model="fake", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "Warm."


async def test_a_response() -> None:
    """The model thinks again after it has spoken. In a stream that may be an item of its own, or not where
    both came in one message of the server.
    """
    tool = {"type": "function", **TOOL["function"], "strict": False}
    asked = {"model": "fake", "input": "hi", "tools": [tool]}
    async with front_rig(engine({PROMPT: f"{THOUGHT}{PREAMBLE}{THOUGHT}{CALL}"})) as rig:
        whole = (await rig.http.post("/v1/responses", json=asked)).json()
        sent = (await rig.http.post("/v1/responses", json={**asked, "stream": True})).text
    streamed = accumulated(events_of(sent))
    for response in (whole, streamed):
        assert openai.types.responses.Response.model_validate(response).status == "completed"
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2 * REASONING_TOKENS + 10
        texts = {"reasoning": "", "message": "", "function_call": ""}
        for item in response["output"]:
            parts = [part["text"] for part in item.get("content", ())]
            texts[item["type"]] += "".join([*parts, item.get("arguments", "")])
        assert texts == {
            "reasoning": "Hm.\n\nHm.",
            "message": "I look.",
            "function_call": '{"city": "Rome"}',
        }
        assert response["output"][-1]["type"] == "function_call"
