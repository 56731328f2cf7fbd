"""PyTorch's tokens after prompts with images, from the client to the model and back.

The engine's own tests take every schedule (tests/runtime/engine/images/test_golden_images.py). Here the
images come over the wire: beside texts and token ids, in conversations, in calls and in streams, of several
callers at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.client import AsyncClient, Generation, Image
from penstock.runtime.engine import Engine
from penstock.runtime.text.codec import TextCodec
from penstock.service.requests.generate import Features
from penstock.v1 import control_pb2
from tests.service.rig import Rig, serving
from tests.support.goldens import CONFIG, GOLDEN, IMAGE_TOKENS, MARKS, RUNS, WITH_IMAGES, WRITTEN_TOKENS
from tests.support.models.images import unexpanded
from tests.support.suite.drawing import few

Case = dict[str, Any]


def template(name: str) -> str:
    """Write a conversation as the golden's text. Content without an image is one text."""
    shown = f"'{MARKS[name]}' if c.type == 'image' else c.text"
    parts = "{% for c in messages[0].content %}{{ " + shown + " }}{% endfor %}"
    return "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}" + parts + "{% endif %}"


@asynccontextmanager
async def served(name: str) -> AsyncIterator[tuple[Rig, AsyncClient, list[Case]]]:
    folder = GOLDEN / name
    cases: list[Case] = json.loads((folder / "expected.json").read_text())["cases"]
    config = dataclasses.replace(CONFIG, max_image_tokens=72)
    engine = Engine.from_pretrained(str(folder), config)
    async with serving(engine, features=Features(request_templates=True)) as rig:
        async with AsyncClient(rig.server.address) as client:
            yield rig, client, cases
        assert engine.compiles_after_warmup == 0
        assert engine.load().pages_used == 0
        assert rig.serving.held_images.num_bytes == 0


def images(folder: Path, case: Case) -> list[Image]:
    return [Image(folder / file) for file in case["images"]]


def content(folder: Path, case: Case) -> list[str | Image]:
    """Return the text of the case with its images in their places."""
    texts = case["text"].split(MARKS[folder.name])
    parts: list[str | Image] = [texts[0]]
    for image, text in zip(images(folder, case), texts[1:], strict=True):
        parts += [image, text]
    return parts


def options(case: Case) -> Any:
    return {
        "temperature": 0,
        "max_tokens": len(case["tokens"]),
        "ignore_eos": True,
        "logprobs": 0,
        "echo_prompt_token_ids": True,
    }


def check(answer: Generation, case: Case, name: str) -> None:
    assert list(answer.prompt.token_ids) == case["prompt"]
    assert answer.usage.image_tokens == sum(token in IMAGE_TOKENS[name] for token in case["prompt"])
    for output in answer.outputs:
        assert list(output.token_ids) == case["tokens"]
        assert output.logprobs is not None
        np.testing.assert_allclose(output.logprobs.sampled, case["logprobs"], rtol=1e-4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", few(WITH_IMAGES, (), ci=("qwen3_vl",)))
async def test_images_over_the_wire_give_pytorchs_tokens(name: str) -> None:
    folder = GOLDEN / name
    async with served(name) as (rig, client, cases):
        info = await client.model_info()
        assert info.image_limits is not None
        assert info.image_limits.image_token_id == WRITTEN_TOKENS[name]
        for case in cases:
            answer = await client.generate(case["text"], media=images(folder, case), **options(case))
            check(answer, case, name)
            codec = TextCodec.from_pretrained(folder)
            tokens = unexpanded(case, codec.encode, RUNS.get(name))
            by_ids = await client.generate(token_ids=tokens, media=images(folder, case), n=2, **options(case))
            check(by_ids, case, name)
            chat: Any = {
                "messages": [{"role": "user", "content": content(folder, case)}],
                "chat_template": template(name),
            }
            async with client.stream(**chat, **options(case)) as stream:
                check(await stream.result(), case, name)
            assert list((await client.tokenize(**chat)).token_ids) == case["prompt"]
        await rig.control.FlushCache(control_pb2.FlushCacheRequest())
        together = [
            client.generate(case["text"], media=images(folder, case), **options(case)) for case in cases * 2
        ]
        for answer, case in zip(await asyncio.gather(*together), cases * 2, strict=True):
            check(answer, case, name)
