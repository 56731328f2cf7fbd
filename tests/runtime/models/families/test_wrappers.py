"""Checkpoints of models that read images, put together of the goldens' decoders: as text models they
compute what PyTorch computed of the decoder alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models.registry import parse_config
from tests.support.goldens import check_last_logits

Tensors = dict[str, NDArray[Any]]


def golden(root: Path, name: str) -> tuple[dict[str, Any], Tensors, list[dict[str, Any]]]:
    """config.json, tensors and cases of a golden."""
    cases = json.loads((root / name / "expected.json").read_text())["cases"]
    config: dict[str, Any] = json.loads((root / name / "config.json").read_text())
    return config, load_file(root / name / "model.safetensors"), cases


def wrapped(text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the config.json of a wrapper around a decoder's."""
    inner = {name: value for name, value in text.items() if name not in ("architectures", "dtype")}
    return {"dtype": text["dtype"], "text_config": inner, **fields}


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def assert_as_pytorch(make_sequence: Callable[..., Any], folder: Path, case: dict[str, Any]) -> None:
    config = load_config(folder)
    sequence = make_sequence(config, load_weights(folder, config, progress=False))
    logits = sequence.feed(case["prompt"])
    check_last_logits(logits, case)
    for token in case["tokens"][:4]:
        assert int(logits.argmax()) == token
        logits = sequence.feed([token])


@pytest.mark.parametrize(
    ("name", "images", "text", "head", "vision"),
    [
        ("ministral3", "mistral3_vl", "model.language_model.", "", "model."),
        ("mistral_swa", "mistral3_vl", "language_model.model.", "language_model.", ""),
        ("mistral_swa", "mistral3_vl", "language_model.model.", "language_model.", None),
        pytest.param(
            *("llama4", "llama4_vl", "language_model.model.", "language_model.", None),
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_decoders_beside_an_encoder(
    tmp_path: Path,
    golden_root: Path,
    make_sequence: Callable[..., Any],
    name: str,
    images: str,
    text: str,
    head: str,
    vision: str | None,
) -> None:
    """The decoder of one golden and the encoder of another, by the names of two versions of transformers;
    and a decoder saved without an encoder.
    """
    config, tensors, cases = golden(golden_root, name)
    of_images, others, _ = golden(golden_root, images)
    renamed = {
        text + key.removeprefix("model.") if key.startswith("model.") else head + key: values
        for key, values in tensors.items()
    }
    if vision is not None:
        renamed |= {vision + key: values for key, values in others.items() if not key.startswith("language_")}
    fields = {key: value for key, value in of_images.items() if key not in ("text_config", "dtype")}
    folder = write(tmp_path, wrapped(config, **fields), renamed)
    assert (load_config(folder).vision is None) is (vision is None)
    assert_as_pytorch(make_sequence, folder, cases[1])


QWEN3 = ("qwen3_moe", "qwen3_vl", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")
QWEN3_5 = ("qwen3_5_moe", "qwen3_5_vl", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")


@pytest.mark.parametrize(
    ("text", "images", "architecture", "model_type", "layout"),
    [
        (*QWEN3, "transposed"),
        pytest.param(*QWEN3, "each", marks=pytest.mark.sweep),
        pytest.param(*QWEN3_5, "stacked", marks=pytest.mark.sweep),
        pytest.param(*QWEN3_5, "each", marks=pytest.mark.sweep),
    ],
)
def test_decoders_with_experts(
    tmp_path: Path,
    golden_root: Path,
    make_sequence: Callable[..., Any],
    text: str,
    images: str,
    architecture: str,
    model_type: str,
    layout: str,
) -> None:
    """The decoder of one golden and the encoder of another. Published checkpoints stack the experts of a
    layer: Qwen3-VL's are transposed too, Qwen3.5's are not.
    """
    config, tensors, cases = golden(golden_root, text)
    outer, others, _ = golden(golden_root, images)
    made = {name: values for name, values in others.items() if ".visual." in name}
    count = config.get("num_local_experts") or config["num_experts"]
    for name, values in tensors.items():
        renamed = name.replace("model.", "model.language_model.", 1)
        above, is_expert, _ = renamed.partition(".experts.")
        if layout == "each" or not is_expert:
            made[renamed] = values
            continue

        def of(part: str, usual: str = name.partition(".experts.")[0]) -> NDArray[Any]:
            return np.stack([tensors[f"{usual}.experts.{e}.{part}.weight"] for e in range(count)])

        gate_up = np.concatenate([of("gate_proj"), of("up_proj")], axis=1)
        turn = (0, 2, 1) if layout == "transposed" else (0, 1, 2)
        made[f"{above}.experts.gate_up_proj"] = gate_up.transpose(turn)
        made[f"{above}.experts.down_proj"] = of("down_proj").transpose(turn)
    inner = {name: value for name, value in config.items() if "sliding_window" not in name}
    inner["rope_parameters"] = outer["text_config"]["rope_parameters"]
    inner["model_type"] = f"{model_type}_text"
    both = {"architectures": [architecture], "model_type": model_type, "image_token_id": 5}
    vision = {**outer["vision_config"], "model_type": f"{model_type}_vision"}
    folder = write(tmp_path, wrapped(inner, **both, vision_config=vision), made)
    assert_as_pytorch(make_sequence, folder, cases[1])


def test_another_text_model_is_refused_by_name() -> None:
    data = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    with pytest.raises(ConfigError, match=r"text_config\.model_type: 'qwen2' .* mistral, ministral3"):
        parse_config({**data, "text_config": {"model_type": "qwen2"}})
    with pytest.raises(ConfigError, match="model_type"):
        parse_config(data)
