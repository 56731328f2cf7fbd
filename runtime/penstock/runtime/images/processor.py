"""Makes patches of pictures by the image processor of the checkpoint, as transformers does without torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.decoding import BadImage
from penstock.runtime.images.vision import Grid, Vision
from penstock.runtime.model_files import read_json_object

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

log = logging.getLogger(__name__)

FILES = ("preprocessor_config.json", "processor_config.json")


class ImageProcessor:
    """Resizes, normalises and cuts pictures. Any thread may use it."""

    def __init__(self, processor: Any, vision: Vision, max_tokens: int) -> None:
        """`processor` is one of transformers'. It makes larger pictures smaller than its own bound where that
        allows more than `max_tokens` tokens. ConfigError if it does not make what the model takes.
        """
        self._processor = processor
        self._per_token = vision.patches_per_token
        self._max_tokens = max_tokens
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            theirs, ours = getattr(processor, name, None), getattr(vision, name)
            if theirs != ours:
                raise ConfigError(f"the image processor's {name} is {theirs}, and the model's {ours}")
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        largest = max_tokens * vision.token_pixels
        if largest < most:
            log.info(
                "pictures are made smaller than %d pixels, so that they have at most %d tokens; the model's "
                "own bound is %d pixels",
                largest,
                max_tokens,
                most,
            )
        self._size = {"shortest_edge": min(least, largest), "longest_edge": min(most, largest)}

    @classmethod
    def find(cls, folder: Path, vision: Vision, max_tokens: int) -> ImageProcessor | None:
        """The processor of a checkpoint folder; None, with a line in the log, if the folder has none.
        ConfigError if it cannot be read. It takes seconds, because transformers takes long to import.
        """
        files = [file for name in FILES if (file := folder / name).is_file()]
        if not files:
            log.warning("%s has none of %s: prompts can have no pictures", folder, " and ".join(FILES))
            return None
        for file in files:
            read_json_object(file)  # which says more of a damaged file than transformers does
        import transformers  # noqa: PLC0415  # a second, which only models that read pictures need

        auto: Any = transformers.AutoImageProcessor
        try:
            processor = auto.from_pretrained(
                str(folder), backend="pil", local_files_only=True, trust_remote_code=False
            )
            return cls(processor, vision, max_tokens)
        except ConfigError as error:
            raise ConfigError(f"{files[0]}: {error}") from error
        except Exception as error:  # transformers may raise anything for a value that it does not expect
            raise ConfigError(f"{files[0]}: the image processor cannot be loaded: {error!r}") from error

    def num_tokens(self, width: int, height: int) -> int:
        """How many tokens a picture of so many pixels has. Raises BadImage for one that is too narrow."""
        least, most = self._size["shortest_edge"], self._size["longest_edge"]
        try:
            patches = self._processor.get_number_of_image_patches(
                height, width, {"min_pixels": least, "max_pixels": most}
            )
        except ValueError as error:
            raise BadImage(f"has {width} x {height} pixels: {error}") from error
        tokens = int(patches) // self._per_token
        if tokens > self._max_tokens:
            raise BadImage(
                f"has {width} x {height} pixels, which makes {tokens} tokens; at most {self._max_tokens} are "
                "taken"
            )
        return tokens

    def process(self, image: PilImage) -> tuple[NDArray[np.float32], Grid]:
        """Patches float32[N, P] and how many there are in time, height and width. What is transparent becomes
        white. Raises BadImage for colours that cannot be converted.
        """
        try:
            made = self._processor(images=[image], size=self._size, do_convert_rgb=True, return_tensors="np")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadImage(f"of mode {image.mode} cannot be processed: {error}") from error
        time, height, width = made["image_grid_thw"][0].tolist()
        return np.ascontiguousarray(made["pixel_values"], np.float32), (time, height, width)
