"""Finds the image processor of a checkpoint, which is transformers' own and works without torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.qwen_processor import QwenProcessor
from penstock.runtime.images.reader import Processor
from penstock.runtime.images.square_processor import SquareProcessor
from penstock.runtime.model_files import read_json_object
from penstock.runtime.models.configs.vision import QwenVisionConfig, SiglipVisionConfig, VisionConfig

log = logging.getLogger(__name__)

FILES = ("preprocessor_config.json", "processor_config.json")


def find_processor(folder: Path, vision: VisionConfig, max_tokens: int) -> Processor | None:
    """What makes a checkpoint's pictures ready; None, with a line in the log, if the folder has no image
    processor. ConfigError if it cannot be read, or does not make what the encoder takes. It takes seconds,
    because transformers takes long to import. `max_tokens` are the most that a picture may have.
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
        return _adapted(processor, vision, max_tokens)
    except ConfigError as error:
        raise ConfigError(f"{files[0]}: {error}") from error
    except Exception as error:  # transformers may raise anything for a value that it does not expect
        raise ConfigError(f"{files[0]}: the image processor cannot be loaded: {error!r}") from error


def _adapted(processor: Any, vision: VisionConfig, max_tokens: int) -> Processor:
    """transformers' processor as the reader of prompts calls it."""
    match vision:
        case QwenVisionConfig():
            return QwenProcessor(
                processor,
                patch_size=vision.patch_size,
                merge_size=vision.merge_size,
                temporal_patch_size=vision.temporal_patch_size,
                max_tokens=max_tokens,
            )
        case SiglipVisionConfig():
            return SquareProcessor(
                processor,
                image_size=vision.image_size,
                patch_size=vision.patch_size,
                tokens_per_side=vision.tokens_per_side,
                max_tokens=max_tokens,
            )
        case _:
            raise TypeError(f"no image processor has a {type(vision).__name__}")
