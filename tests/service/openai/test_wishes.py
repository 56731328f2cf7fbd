"""Fields that ask for nothing, or only wish something, are taken. What had no effect is told in a header and
in the log.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from penstock.openai import reading
from penstock.openai.app import ENDPOINTS
from penstock.openai.failures import ApiError
from penstock.openai.schemas.base import Body
from penstock.shared.logs import JsonLines, OneLine
from tests.service.openai.rig import FrontRig, front_rig

HI = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake", "messages": HI},
    "/v1/completions": {"model": "fake", "prompt": "hi"},
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "fake", "input": "hi"},
    "/v1/embeddings": {"model": "fake", "input": "hi"},
    **{path: {"query": "a", "documents": ["b"]} for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    **{path: {"text_1": "a", "text_2": "b"} for path in ("/v1/score", "/score")},
    "/tokenize": {"model": "fake", "prompt": "hi"},
    "/detokenize": {"model": "fake", "tokens": [5]},
}
"""The least that each endpoint can be asked."""
BODIES: dict[str, type[Body]] = {row.path: row.body for row in ENDPOINTS if row.path in LEAST and row.body}

VLLM: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
    "max_repetition_pattern_size": 0,
    "min_repetition_pattern_size": 0,
    "repetition_min_count": 0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "stop_token_ids": [],
    "bad_words": [],
    "priority": 0,
    "best_of": 1,
    "logits_processors": [],
    "kv_transfer_params": {},
    "vllm_xargs": {},
    "guided_decoding_backend": "auto",
}
"""The defaults of the fields that vLLM has everywhere, of its protocol.py files, and lists and objects of
nothing.
"""
OPENAI: dict[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stream": False,
    "store": False,
    "service_tier": "auto",
    "metadata": {},
}
"""The defaults that OpenAI's API reference names."""
OWN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "n": 1,
        "stop": [],
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": 0,
        "verbosity": "medium",
        "function_call": "none",
        "functions": [],
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "modalities": ["text"],
        "echo": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "include_reasoning": True,
        "documents": [],
        "mm_processor_kwargs": {},
    },
    "/v1/completions": {
        "n": 1,
        "stop": [],
        "logit_bias": {},
        "suffix": "",
        "echo": False,
        "add_special_tokens": True,
        "prompt_embeds": [],
        "response_format": {"type": "text"},
    },
    "/v1/responses": {
        "background": False,
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "top_logprobs": 0,
        "tool_choice": "auto",
        "tools": [],
        "include": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"context": "auto", "mode": "standard"},
        "context_management": [],
        "access_programs": {},
        "background_options": {},
        "image": {},
        "n": 1,
        "response_format": {"type": "text"},
        "logprobs": False,
        "add_special_tokens": False,
        "enable_response_messages": False,
    },
}
NEUTRAL = [(path, name, value) for path, own in OWN.items() for name, value in (VLLM | OPENAI | own).items()]
WITHOUT_NEUTRAL_VALUE = {
    *("guided_whitespace_pattern", "moderation", "audio"),
    *("web_search_options", "previous_response_id", "conversation", "prompt", "max_tokens", "messages"),
    *("max_completion_tokens", "reasoning_effort", "verbosity", "chat_template", "previous_input_messages"),
}
"""Refused fields that ask for something by each value but null. An empty `web_search_options` asks for a
search.
"""


def read(path: str, **fields: Any) -> tuple[Any, set[str]]:
    """Return the body with these fields, and which have no effect."""
    ignored: set[str] = set()
    data = json.dumps(LEAST[path] | fields).encode()
    return reading._parsed(data, BODIES[path], ignored), ignored


async def send(rig: FrontRig, path: str, **fields: Any) -> tuple[int, set[str]]:
    """Return the status, and the fields that the header names."""
    reply = await rig.http.post(path, json=LEAST[path] | fields)
    told = reply.headers.get("x-penstock-ignored", "")
    return reply.status_code, set(told.split(", ")) - {""}


async def test_neutral_values_ask_for_nothing() -> None:
    async with front_rig() as rig:
        for path, name, value in NEUTRAL:
            assert await send(rig, path, **{name: value}) == (200, set()), (path, name, value)


@pytest.mark.parametrize("path", OWN)
def test_each_refused_field_has_a_neutral_value_or_none_at_all(path: str) -> None:
    refused = {name for name in BODIES[path].unsupported if "." not in name}
    neutral = {name for at, name, _ in NEUTRAL if at == path}
    assert refused <= neutral | WITHOUT_NEUTRAL_VALUE
    for name in refused:
        assert read(path, **{name: None}) == read(path)


def test_one_is_not_true_and_zero_is_not_false() -> None:
    for name, value in (("echo", 0), ("use_beam_search", 0), ("best_of", True), ("length_penalty", True)):
        with pytest.raises(ApiError):
            read("/v1/chat/completions", **{name: value})
    assert read("/v1/chat/completions", length_penalty=1) == read("/v1/chat/completions", length_penalty=1.0)


EVERYWHERE: dict[str, Any] = {
    "store": True,
    "service_tier": "priority",
    "client_metadata": {"x-codex-installation-id": "a"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
}
"""What has no effect anywhere."""
REMARKS: dict[str, Any] = {
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "metadata": {"a": "b"},
}
"""What has no effect either, but is in the answer of /v1/responses again."""
BREAKPOINT = {"mode": "explicit"}
WISHES: list[tuple[str, dict[str, Any], set[str]]] = [
    *((path, {name: value}, {name}) for path in LEAST for name, value in EVERYWHERE.items()),
    *(
        (path, {name: value}, set() if path == "/v1/responses" else {name})
        for path in LEAST
        for name, value in REMARKS.items()
    ),
    *(
        (path, {"guided_decoding_backend": "guidance:no-fallback"}, {"guided_decoding_backend"})
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    ),
    ("/v1/chat/completions", {"verbosity": "low"}, {"verbosity"}),
    ("/v1/chat/completions", {"prediction": {"type": "content", "content": "x"}}, {"prediction"}),
    ("/v1/responses", {"text": {"verbosity": "high"}}, {"text.verbosity"}),
    ("/v1/responses", {"reasoning": {"summary": "detailed"}}, {"reasoning.summary"}),
    ("/v1/responses", {"reasoning": {"generate_summary": "auto"}}, {"reasoning.generate_summary"}),
    *(
        ("/v1/responses/input_tokens", {name: value}, {name})
        for name, value in (
            ("text", {"format": {"type": "json_object"}}),
            ("parallel_tool_calls", False),
            ("truncation", "auto"),
        )
    ),
    *(
        (path, fields, {name})
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")
        for path, fields, name in (
            ("/v1/chat/completions", {"reasoning_effort": effort}, "reasoning_effort"),
            ("/v1/responses", {"reasoning": {"effort": effort}}, "reasoning.effort"),
            ("/v1/responses/input_tokens", {"reasoning": {"effort": effort}}, "reasoning.effort"),
        )
    ),
    *(
        (path, {"messages": [{"role": role, "name": "Al", "content": "x"}, *HI], **more}, {"messages[].name"})
        for path, more in (("/v1/chat/completions", {}), ("/tokenize", {"prompt": None}))
        for role in ("system", "developer", "user", "assistant")
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "hi", "prompt_cache_breakpoint": BREAKPOINT}]}]},
        {"messages[].content[].prompt_cache_breakpoint"},
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "hi", "prompt_cache_breakpoint": BREAKPOINT}]}]},
        {"input[].content[].prompt_cache_breakpoint"},
    ),
    ("/v1/chat/completions", {"user": "u", "store": True}, {"store", "user"}),
    ("/v1/chat/completions", {"stream": True, "user": "u"}, {"user"}),
]  # fmt: skip


async def test_wishes_are_taken_and_the_header_names_those_without_effect() -> None:
    async with front_rig() as rig:
        for path, fields, ignored in WISHES:
            if path == "/v1/embeddings":
                assert read(path, **fields)[1] == ignored, fields
            else:
                assert await send(rig, path, **fields) == (200, ignored), (path, fields)


def test_every_ignored_field_is_tried() -> None:
    tried = {(path, name) for path, _, ignored in WISHES for name in ignored}
    for path, body in BODIES.items():
        assert {(path, name) for name in body.ignored} <= tried


@pytest.mark.parametrize("nothing", [None, ""])
async def test_names_of_tools_are_those_of_the_calls(nothing: str | None) -> None:
    """The template is given the name of the function that was called, so nobody is told of it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        *HI,
        {"role": "assistant", "content": nothing, "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "c", "content": "1"},
    ]
    async with front_rig() as rig:
        assert await send(rig, "/v1/chat/completions", messages=turns) == (200, set())


async def test_the_log_names_what_had_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with front_rig() as rig:
        messages = [{"role": "user", "name": "secret", "content": "hi"}]
        await send(rig, "/v1/chat/completions", messages=messages, user="secret")
        await send(rig, "/v1/chat/completions")
    first, second = (line for line in caplog.records if line.name == "penstock.openai.access")
    assert OneLine().format(first).endswith(", without effect: messages[].name, user")
    assert json.loads(JsonLines().format(first))["ignored"] == "messages[].name, user"
    assert "secret" not in OneLine().format(first)
    assert "without effect" not in OneLine().format(second)
