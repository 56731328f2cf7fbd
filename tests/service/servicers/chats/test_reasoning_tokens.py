"""Usage.reasoning_tokens: what both RPCs tell, and what the ledger keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.service.usage.ledger import Counts, read_usage
from penstock.v1 import inference_pb2
from tests.service.codecs import END_THINK, QWEN_VOCAB, THINK, qwen_codec
from tests.service.rig import collect, fake, generate, ids, serving, stream
from tests.support.models.byte_text import EOS

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = "u:hi|a:"
WRITTEN = {
    "thinks": ([THINK, *ids("\nHm.\n"), END_THINK, *ids("\n\nHi"), EOS], 7),
    "answers": ([*ids("Hi"), EOS], 0),
}
"""What the model writes, and how many of its tokens belong to the reasoning."""


def engine(written: list[int], **options: Any) -> Any:
    scripts = {PROMPT: written, (PROMPT, 1): [*ids("No"), EOS]}
    return fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB, scripts=scripts, **options)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("name", WRITTEN)
async def test_both_rpcs_tell_them_and_the_ledger_keeps_them(
    tmp_path: Path, name: str, tokens_per_step: int
) -> None:
    """The request has a second output, which does not think."""
    written, expected = WRITTEN[name]
    usage = tmp_path / "usage.db"
    fields: dict[str, Any] = {"chat": ASKED, "sampling": {"n": 2}}
    async with serving(engine(written, tokens_per_step=tokens_per_step), usage_file=usage) as rig:
        reply: inference_pb2.GenerateResponse = await rig.inference.Generate(generate(**fields))
        *_, last = await collect(rig.inference.Stream(stream(**fields)))
    assert reply.usage.reasoning_tokens == expected
    assert last.summary.usage.reasoning_tokens == expected
    assert reply.usage.completion_tokens == len(written) + 3
    assert [output.text for output in reply.outputs] == ["Hi", "No"]
    assert sum(read_usage(usage).values(), Counts()).reasoning_tokens == 2 * expected


async def test_without_text_there_is_no_reasoning() -> None:
    written, _ = WRITTEN["thinks"]
    async with serving(engine(written)) as rig:
        reply = await rig.inference.Generate(generate(chat=ASKED, output={"text": False}))
    assert (reply.usage.completion_tokens, reply.usage.reasoning_tokens) == (len(written), 0)
