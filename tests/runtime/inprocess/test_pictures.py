"""Pictures in the arguments of an embedded engine: what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime import ContextParams, Engine, Image, Truncation
from penstock.runtime.errors import InvalidRequest, UnsupportedFeature
from penstock.runtime.inprocess.options import jobs_of, prompt_of
from penstock.runtime.prompting.prompts import TextPrompt, TokenPrompt, encode
from tests.support.models.toy import toy_engine

PICTURE = Image(b"picture")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield a model that reads no pictures; nothing is compiled."""
    engine = toy_engine(start=False)
    yield engine
    engine.shutdown()


def test_a_model_that_reads_no_pictures_says_so(engine: Engine) -> None:
    assert engine.info.images is None
    with pytest.raises(UnsupportedFeature, match="reads no images") as raised:
        engine.generate([1, 2], media=[PICTURE, PICTURE])
    assert "media[1]" in str(raised.value)


def test_a_prompt_with_pictures_is_not_cut(engine: Engine) -> None:
    reader: Any = object()  # it is not asked
    with pytest.raises(InvalidRequest) as raised:
        encode(None, TokenPrompt((1,), (PICTURE,)), room=10, cuts=True, reader=reader)
    assert [bad.field for bad in raised.value.violations] == ["context.truncation"]
    with pytest.raises(UnsupportedFeature):
        engine.generate([1], media=[PICTURE], context=ContextParams(Truncation.LEFT))


def test_prompts_hold_their_pictures(engine: Engine) -> None:
    assert prompt_of("a", [PICTURE]) == TextPrompt("a", (PICTURE,))
    jobs = jobs_of(engine, [[1], [2]], {"media": [[PICTURE], []]})
    assert [job.prompt for job in jobs] == [TokenPrompt((1,), (PICTURE,)), TokenPrompt((2,))]


@pytest.mark.parametrize("media", ["cat.png", [b"bytes"], [[PICTURE]]])
def test_what_is_no_picture_is_a_type_error(engine: Engine, media: Any) -> None:
    with pytest.raises(TypeError, match="media: give a sequence of Image"):
        engine.generate([1], media=media)


@pytest.mark.parametrize("media", [[PICTURE, PICTURE], [[PICTURE]], [[], [], []]])
def test_a_list_of_prompts_takes_a_list_of_pictures_for_each(engine: Engine, media: Any) -> None:
    with pytest.raises(TypeError, match="media: give 2 sequences of images"):
        engine.generate([[1], [2]], media=media)
