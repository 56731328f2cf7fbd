"""Makes golden checkpoints of models that read images, with what PyTorch computes from them.

    python -m tools.golden_images --out tests/golden NAME ...

It needs torch, torchvision and transformers. Texts become token ids by transformers' own processor of the
model, which puts the images' tokens into them; images are processed by its processor on Pillow, which is
the one that servers use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tools.golden import COMMON, GENERATED, LLAMA4, TOP, save_tokenizer

PROMPTS: Sequence[tuple[str, Sequence[tuple[int, int]]]] = (
    ("def main(self, <I> value", [(40, 56)]),
    ("<I>import the<I> compare the two of them", [(64, 33), (90, 120)]),
    ("return the path of no picture", []),
    ("<I>", [(17, 230)]),
)
"""Texts, in which <I> stands for an image, and the height and width of each image."""
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 64,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a golden is made.

    marks: the special tokens for images, by what the tokenizer's attribute is called. mark: the one that
    stands for an image in a text. ids: the config's fields with the ids of some of them. processor: the
    processor of texts and images, made of a tokenizer.
    """

    config_class: str
    model_class: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    other: Mapping[str, Any]
    marks: Mapping[str, str]
    mark: str
    ids: Mapping[str, str]
    processor: Callable[[Any], Any]


def _gemma3_processor(tokenizer: Any) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil  # noqa: PLC0415

    images = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=16)


def _pixtral_processor(tokenizer: Any, longest_edge: int, merge_size: int) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import (  # noqa: PLC0415
        PixtralImageProcessorPil,
    )

    patch = {"height": 8, "width": 8}
    images = PixtralImageProcessorPil(patch_size=patch, size={"longest_edge": longest_edge})
    return transformers.PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=merge_size)


def _internvl_processor(tokenizer: Any) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (  # noqa: PLC0415
        GotOcr2ImageProcessorPil,
    )

    images = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=6)
    videos = transformers.InternVLVideoProcessor()
    return transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=4)


def _llama4_processor(tokenizer: Any) -> Any:
    from transformers.models.llama4 import image_processing_llama4 as llama4  # noqa: PLC0415

    class Llama4ImageProcessor(llama4.Llama4ImageProcessor):
        """The one of transformers, which has none for Pillow, with Pillow's resizing."""

        def resize(
            self, image: torch.Tensor, size: Any, resample: Any = None, antialias: bool = True, **kwargs: Any
        ) -> torch.Tensor:
            """Resize images [N, 3, height, width]."""
            images = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in image]
            resized = [np.array(one.resize((size.width, size.height), resample)) for one in images]
            return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)

    images = Llama4ImageProcessor(size={"height": 32, "width": 32}, max_patches=6)
    return transformers.Llama4Processor(images, tokenizer, patch_size=8)


def _gemma4_processor(tokenizer: Any) -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil  # noqa: PLC0415

    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    sounds = transformers.Gemma4AudioFeatureExtractor()
    return transformers.Gemma4Processor(sounds, images, tokenizer, transformers.Gemma4VideoProcessor())


CASES: Mapping[str, Kind] = {
    "gemma4_vl": Kind(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        text={
            "model_type": "gemma4_text",
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 10,  # fewer than the tokens of an image
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": COMMON["vocab_size"],
            "use_bidirectional_attention": "vision",
        },
        vision={
            **{name: value for name, value in VISION.items() if name != "image_size"},
            "model_type": "gemma4_vision",
            "patch_size": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 256,
            "use_clipped_linears": True,
            "standardize": True,
        },
        other={"audio_config": None},
        marks={
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        mark="<|image|>",
        ids={
            "boi_token_id": "boi_token",
            "eoi_token_id": "eoi_token",
            "image_token_id": "image_token",
            "video_token_id": "video_token",
            "audio_token_id": "audio_token",
        },
        processor=_gemma4_processor,
    ),
    "mistral3_vl": Kind(
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        text={"model_type": "mistral", "head_dim": 16, "sliding_window": None, "rms_norm_eps": 1e-5},
        vision={**VISION, "model_type": "pixtral", "image_size": 128, "hidden_act": "silu"},
        other={"spatial_merge_size": 2, "tie_word_embeddings": False},
        marks={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        mark="[IMG]",
        ids={"image_token_index": "image_token"},
        processor=lambda tokenizer: _pixtral_processor(tokenizer, longest_edge=128, merge_size=2),
    ),
    "pixtral": Kind(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        text={"model_type": "mistral", "head_dim": 16, "sliding_window": None, "rms_norm_eps": 1e-5},
        vision={**VISION, "model_type": "pixtral", "hidden_act": "gelu"},
        other={
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "image_seq_length": 1,
            "tie_word_embeddings": False,
        },
        marks={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        mark="[IMG]",
        ids={"image_token_index": "image_token"},
        processor=lambda tokenizer: _pixtral_processor(tokenizer, longest_edge=48, merge_size=1),
    ),
    "internvl": Kind(
        "InternVLConfig",
        "InternVLForConditionalGeneration",
        text={"model_type": "qwen2"},
        vision={**VISION, "patch_size": [8, 8], "image_size": [32, 32], "attention_bias": True},
        other={"image_seq_length": 4, "tie_word_embeddings": False},
        marks={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        mark="<IMG_CONTEXT>",
        ids={"image_token_id": "context_image_token"},
        processor=_internvl_processor,
    ),
    "llama4_vl": Kind(
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        text=dict(LLAMA4),
        vision={
            **VISION,
            "image_size": 32,
            "intermediate_size": 128,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "vision_output_dim": 40,
        },
        other={},
        marks={
            "patch_token": "<|patch|>",
            "image_token": "<|image|>",
            "start_of_image_token": "<|image_start|>",
            "end_of_image_token": "<|image_end|>",
            "tile_x_separator_token": "<|tile_x_separator|>",
            "tile_y_separator_token": "<|tile_y_separator|>",
        },
        mark="<|image|>",
        ids={
            "image_token_index": "patch_token",
            "boi_token_index": "start_of_image_token",
            "eoi_token_index": "end_of_image_token",
        },
        processor=_llama4_processor,
    ),
    "gemma3_vl": Kind(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        text={
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,  # fewer than the tokens of an image
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        vision={"model_type": "siglip_vision_model", "vision_use_head": False, **VISION},
        other={"mm_tokens_per_image": 16},
        marks={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        mark="<start_of_image>",
        ids={
            "boi_token_index": "boi_token",
            "eoi_token_index": "eoi_token",
            "image_token_index": "image_token",
        },
        processor=_gemma3_processor,
    ),
}


def make_model(name: str, attempt: int, tokenizer: Any) -> Any:
    """Make a random model in float32, whose norms and biases are random, too."""
    case = CASES[name]
    torch.manual_seed(1000 + sum(map(ord, name)) + 7919 * attempt)
    ids = {field: tokenizer.convert_tokens_to_ids(case.marks[mark]) for field, mark in case.ids.items()}
    config = getattr(transformers, case.config_class)(
        text_config={**COMMON, **case.text}, vision_config=dict(case.vision), **case.other, **ids
    )
    config.dtype = "float32"
    model_class = getattr(transformers, case.model_class)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name
            if parameter.ndim == 1:
                noise = torch.randn_like(parameter) * 0.1
                is_scale = is_norm or "lambda" in parameter_name  # of the outputs of a block
                parameter.copy_(parameter + noise if is_scale else noise)
            elif "vision" in parameter_name or "projector" in parameter_name:
                parameter.copy_(torch.randn_like(parameter) * 0.12)
        for buffer_name, buffer in model.model.vision_tower.named_buffers() if name == "gemma4_vl" else ():
            if buffer_name.endswith(("_min", "_max")):  # bounds that cut some of the values
                buffer.fill_((0.5 + torch.rand(()).item()) * (1 if buffer_name.endswith("_max") else -1))
            elif buffer_name.startswith("std_"):
                buffer.copy_(torch.randn_like(buffer) * 0.1 + (buffer_name == "std_scale"))
        if config.get_text_config().tie_word_embeddings:  # otherwise the logits would only echo the input
            model.get_input_embeddings().weight.mul_(0.35)
    return model


def draw_image(height: int, width: int, random: np.random.Generator) -> Image.Image:
    """Draw an image with gradients and noise."""
    y, x = np.mgrid[0:height, 0:width]
    bands = np.stack([x * 255 // width, y * 255 // height, (x + y) * 7 % 256], -1).astype(np.uint8)
    return Image.fromarray(bands ^ random.integers(0, 32, (height, width, 3), dtype=np.uint8))


def case_of(model: Any, processor: Any, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """Return greedy tokens after a prompt, their log-probabilities, and the largest logits after the prompt.
    Every token is computed from the whole text, without a cache.
    """
    given = {"images": [list(images)]} if images else {}
    made = processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
    prompt = made.pop("input_ids")
    if images:  # Llama 4's are bfloat16
        made["pixel_values"] = made["pixel_values"].float()
    made.pop("attention_mask", None)
    types = {name: made.pop(name) for name in ("token_type_ids", "mm_token_type_ids") if name in made}
    tokens, logprobs = prompt, []

    def logits() -> torch.Tensor:
        padding = torch.zeros((1, tokens.shape[1] - prompt.shape[1]), dtype=torch.long)
        of_types = {name: torch.cat([type_ids, padding], 1) for name, type_ids in types.items()}
        found: torch.Tensor = model(tokens, use_cache=False, **of_types, **made).logits[0, -1]
        return found

    first = logits()
    for _ in range(GENERATED):
        last = torch.log_softmax(logits(), -1)
        best = int(last.argmax())
        logprobs.append(float(last[best]))
        tokens = torch.cat([tokens, torch.tensor([[best]])], 1)
    top = torch.topk(first, TOP)
    pixels = made["pixel_values"].flatten()[:8].tolist() if images else []
    return {
        "prompt": prompt[0].tolist(),
        "tokens": tokens[0, prompt.shape[1] :].tolist(),
        "logprobs": logprobs,
        "last_logits_top": [[int(i), float(v)] for v, i in zip(top.values, top.indices, strict=True)],
        "pixel_values_head": [round(value, 6) for value in pixels],
    }


def cases_of(folder: Path, name: str, attempt: int) -> list[dict[str, Any]] | None:
    """Make the cases of a model that is written to the folder; None if it writes marks of images itself."""
    kind = CASES[name]
    save_tokenizer(folder, kind.marks)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model, processor = make_model(name, attempt, tokenizer), kind.processor(tokenizer)
    model.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    random, cases = np.random.default_rng(11), []
    marks = set(tokenizer.convert_tokens_to_ids(list(kind.marks.values())))
    for number, (text, sizes) in enumerate(PROMPTS):
        images = [draw_image(height, width, random) for height, width in sizes]
        files = [f"image-{number}-{i}.png" for i in range(len(images))]
        for file, image in zip(files, images, strict=True):
            image.save(folder / file)
        shown = text.replace("<I>", kind.mark)
        try:
            with torch.no_grad():
                case = case_of(model, processor, shown, images)
        except ValueError as error:
            if "image tokens do not match" not in str(error):
                raise
            return None
        if marks & set(case["tokens"]):
            return None
        cases.append({"text": shown, "images": files, **case})
    return cases


def make(name: str, out: Path) -> None:
    """Write out/NAME."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    cases = next(made for attempt in range(20) if (made := cases_of(folder, name, attempt)) is not None)
    expected = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": cases}
    (folder / "expected.json").write_text(json.dumps(expected))
    print(f"{folder}: {[len(set(case['tokens'])) for case in cases]} different tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden checkpoints that read images, with PyTorch.")
    parser.add_argument("names", nargs="+", choices=CASES, metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets a folder of each name")
    arguments = parser.parse_args()
    for name in arguments.names:
        make(name, arguments.out)


if __name__ == "__main__":
    main()
