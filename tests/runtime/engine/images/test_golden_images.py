"""PyTorch's tokens after prompts with images, through the whole engine: decoding, processing, encoding,
paged cache, scheduler.

For each family: prompts alone and packed, in chunks that cut images; preempted and resumed; with the prefix
cache and without it; as several outputs that fork; with one image encoded in a step, and a pool that has
room for one, so that images are encoded again. Tokens equal PyTorch's, and log-probabilities agree to 1e-4
relative.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image as Pil
from safetensors.numpy import load_file, save_file

from penstock.runtime import Engine, Image, StoppingParams, building
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.loop.interface import InFlightPolicy, StepRecord
from penstock.runtime.ops.native import library
from penstock.runtime.prompting.results import Generation
from penstock.runtime.requests.request import CacheParams
from penstock.runtime.scheduling.plan import drafted_tokens
from penstock.runtime.scheduling.sequence import Sequence
from tests.support.chunks import set_chunk
from tests.support.collector import GREEDY_PARAMS
from tests.support.goldens import GOLDEN, IMAGE_TOKENS, MARKS, RUNS, WITH_IMAGES, small_config
from tests.support.models.images import unexpanded
from tests.support.scheduler.proposing import Guesses, lies

Case = dict[str, Any]
MAX_IMAGE_TOKENS = {"gemma4_vl": 72, "mistral3_vl": 72, "pixtral": 72}
"""Where 64 would make an image smaller: 72 are eight rows of eight and a break, or 70 between two others."""
POOL_TOKENS = {"gemma4_vl": 320, "internvl": 1024, "llama4_vl": 1024}
"""Where 256 have no room for all images: a tile of 4 tokens takes a block of 32, and 65 take three."""
CACHED_TOKENS = 264
"""What the KV cache holds: about three of the longest requests."""


def num_encoded(name: str, case: Case) -> int:
    """How often the encoder is called for the images of a case: once for each, or for each tile, which has
    four tokens.
    """
    in_tiles = name in ("internvl", "llama4_vl")
    return case["prompt"].count(3) // 4 if in_tiles else len(case["images"])


class Encodes:
    """An observer that counts the images that are encoded."""

    def __init__(self) -> None:
        self.count = 0
        self.most = 0

    def on_step(self, record: StepRecord) -> None:
        self.count += len(record.plan.encodes)
        self.most = max(self.most, len(record.plan.encodes))


class Served:
    """An engine of a golden in float32, and its cases."""

    def __init__(self, name: str, page_size: int, folder: Path | None = None, **options: Any) -> None:
        """`folder`: where the model is; None: it is the golden."""
        self.name, self.folder = name, folder or GOLDEN / name
        self.cases: list[Case] = json.loads((self.folder / "expected.json").read_text())["cases"]
        self.encodes = Encodes()
        config = dataclasses.replace(
            small_config(name, page_size=page_size, cached_tokens=CACHED_TOKENS),
            max_image_tokens=MAX_IMAGE_TOKENS.get(name, 64),
            media_pool_tokens=POOL_TOKENS.get(name, 256),
        )
        self.engine = Engine.from_pretrained(
            str(self.folder), dataclasses.replace(config, **options), observer=self.encodes
        )
        self.engine.start()

    def images(self, case: Case) -> list[Image]:
        return [Image(self.folder / file) for file in case["images"]]

    def ask(self, case: Case, n: int = 1, *, bypass: bool = False) -> Generation:
        made = self.engine.generate(
            case["text"],
            media=self.images(case),
            sampling=GREEDY_PARAMS,
            stopping=StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True),
            logprobs=0,
            n=n,
            cache=CacheParams(bypass=bypass),
        )
        check(made, case, self.name, n)
        return made

    def ask_together(self, cases: Items[Case], *, bypass: bool = False) -> None:
        made = self.engine.generate(
            [case["text"] for case in cases],
            media=[self.images(case) for case in cases],
            sampling=GREEDY_PARAMS,
            stopping=StoppingParams(max_tokens=max(len(case["tokens"]) for case in cases), ignore_eos=True),
            logprobs=0,
            cache=CacheParams(bypass=bypass),
        )
        for generation, case in zip(made, cases, strict=True):
            check(generation, case, self.name)

    def ask_preempted(self, case: Case) -> None:
        """Have the request lose its pages after its first token, and compute its prompt again."""
        with self.engine.stream(
            case["text"],
            media=self.images(case),
            sampling=GREEDY_PARAMS,
            stopping=StoppingParams(max_tokens=150, ignore_eos=True),
            logprobs=0,
            cache=CacheParams(bypass=True),
        ) as stream:
            next(iter(stream))
            self.engine.pause(InFlightPolicy.RECOMPUTE).result(60)
            self.engine.resume().result(60)
            made = stream.result()
        assert made.timing.preemptions > 0
        check(made, case, self.name)

    def finish(self) -> None:
        assert self.engine.compiles_after_warmup == 0
        assert self.engine.load().pages_used == 0
        self.engine.shutdown()


def check(made: Generation, case: Case, name: str, n: int = 1) -> None:
    assert made.prompt.token_ids == tuple(case["prompt"])
    assert made.usage.image_tokens == sum(case["prompt"].count(token) for token in IMAGE_TOKENS[name])
    assert len(made.outputs) == n
    for output in made.outputs:
        count = len(case["tokens"])
        assert list(output.token_ids[:count]) == case["tokens"]
        values = [logprobs.sampled for logprobs in (output.logprobs or ())[:count]]
        np.testing.assert_allclose(values, case["logprobs"], rtol=1e-4)


@pytest.mark.timeout(900)
@pytest.mark.sweep
@pytest.mark.parametrize("name", WITH_IMAGES)
@pytest.mark.parametrize("page_size", [pytest.param(8, id="xla"), pytest.param(16, id="native")])
def test_every_schedule_gives_pytorchs_tokens(name: str, page_size: int) -> None:
    if page_size == 16 and not library.available():
        pytest.skip("no native library on this machine")
    served = Served(name, page_size)
    engine, cases = served.engine, served.cases
    for size in (None, 1, 7, page_size):
        set_chunk(engine, size)
        for case in cases:
            engine.flush_prefix_cache()
            served.ask(case)
        engine.flush_prefix_cache()
        served.ask_together([*cases, *reversed(cases)])
    set_chunk(engine, None)
    num_images = sum(num_encoded(name, case) for case in cases)
    assert served.encodes.count == num_images  # each only once, however often it was asked for
    engine.flush_prefix_cache()
    longest = max(cases, key=lambda case: len(case["prompt"]))
    assert served.ask(longest).usage.cached_prompt_tokens == 0
    is_cached = served.ask(longest).usage.cached_prompt_tokens > 0
    assert is_cached is (engine.config.prefix_cache_pages != 0)
    assert served.ask(longest, bypass=True).usage.cached_prompt_tokens == 0
    for case in cases:
        served.ask(case, n=2)
    served.ask_preempted(longest)
    served.finish()


@pytest.mark.timeout(900)
@pytest.mark.sweep
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_tokens_are_proposed_behind_images(name: str) -> None:
    """The rows of proposed tokens have the rotary positions that follow those of the images, also where
    they are joined for a recurrent state.
    """
    rng = random.Random(8)
    proposer = Guesses(lambda seq, most: (), rng)
    with mock.patch.object(building, "Lookup", return_value=proposer):
        served = Served(name, 8, speculation="lookup")

    def right(seq: Sequence, most: int) -> list[int]:
        made, prompt = seq.token_ids[seq.num_prompt :], list(seq.request.prompt_token_ids)
        known = [case["tokens"] for case in served.cases if case["prompt"] == prompt]
        return next((t[len(made) :][:most] for t in known if t[: len(made)] == made), [])

    proposer.guess = lies(rng, served.engine.info.vocab_size, right)
    for _ in range(2):
        for case in served.cases:
            served.ask(case, n=2)
        served.ask_together(served.cases)
    totals = served.engine.metrics().totals
    assert 0 < totals.accepted_tokens < totals.proposed_tokens
    served.finish()


@pytest.mark.sweep
def test_heads_guess_behind_images(tmp_path: Path) -> None:
    """The layer was made for the golden without images, which has a text model of the same sizes."""
    shutil.copytree(GOLDEN / "qwen3_5_vl", tmp_path, dirs_exist_ok=True)
    layer = load_file(GOLDEN / "heads" / "qwen3_5" / "layer.safetensors")
    save_file({**load_file(tmp_path / "model.safetensors"), **layer}, tmp_path / "model.safetensors")
    proposer = Guesses(lambda seq, most: drafted_tokens(most), random.Random(1))
    with mock.patch.object(building, "Drafting", return_value=proposer):
        options: dict[str, Any] = {"speculation": "heads", "tensor_parallel_size": 1}
        served = Served("qwen3_5_vl", 8, tmp_path, kv_cache_bytes=2**20, **options)
    for case in served.cases:
        served.ask(case, n=2)
    served.ask_together(served.cases)
    assert served.engine.metrics().totals.proposed_tokens > 50
    served.finish()


@pytest.mark.timeout(900)
@pytest.mark.sweep
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images_are_encoded_again_where_the_pool_is_small(name: str) -> None:
    """It has room for the largest image, and a step encodes one."""
    served = Served(name, 8, media_pool_tokens=MAX_IMAGE_TOKENS.get(name, 64), max_encode_patches=1)
    num_images = sum(num_encoded(name, case) for case in served.cases)
    for size in (None, 7):
        set_chunk(served.engine, size)
        served.ask_together([*served.cases, *reversed(served.cases)], bypass=True)
    assert served.encodes.most == 1
    assert served.encodes.count > num_images
    served.finish()


@pytest.mark.timeout(900)
@pytest.mark.sweep
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_equal_texts_with_other_images_share_nothing(name: str, tmp_path: Path) -> None:
    """The image of the first case is answered with its own tokens also after its mirror image, whose prompt
    has the same token ids. Chats and prompts of token ids mean the same as the text.
    """
    served = Served(name, 8)
    case = served.cases[0]
    engine, stopping = served.engine, StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True)
    mirrored = tmp_path / "mirrored.png"
    Pil.open(served.folder / case["images"][0]).transpose(Pil.Transpose.FLIP_LEFT_RIGHT).save(mirrored)
    asked: dict[str, Any] = {"sampling": GREEDY_PARAMS, "stopping": stopping, "logprobs": 0}
    other = engine.generate(case["text"], media=[Image(mirrored)], **asked)
    assert other.prompt.token_ids == tuple(case["prompt"])
    values = [logprobs.sampled for logprobs in other.outputs[0].logprobs or ()]
    assert not np.allclose(values, case["logprobs"], rtol=1e-4)
    assert served.ask(case).usage.cached_prompt_tokens <= 8  # before the image
    assert engine.text is not None
    tokens = unexpanded(case, engine.text.encode, RUNS.get(name))
    by_ids = engine.generate(tokens, media=served.images(case), **asked)
    check(by_ids, case, name)
    mark = MARKS[name]
    shown = f"'{mark}' if c.type == 'image' else c.text"
    template = "{% for c in messages[0].content %}{{ " + shown + " }}{% endfor %}"
    before, _, after = case["text"].partition(mark)
    content = [before, served.images(case)[0], after]
    by_chat = engine.chat([{"role": "user", "content": content}], chat_template=template, **asked)
    check(by_chat, case, name)
    with pytest.raises(InvalidRequest, match="1 images, and the prompt has 2 places"):
        engine.chat([{"role": "user", "content": [*content, mark]}], chat_template=template)
    served.finish()


@pytest.mark.timeout(900)
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "ending"), [("gemma4_vl", ".input_max"), ("llama4_vl", ".positional_embedding_vlm")]
)
def test_tensors_of_encoders_are_updated(name: str, ending: str) -> None:
    """Those of Gemma 4 are bounds of products and have no axes; narrow ones change the answer. All tensors of
    the checkpoint bring it back.
    """
    served = Served(name, 8)
    tensors = load_file(served.folder / "model.safetensors")
    changed = {key: np.full_like(value, 0.01) for key, value in tensors.items() if key.endswith(ending)}
    assert changed
    served.engine.update_weights(changed, label="changed", partial=True).result(60)
    with pytest.raises(AssertionError):
        served.ask(served.cases[0])
    served.engine.update_weights(tensors, label="whole").result(60)
    served.ask(served.cases[0])
    served.finish()
