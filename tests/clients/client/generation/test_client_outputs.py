"""Several outputs, reasoning, tool calls and log-probabilities: unary and streamed, sync and asyncio."""

from __future__ import annotations

import pytest

from penstock import client as api
from penstock.client import (
    AsyncClient,
    ChatMessage,
    Client,
    Delta,
    Finished,
    ModelInfo,
    SamplingDefaults,
    Started,
    Tool,
)
from penstock.v1 import inference_pb2, types_pb2
from tests.clients import rich


@pytest.fixture
def rich_server(server):
    server.answer = lambda request: rich.ANSWER
    server.replies = rich.STREAM
    return server


@pytest.fixture
def client(rich_server):
    with Client(rich_server.addr) as made:
        yield made


def test_generate_and_stream_have_all_of_every_output(client):
    assert rich.without_nan(client.generate("p", n=2)) == rich.EXPECTED
    assert rich.without_nan(client.stream("p", n=2).result()) == rich.EXPECTED


async def test_generate_and_stream_have_all_of_every_output_async(rich_server):
    async with AsyncClient(rich_server.addr) as client:
        assert rich.without_nan(await client.generate("p", n=2)) == rich.EXPECTED
        async with client.stream("p", n=2) as stream:
            events = [event async for event in stream]
            assert rich.without_nan(await stream.result()) == rich.EXPECTED
        assert stream.reasoning() == "Hm, a city."
        assert stream.tool_calls() == (rich.WEATHER_CALL,)
        assert stream.text(1) == "No idea"
    with Client(rich_server.addr) as sync:
        assert repr(events) == repr(list(sync.stream("p", n=2)))  # equal but for the NaN


def test_shortcuts_are_those_of_output_0(client):
    answer = client.generate("p", n=2)
    assert (answer.text, answer.reasoning) == ("Let me see.", "Hm, a city.")
    assert answer.tool_calls == (rich.WEATHER_CALL,)
    assert answer.hidden_states is not None
    assert answer.hidden_states.rows() == [(1.0, -2.0), (0.5, 0.0), (0.25, 4.0)]
    assert answer.message == ChatMessage(
        "assistant", "Let me see.", (rich.WEATHER_CALL,), reasoning="Hm, a city."
    )
    assert answer.outputs[1].message == ChatMessage("assistant", "No idea")
    assert answer.logprobs == rich.OUTPUTS[0].logprobs


def test_events_are_told_apart_by_index(client):
    with client.stream("p", n=2) as stream:
        events = list(stream)
    started = events[0]
    assert isinstance(started, Started)
    assert (started.prompt.truncated_tokens, started.prompt.token_ids) == (7, (4, 5, 6))
    assert [(e.index, e.delta, e.reasoning) for e in events if isinstance(e, Delta)] == [
        (0, "", "Hm, "),
        (1, "No", ""),
        (0, "Let me", "a city."),
        (1, " idea", ""),
        (0, " see.", ""),
    ]
    assert [(e.index, e.text) for e in events if isinstance(e, Finished)] == [
        (1, "No idea"),
        (0, "Let me see."),
    ]


def test_what_a_stream_has_so_far_is_there_per_output(client):
    stream = client.stream("p", n=2)
    with stream:
        assert [stream.text(i) for i in (0, 1, 5)] == ["", "", ""]
        for _ in range(4):
            next(stream)
        assert [stream.text(0), stream.text(1)] == ["Let me", "No"]
        assert [stream.reasoning(0), stream.reasoning(1)] == ["Hm, a city.", ""]
        assert [stream.token_ids(0), stream.token_ids(1)] == [(10,), (12,)]
        assert stream.tool_calls() == ()
    assert stream.text() == "Let me"


def outputs(*indices):
    return inference_pb2.GenerateResponse(outputs=[inference_pb2.Output(index=i) for i in indices])


@pytest.mark.parametrize("indices", [(), (1,), (1, 0), (0, 0), (0, 2)])
def test_outputs_that_are_not_0_to_n_are_an_error(server, indices):
    server.answer = lambda request: outputs(*indices)
    with Client(server.addr) as client, pytest.raises(api.ProtocolError, match="instead of 0 to n - 1"):
        client.generate("p")


def test_a_stream_that_leaves_an_output_out_is_an_error(server):
    server.replies = [m for m in rich.STREAM if m.delta.index != 0 and m.WhichOneof("event") == "delta"]
    server.replies = [rich.STREAM[0], *server.replies, rich.STREAM[5], rich.STREAM[-1]]
    with Client(server.addr) as client, pytest.raises(api.ProtocolError, match="instead of 0 to n - 1"):
        client.stream("p").result()


def test_a_tool_loop(rich_server):
    """The loop of the docs: the answer's turn and the call's result continue the conversation."""
    turns: list[api.Turn] = [ChatMessage("user", "How warm is it in Oslo?")]
    tools = [Tool("get_weather", "Get the weather in a city.", {"type": "object"})]
    with Client(rich_server.addr) as client:
        answer = client.generate(messages=turns, tools=tools, tool_choice="get_weather")
        turns.append(answer.message)
        turns += [call.result({"degrees": 3, "in": call.arguments["city"]}) for call in answer.tool_calls]
        client.stream(messages=turns, tools=tools).result()
    first, second = rich_server.calls
    assert first.chat.tool_choice == "get_weather"
    assert second.chat.messages[1:] == [
        types_pb2.ChatMessage(
            role="assistant",
            content="Let me see.",
            reasoning="Hm, a city.",
            tool_calls=[
                types_pb2.ToolCall(id="call-1", name="get_weather", arguments_json='{"city": "Oslo"}')
            ],
        ),
        types_pb2.ChatMessage(role="tool", content='{"degrees": 3, "in": "Oslo"}', tool_call_id="call-1"),
    ]


def test_every_sampling_default_is_handed_back(server):
    server.default_sampling = types_pb2.SamplingParams(
        temperature=0.5, top_p=0.75, top_k=3, min_p=0.25,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
        seed=7, n=2, logit_bias={9: 0.5, 4: -1}, bad_words=["x"], allowed_token_ids=[1, 2],
    )  # fmt: skip
    with Client(server.addr) as client:
        info: ModelInfo = client.model_info()
    assert info.default_sampling == SamplingDefaults(
        temperature=0.5, top_p=0.75, top_k=3, min_p=0.25,
        presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5,
        seed=7, n=2, logit_bias=((4, -1.0), (9, 0.5)), bad_words=("x",), allowed_token_ids=(1, 2),
    )  # fmt: skip


def test_sampling_defaults_are_those_of_the_contract():
    contract = [field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields]
    assert list(SamplingDefaults.__dataclass_fields__) == contract
