"""Images in the arguments of an embedded engine: what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime import ContextParams, Engine, Image, Truncation
from penstock.runtime.errors import InvalidRequest, UnsupportedFeature
from penstock.runtime.inprocess.options import jobs_of, prompt_of
from penstock.runtime.prompting.prompts import TextPrompt, TokenPrompt, encode
from tests.support.models.toy import toy_engine

IMAGE = Image(b"image")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield a model that reads no images; nothing is compiled."""
    engine = toy_engine(start=False)
    yield engine
    engine.shutdown()


def test_a_model_that_reads_no_images_says_so(engine: Engine) -> None:
    assert engine.info.images is None
    with pytest.raises(UnsupportedFeature, match="reads no images") as raised:
        engine.generate([1, 2], media=[IMAGE, IMAGE])
    assert "media[1]" in str(raised.value)


def test_a_prompt_with_images_is_not_cut(engine: Engine) -> None:
    reader: Any = object()  # it is not asked
    with pytest.raises(InvalidRequest) as raised:
        encode(None, TokenPrompt((1,), (IMAGE,)), room=10, cuts=True, reader=reader)
    assert [bad.field for bad in raised.value.violations] == ["context.truncation"]
    with pytest.raises(UnsupportedFeature):
        engine.generate([1], media=[IMAGE], context=ContextParams(Truncation.LEFT))


def test_prompts_hold_their_images(engine: Engine) -> None:
    assert prompt_of("a", [IMAGE]) == TextPrompt("a", (IMAGE,))
    jobs = jobs_of(engine, [[1], [2]], {"media": [[IMAGE], []]})
    assert [job.prompt for job in jobs] == [TokenPrompt((1,), (IMAGE,)), TokenPrompt((2,))]


@pytest.mark.parametrize("media", ["cat.png", [b"bytes"], [[IMAGE]]])
def test_what_is_no_image_is_a_type_error(engine: Engine, media: Any) -> None:
    with pytest.raises(TypeError, match="media: give a sequence of Image"):
        engine.generate([1], media=media)


@pytest.mark.parametrize("media", [[IMAGE, IMAGE], [[IMAGE]], [[], [], []]])
def test_a_list_of_prompts_takes_a_list_of_images_for_each(engine: Engine, media: Any) -> None:
    with pytest.raises(TypeError, match="media: give 2 sequences of images"):
        engine.generate([[1], [2]], media=media)
