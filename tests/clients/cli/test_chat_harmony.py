"""`penstock chat` with a model that writes Harmony, as gpt-oss does, on a server with the fake engine."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.__main__ import main
from tests.service.codecs import HARMONY_ENDS, harmony_codec
from tests.service.rig import WAIT_S, fake, serving

CODEC = harmony_codec()
PROMPT = "get|<|start|>user<|message|>hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
SCRIPTS = {
    PROMPT: f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>',
    f"{PROMPT}<|message|>Hm.\n\nI look."
    'get{"a": 1}<|end|><|start|>tool<|message|>28<|end|><|start|>assistant': (
        f"{THOUGHT}<|channel|>final<|message|>Warm."
    ),
}


async def test_a_call_is_shown_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reasoning is not shown in a pipe; it goes back to the model with the call."""
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "get", "parameters": {"type": "object"}}]))
    scripts: dict[str, Any] = {
        prompt: CODEC.encode(text, add_special_tokens=False) for prompt, text in SCRIPTS.items()
    }
    engine = fake(
        codec=CODEC, vocab_size=264, max_model_len=2000, eos_token_ids=HARMONY_ENDS, scripts=scripts
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/result 28\n"))
    async with serving(engine) as rig, asyncio.timeout(3 * WAIT_S):
        argv = ["chat", "--addr", rig.server.address, "--tools", str(tools)]
        assert await asyncio.to_thread(main, argv) == 0
    assert capsys.readouterr().out == 'I look.\ntool call: get {"a": 1}\nWarm.\n'
