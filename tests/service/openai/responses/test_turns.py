"""Items of /v1/responses become the turns that a chat template reads."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import ChatMessage, Image, ToolCall
from penstock.openai.failures import ApiError
from penstock.openai.routes.responses.turns import turn_params, turns_of
from penstock.openai.schemas.responses import ResponsesBody, carried

URL = "data:image/png;base64,YWJj"
USER = {"role": "user", "content": "What is the weather in Rome and in Oslo?"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
}


def call(call_id: str, city: str) -> dict[str, Any]:
    arguments = f'{{"city": "{city}"}}'
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": "get_weather",
        "arguments": arguments,
        "status": "completed",
    }


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def body_of(items: Any, instructions: str | None = None) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "demo", "input": items, "instructions": instructions})


def turns(items: Any, instructions: str | None = None) -> list[ChatMessage]:
    body = body_of(items, instructions)
    return turns_of(body.input, body.instructions)


def test_text_is_a_turn_of_the_user() -> None:
    assert turns("Hello", "Be brief.") == [ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")]


def test_a_loop_of_an_agent_becomes_one_turn_with_both_calls() -> None:
    items = [USER, THOUGHT, SAID, call("a", "Rome"), call("b", "Oslo"), result("a", "28"), result("b", "3")]
    calls = (
        ToolCall("a", "get_weather", '{"city": "Rome"}'),
        ToolCall("b", "get_weather", '{"city": "Oslo"}'),
    )
    assert turns(items) == [
        ChatMessage("user", str(USER["content"])),
        ChatMessage("assistant", "I look.", calls, reasoning="Hm."),
        ChatMessage("tool", "28", tool_call_id="a"),
        ChatMessage("tool", "3", tool_call_id="b"),
    ]


def test_each_round_of_an_agent_is_a_turn_of_its_own() -> None:
    items = [
        USER,
        THOUGHT,
        call("a", "Rome"),
        result("a", "28"),
        THOUGHT,
        call("b", "Oslo"),
        result("b", "3"),
    ]
    assert [turn.role for turn in turns(items)] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [turn.reasoning for turn in turns(items)] == ["", "Hm.", "", "Hm.", ""]


def test_two_messages_of_the_assistant_are_two_turns() -> None:
    assert [turn.content for turn in turns([USER, SAID, SAID])][1:] == ["I look.", "I look."]


def test_what_was_said_after_a_call_belongs_to_its_turn() -> None:
    _, turn, _ = turns([USER, SAID, call("a", "Rome"), SAID, result("a", "28")])
    assert (turn.content, len(turn.tool_calls)) == ("I look.\nI look.", 1)


def test_developers_speak_for_the_system() -> None:
    items = [{"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}, USER]
    assert turns(items)[0] == ChatMessage("system", "Be brief.")


def test_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert turns([{"role": "user", "content": parts}]) == [ChatMessage("user", "a\nb")]
    (*_, turn) = turns(
        [USER, call("a", "Rome"), {"type": "function_call_output", "call_id": "a", "output": parts}]
    )
    assert turn == ChatMessage("tool", "a\nb", tool_call_id="a")


def test_reasoning_comes_back_by_any_of_its_forms() -> None:
    string = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": carried("Hm, é.")}
    summary = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Short."}]}
    assert [turns([USER, item, SAID])[1].reasoning for item in (string, summary)] == ["Hm, é.", "Short."]


def test_nulls_are_fields_that_were_left_out() -> None:
    items = [
        USER,
        {**THOUGHT, "status": None, "encrypted_content": None},
        {**call("a", "Rome"), "caller": None},
    ]
    assert turns(items)[1].reasoning == "Hm."


def test_images_stay_where_they_stand_in_a_message() -> None:
    text, image = {"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": URL}
    seen = {"role": "user", "content": [text, image]}
    (turn,) = turns([seen])
    assert turn.content == ("Look:", Image(b"abc", "image/png"))
    assert turn_params(body_of([seen]).input, None)["chat.messages[0].parts[1].image.data"] == (
        "input[0].content[1].image_url"
    )


def test_no_image_is_fetched() -> None:
    with pytest.raises(ApiError) as caught:
        turns([{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/x"}]}])
    assert (caught.value.param, caught.value.code) == ("input[0].content[0].image_url", "invalid_value")
    assert "not fetched" in str(caught.value)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input[1].type"),
        ({"type": "web_search_call", "id": "ws_1", "action": {}}, "input[1].type"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "high"}]},
            "input[1].content[0].detail",
        ),
        (
            {"role": "assistant", "content": [{"type": "input_image", "image_url": URL}]},
            "input[1].content[0].type",
        ),
        (
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": [{"type": "input_file", "file_id": "f"}],
            },
            "input[1].output[0].type",
        ),
        (
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAsomething"},
            "input[1].encrypted_content",
        ),
    ],
)
def test_what_cannot_be_taken_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        turns([USER, item])
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported_value")


def test_an_empty_input_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        turns([], "Be brief.")
    assert caught.value.param == "input"


def test_paths_of_the_contract_lead_back_to_items() -> None:
    body = body_of([USER, THOUGHT, call("a", "Rome"), call("b", "Oslo"), result("a", "28")], "Be brief.")
    params = turn_params(body.input, body.instructions)
    assert params["chat.messages[0]"] == "instructions"
    assert params["chat.messages[1]"] == "input[0]"
    assert params["chat.messages[2]"] == "input[1]"
    assert params["chat.messages[3].tool_call_id"] == "input[4].call_id"
    for field in ("content", "parts"):
        assert params[f"chat.messages[0].{field}"] == "instructions"
        assert params[f"chat.messages[1].{field}"] == "input[0].content"
        assert params[f"chat.messages[3].{field}"] == "input[4].output"
    text = body_of("hi", "Be brief.")
    assert turn_params(text.input, text.instructions)["chat.messages[1]"] == "input"
