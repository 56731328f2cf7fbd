"""The image processors of Mistral's and InternVL's checkpoints: what they count is what they make, and their
limits. What they make of pixels, and which tokens, is compared with transformers in `test_pictures`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.decoding import BadImage
from penstock.runtime.images.reader import Patches, Processor
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.image_processors import find_processor
from tests.support.goldens import GOLDEN
from tests.support.models.pictures import LIMITS

SIDES = st.integers(1, 300)


def processor(folder: Path, max_tokens: int = LIMITS.max_tokens) -> Processor:
    vision = load_config(folder).vision
    assert vision is not None
    found = find_processor(folder, vision, max_tokens)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "max_tokens"), [("mistral3_vl", 72), ("mistral3_vl", 31), ("internvl", 26)])
def test_as_many_tokens_are_made_as_are_counted(name: str, max_tokens: int) -> None:
    """And not more than are allowed."""
    made = processor(GOLDEN / name, max_tokens)

    @given(width=SIDES, height=SIDES)
    @settings(deadline=None, max_examples=25)
    def check(width: int, height: int) -> None:
        try:
            counted = made.num_tokens(width, height)
        except BadImage:  # so narrow that no pixel is left on the shorter side
            assert max(width, height) > 8 * min(width, height)
            return
        assert counted <= max_tokens
        total = 0
        for part in made.process(Pil.new("RGB", (width, height), (9, 8, 7))):
            total += part.num_tokens + len(part.row_ends) if isinstance(part, Patches) else len(part)
        assert total == counted

    check()


@pytest.mark.parametrize(("name", "max_tokens"), [("mistral3_vl", 1), ("internvl", 5)])
def test_a_limit_below_the_least_picture_is_refused(name: str, max_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"max_image_tokens: {max_tokens} is less"):
        processor(GOLDEN / name, max_tokens)


@pytest.mark.parametrize(("name", "token"), [("mistral3_vl", "[IMG_BREAK]"), ("internvl", "<img>")])
def test_a_tokenizer_without_the_tokens_of_pictures_is_refused(tmp_path: Path, name: str, token: str) -> None:
    for file in ("config.json", "preprocessor_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name / file, tmp_path / file)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        processor(tmp_path)
    tokenizer = json.loads((GOLDEN / name / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [each for each in tokenizer["added_tokens"] if each["content"] != token]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError) as raised:
        processor(tmp_path)
    assert f"has no {token}, which prompts with pictures need" in str(raised.value)


def test_tiles_of_another_size_than_the_models_are_refused(tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(GOLDEN / "internvl" / file, tmp_path / file)
    data = json.loads((GOLDEN / "internvl" / "preprocessor_config.json").read_text())
    data["size"] = {"height": 64, "width": 32}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"size is .*64.*, and the model's 32"):
        processor(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"longest_edge": 0}}, "longest_edge is 0, not 1 pixel or more"),
        ({"do_center_crop": True, "crop_size": {"height": 32, "width": 32}}, "tokens of a picture that has"),
    ],
)
def test_a_processor_that_makes_something_else_than_it_counts_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """When the model is loaded, and not by what callers send."""
    shutil.copytree(GOLDEN / "mistral3_vl", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError) as raised:
        processor(tmp_path)
    assert message in str(raised.value)
