"""Keyword arguments converted to the messages of all calls but generation."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from penstock.client import ChatMessage, InvalidRequest, Tool
from penstock.client.control import abort_request, detokenize_request, tokenize_request
from penstock.v1 import control_pb2, inference_pb2


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: tokenize_request("\ud800", None, {}), "text"),
        (
            lambda: tokenize_request(None, None, {"messages": [ChatMessage("user", "\ud800")]}),
            "chat.messages[0]",
        ),
        (lambda: detokenize_request([-1], None), "token_ids"),
        (lambda: abort_request("\ud800", None, False, ""), "request_ids.ids"),
        (lambda: abort_request(None, "\ud800", False, ""), "request_id_prefix"),
        (lambda: abort_request(None, None, True, "\ud800"), "reason"),
    ],
)
def test_every_method_tells_what_the_wire_cannot_carry_in_the_same_way(make, field):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert [v.field for v in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (("a", None, False), 'request_ids { ids: "a" }'),
        ((["a", "b"], None, False), 'request_ids { ids: "a" ids: "b" }'),
        (([], None, False), "request_ids {}"),
        ((None, "job-", False), 'request_id_prefix: "job-"'),
        ((None, None, True), "all {}"),
    ],
)
def test_abort_targets(target, text):
    expected = text_format.Parse(text + ' reason: "why"', inference_pb2.AbortRequest())
    ids, prefix, everything = target
    assert abort_request(ids, prefix, everything, "why") == expected


@pytest.mark.parametrize("target", [(None, None, False), ("a", "b", False), (None, "b", True)])
def test_abort_needs_one_target(target):
    ids, prefix, everything = target
    with pytest.raises(TypeError, match="give one of ids, prefix and all=True"):
        abort_request(ids, prefix, everything, "")


def test_an_empty_prefix_is_not_everything():
    with pytest.raises(ValueError, match="all=True"):
        abort_request(None, "", False, "")


@pytest.mark.parametrize(("text", "messages"), [(None, None), ("a", [])])
def test_tokenize_needs_one_input(text, messages):
    with pytest.raises(TypeError, match="give one of text and messages"):
        tokenize_request(text, None, {"messages": messages})


def test_tokenize_takes_all_of_a_conversation():
    request = tokenize_request(
        None,
        None,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [Tool("f")],
            "tool_choice": "f",
            "chat_template": "T",
            "template_options": {"thinking": True},
        },
    )
    assert request == text_format.Parse(
        """
        chat {
          messages { role: "user" content: "hi" } tools { name: "f" }
          tool_choice: "f" chat_template: "T" template_options_json: "{\\"thinking\\": true}"
        }
        """,
        control_pb2.TokenizeRequest(),
    )


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"tools": []}, "tools goes with messages, not with text"),
        ({"mesages": []}, "unknown option 'mesages'; did you mean 'messages'"),
        ({"temperature": 1}, "unknown option 'temperature'$"),
    ],
)
def test_wrong_calls_of_tokenize(chat, message):
    with pytest.raises(TypeError, match=message):
        tokenize_request("a", None, chat)
