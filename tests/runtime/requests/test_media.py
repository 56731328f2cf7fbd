"""Images of a request: their digests, and what a request refuses."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.images import DIGEST_BYTES, MediaItem, RotaryPositions, digest_of
from penstock.runtime.requests.request import Request


def item(start: int, num_tokens: int) -> MediaItem:
    patches = np.zeros((4 * num_tokens, 3), np.float32)
    grid = (1, 2, 2 * num_tokens)
    return MediaItem(patches, grid, digest_of(patches, grid), start, num_tokens)


def test_the_digest_depends_on_grid_and_patches_alone() -> None:
    patches = np.arange(24, dtype=np.float32).reshape(8, 3)
    digest = digest_of(patches, (1, 2, 4))
    assert len(digest) == DIGEST_BYTES
    assert digest == digest_of(np.asfortranarray(patches), (1, 2, 4))
    assert digest != digest_of(patches, (1, 4, 2))
    other = patches.copy()
    other[7, 2] += 1
    assert digest != digest_of(other, (1, 2, 4))


def test_images_lie_in_order_within_the_prompt() -> None:
    prompt = tuple(range(10))
    media = (item(1, 3), item(4, 2), item(9, 1))
    request = Request("r", prompt, media=media, rotary=RotaryPositions(np.zeros((3, 10), np.int32), 0))
    assert [each.end for each in request.media] == [4, 6, 10]
    assert request.media[0].num_patches == 12


@pytest.mark.parametrize(
    "media",
    [
        pytest.param((item(2, 3), item(4, 2)), id="overlap"),
        pytest.param((item(4, 2), item(1, 2)), id="order"),
        pytest.param((item(8, 3),), id="beyond"),
        pytest.param((item(-1, 3),), id="before"),
    ],
)
def test_misplaced_images_are_refused(media: tuple[MediaItem, ...]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Request("r", tuple(range(10)), media=media)
    assert [bad.field for bad in raised.value.violations] == ["media"]


def test_a_grid_counts_the_patches() -> None:
    whole = item(1, 3)
    cut = MediaItem(whole.patches[1:], whole.grid, whole.digest, 1, 3)
    with pytest.raises(InvalidRequest, match="patches"):
        Request("r", tuple(range(10)), media=(cut,))


def test_rotary_positions_are_those_of_the_prompt() -> None:
    with pytest.raises(InvalidRequest, match=r"\(3, 10\)"):
        Request("r", tuple(range(10)), rotary=RotaryPositions(np.zeros((3, 9), np.int32), 0))
