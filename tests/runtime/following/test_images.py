"""Images that are too large for a call of a group are refused at the start."""

from __future__ import annotations

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.following.joining import check_images
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.configs.vision import QwenVisionConfig
from penstock.runtime.models.vision.encoders import vision_of
from tests.support.goldens import GOLDEN


def test_the_largest_image_fits_a_call_or_the_size_that_would_is_named() -> None:
    config = load_config(GOLDEN / "qwen3_vl").vision
    assert isinstance(config, QwenVisionConfig)
    vision = vision_of(config)
    per_token = vision.patches_per_token
    bytes_of_token = 4 * per_token * config.patch_features
    most = (1 << 29) // bytes_of_token
    too_many = 2 * most
    with pytest.raises(ConfigError, match=rf"max_image_tokens: an image of {too_many} tokens") as refused:
        check_images(vision, [4 * per_token, too_many * per_token])
    fit = int(str(refused.value).rpartition("at most ")[2].split()[0])
    assert 0.9 * most < fit <= most  # there are positions beside the patches
    check_images(vision, [fit * per_token])
    check_images(None, [])
