"""Finds the image processor of a checkpoint: transformers' own where it works without torch, else ours, which
makes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as PilImage

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.gemma4_processor import Gemma4Processor
from penstock.runtime.images.intern_processor import InternProcessor
from penstock.runtime.images.llama4_processor import Llama4Processor, Llama4Settings, Llama4Tokens
from penstock.runtime.images.pixtral_processor import PixtralProcessor
from penstock.runtime.images.qwen_processor import QwenProcessor
from penstock.runtime.images.reader import Patches, Processor
from penstock.runtime.images.square_processor import SquareProcessor
from penstock.runtime.model_files import read_json_object
from penstock.runtime.models.configs.vision import (
    Gemma4VisionConfig,
    InternConfig,
    Llama4VisionConfig,
    PixtralConfig,
    QwenVisionConfig,
    SiglipVisionConfig,
    VisionConfig,
)
from penstock.runtime.models.hf_fields import Fields

log = logging.getLogger(__name__)

FILES = ("preprocessor_config.json", "processor_config.json")
_TRIED_SIDE = 509
"""Pixels on a side of the image that a processor is tried with: a prime, which no size of patches divides.
"""


def find_processor(folder: Path, vision: VisionConfig, max_tokens: int) -> Processor | None:
    """Find what makes a checkpoint's images ready; None, with a line in the log, if the folder has no image
    processor. ConfigError if it cannot be read, or does not make what the encoder takes. This takes seconds,
    because transformers takes long to import. `max_tokens` are the most that an image may have.
    """
    files = [file for name in FILES if (file := folder / name).is_file()]
    if not files:
        log.warning("%s has none of %s: prompts can have no images", folder, " and ".join(FILES))
        return None
    listed = {file.name: read_json_object(file) for file in files}  # which says more than transformers does
    if isinstance(vision, Llama4VisionConfig):
        try:
            ours = _llama4_processor(_settings_of(listed), folder, vision, max_tokens)
            _try(ours)
        except ConfigError as error:
            raise ConfigError(f"{files[0]}: {error}") from error
        return ours
    import transformers  # noqa: PLC0415  # a second, which only models that read images need

    auto: Any = transformers.AutoImageProcessor
    try:
        processor = auto.from_pretrained(
            str(folder), backend="pil", local_files_only=True, trust_remote_code=False
        )
        adapted = _adapted(processor, folder, vision, max_tokens)
        _try(adapted)
    except ConfigError as error:
        raise ConfigError(f"{files[0]}: {error}") from error
    except Exception as error:  # transformers may raise anything for a value that it does not expect
        raise ConfigError(f"{files[0]}: the image processor cannot be loaded: {error!r}") from error
    return adapted


def find_written_token(folder: Path, vision: VisionConfig) -> int | None:
    """Find the token that a prompt has for each image, where config.json does not name it. ConfigError if
    the tokenizer has no such token.
    """
    return _tokens(folder, ("<|image|>",))[0] if isinstance(vision, Llama4VisionConfig) else None


def _try(processor: Processor) -> None:
    """Raise an error if no image can be processed, so that callers are not told that theirs are wrong."""
    image = PilImage.new("RGB", (_TRIED_SIDE, _TRIED_SIDE))
    with np.errstate(divide="ignore", invalid="ignore"):  # told below
        counted, parts = processor.num_tokens(*image.size), processor.process(image)
    of_patches = [part for part in parts if isinstance(part, Patches)]
    made = sum(part.num_tokens + len(part.row_ends) for part in of_patches)
    made += sum(len(part) for part in parts if not isinstance(part, Patches))
    if made != counted:
        raise ConfigError(f"the image processor makes {made} tokens of an image that has {counted}")
    if not all(np.isfinite(part.values).all() for part in of_patches):
        raise ConfigError("the image processor makes pixels that are no finite numbers")


def _adapted(processor: Any, folder: Path, vision: VisionConfig, max_tokens: int) -> Processor:
    """Wrap transformers' processor as the reader of prompts calls it."""
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
        case Gemma4VisionConfig():
            return Gemma4Processor(
                processor,
                patch_size=vision.patch_size,
                merge_size=vision.merge_size,
                most_tokens=vision.most_tokens,
                max_tokens=max_tokens,
                around=(vision.begin_token_id, vision.end_token_id),
            )
        case PixtralConfig():
            names = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
            return PixtralProcessor(
                processor,
                patch_size=vision.patch_size,
                merge_size=vision.merge_size,
                max_tokens=max_tokens,
                ends=_two_tokens(folder, "processor_config.json", names),
            )
        case InternConfig():
            names = {"start_image_token": "<img>", "end_image_token": "</img>"}
            return InternProcessor(
                processor,
                image_size=vision.image_size,
                patch_size=vision.patch_size,
                merge_size=vision.merge_size,
                max_tokens=max_tokens,
                around=_two_tokens(folder, "tokenizer_config.json", names),
            )
        case _:
            raise TypeError(f"no image processor has a {type(vision).__name__}")


def _settings_of(listed: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Find what the files say of images: where transformers writes it for the whole processor, if it is
    there.
    """
    inner = listed.get("processor_config.json", {}).get("image_processor")
    return inner if isinstance(inner, dict) else listed.get("preprocessor_config.json", {})


def _llama4_processor(
    settings: Mapping[str, Any], folder: Path, vision: Llama4VisionConfig, max_tokens: int
) -> Llama4Processor:
    """Read the settings, whose defaults are those of transformers' image processor."""
    fields = Fields(settings)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        fields.only(name, True)
    fields.only("do_center_crop", False)
    fields.only("do_pad", False)
    fields.only("resample", int(PilImage.Resampling.BILINEAR))
    size = Fields(fields.mapping("size"), "size.", fields.problems)
    for name in ("height", "width"):
        if size.integer(name, 336) != vision.image_size:
            size.problem(name, f"must be {vision.image_size}, the model's image_size")
    made = Llama4Settings(
        max_tiles=fields.integer("max_patches", 16, most=1 << 12),
        fills_canvas=fields.boolean("resize_to_max_canvas", False),
        rescale=fields.number("rescale_factor", 1 / 255),
        mean=_of_channels(fields, "image_mean", vision.in_channels),
        std=_of_channels(fields, "image_std", vision.in_channels),
    )
    if fields.problems:
        raise ConfigError("; ".join(fields.problems))
    begin, end, behind_tile, behind_row, whole = _tokens(
        folder,
        (
            "<|image_start|>",
            "<|image_end|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
            "<|image|>",
        ),
    )
    return Llama4Processor(
        made,
        Llama4Tokens(begin=begin, end=end, behind_tile=behind_tile, behind_row=behind_row, whole=whole),
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        max_tokens=max_tokens,
    )


def _of_channels(fields: Fields, name: str, channels: int) -> tuple[float, ...]:
    """Read a number above 0 for each channel, or one for all."""
    value = fields.raw(name)
    values = value if isinstance(value, list) else [0.5 if value is None else value] * channels
    each = Fields({str(i): number for i, number in enumerate(values)}, f"{name}.", fields.problems)
    if len(values) != channels:
        fields.problem(name, f"must have {channels} numbers, not {len(values)}")
    return tuple(each.number(str(i)) for i in range(len(values)))


def _two_tokens(folder: Path, file_name: str, names: Mapping[str, str]) -> tuple[int, int]:
    """Find the ids of two special tokens, which fields of a file may name; otherwise they have the names that
    are given for these fields. ConfigError if the tokenizer has no such tokens.
    """
    listed = read_json_object(file) if (file := folder / file_name).is_file() else {}
    wanted = [str(listed.get(field) or usual) for field, usual in names.items()]
    first, second = _tokens(folder, wanted)
    return first, second


def _tokens(folder: Path, wanted: Sequence[str]) -> tuple[int, ...]:
    """Find the ids of special tokens. ConfigError if the tokenizer has no such tokens."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError(f"{tokenizer} is missing, which has the tokens {' and '.join(wanted)} of images")
    added = read_json_object(tokenizer).get("added_tokens") or ()
    known = {str(token["content"]): int(token["id"]) for token in added}
    missing = [token for token in wanted if token not in known]
    if missing:
        raise ConfigError(f"{tokenizer} has no {' and '.join(missing)}, which prompts with images need")
    return tuple(known[token] for token in wanted)
