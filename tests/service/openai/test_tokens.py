"""/tokenize, /detokenize and /tokenizer_info as vLLM's clients use them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.codecs import THINK, qwen_codec
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import fake, ids
from tests.support.models.byte_text import CHAT_TEMPLATE, EOS


async def post(rig: FrontRig, path: str, **body: Any) -> tuple[int, Any]:
    reply = await rig.http.post(path, json=body)
    return reply.status_code, reply.json()


async def test_a_text() -> None:
    async with front_rig(fake(max_model_len=77)) as rig:
        assert await post(rig, "/tokenize", prompt="h€", model="fake") == (
            200,
            {"count": 4, "max_model_len": 77, "tokens": ids("h€"), "token_strs": None},
        )
        _, shown = await post(rig, "/tokenize", prompt="h€", return_token_strs=True)
        assert shown["token_strs"] == ["h", "\ufffd", "\ufffd", "\ufffd"]


async def test_a_conversation() -> None:
    """The codec's template writes the tools, the turns and, where it is asked to, the opening tag."""
    async with front_rig(fake(codec=qwen_codec(), vocab_size=264)) as rig:
        _, told = await post(
            rig,
            "/tokenize",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
            chat_template_kwargs={"thinking": True},
        )
    assert told["tokens"] == [*ids("T:f|u:x|a:"), THINK]


async def test_what_a_remote_tokenizer_reads() -> None:
    """lm-evaluation-harness reads the names at the top, and tokenizes parts of texts, which may be empty."""
    async with front_rig() as rig:
        reply = await rig.http.get("/tokenizer_info")
        assert reply.json() == {
            "eos_token": "<|end|>",
            "tokenizer_class": "TokenizersBackend",
            "chat_template": CHAT_TEMPLATE,
        }
        _, empty = await post(rig, "/tokenize", prompt="", add_special_tokens=False)
        assert empty["tokens"] == []
    async with front_rig(fake(codec=None)) as rig:
        reply = await rig.http.get("/tokenizer_info")
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "unsupported_endpoint")


async def test_tokens_become_text_again() -> None:
    async with front_rig() as rig:
        assert await post(rig, "/detokenize", tokens=[*ids("h€"), EOS]) == (200, {"prompt": "h€<|end|>"})


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 1000}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "top_p": 1}, 400, "top_p"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 9999]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], status: int, param: str) -> None:
    async with front_rig() as rig:
        found, told = await post(rig, path, **body)
    assert (found, told["error"]["param"]) == (status, param), told
