"""Checkpoints of one family whose tensors' names begin differently, as they are published and as versions of
transformers write them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from penstock.runtime.errors import CheckpointError
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.params import load_rules, state_to_leaves


def rename(directory: Path, beginnings: Mapping[str, str]) -> None:
    """Give the tensors of a checkpoint other names: of the beginnings, the first one that a name has
    counts.
    """
    file = directory / "model.safetensors"
    renamed = {}
    for name, values in load_file(file).items():
        usual = next((usual for usual in beginnings if name.startswith(usual)), "")
        renamed[beginnings.get(usual, "") + name.removeprefix(usual)] = values
    save_file(renamed, file)


@pytest.mark.parametrize(
    ("golden", "beginnings"),
    [
        ("qwen2", {"model.": ""}),
        ("qwen2", {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}),
        ("qwen2_5_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
        ("qwen3_vl", {"model.visual.": "visual.", "model.language_model.": "model."}),
        (
            "gemma3_vl",
            {
                "vision_tower.": "model.vision_tower.vision_model.",
                "multi_modal_projector.": "model.multi_modal_projector.",
                "language_model.model.": "model.language_model.",
            },
        ),
    ],
)
def test_names_may_begin_differently(
    copy: Callable[[str], Path], golden: str, beginnings: dict[str, str]
) -> None:
    directory = copy(golden)
    expected = state_to_leaves(load_weights(directory, load_config(directory), progress=False))
    rename(directory, beginnings)
    config = load_config(directory)
    found = state_to_leaves(load_weights(directory, config, progress=False))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    # What updates must be called is what the checkpoint's tensors are called.
    names = set(load_file(directory / "model.safetensors"))
    assert {tensor.name for tensor in load_rules(config).tensors} == names


def test_a_decoder_that_was_saved_without_its_head_makes_embeddings(
    copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy("qwen2")
    whole = load_weights(directory, load_config(directory), progress=False)
    rename(directory, {"model.": ""})
    file = directory / "model.safetensors"
    save_file({name: values for name, values in load_file(file).items() if name != "lm_head.weight"}, file)
    config = load_config(directory)
    assert config.tie_word_embeddings
    assert "without a head" in caplog.text
    found = load_weights(directory, config, progress=False)
    expected = [leaf for path, leaf in nnx.to_flat_state(whole) if path[0] != "lm_head"]
    for one, other in zip(state_to_leaves(found), expected, strict=True):
        np.testing.assert_array_equal(one, other[...])


def test_a_tensor_that_is_missing_is_named_as_the_checkpoint_would_name_it(
    copy: Callable[[str], Path],
) -> None:
    directory = copy("qwen2")
    rename(directory, {"model.": ""})
    file = directory / "model.safetensors"
    save_file({name: values for name, values in load_file(file).items() if name != "norm.weight"}, file)
    with pytest.raises(CheckpointError) as caught:
        load_weights(directory, load_config(directory), progress=False)
    assert caught.value.missing == ("norm.weight",)
    assert caught.value.extra == ()


def test_a_beginning_that_no_name_or_several_have_stays_the_usual_one() -> None:
    usual = TensorNames()
    assert usual.found_in(()) == usual
    assert usual.found_in(("a.embed_tokens.weight", "b.embed_tokens.weight")) == usual
    assert usual.found_in(("a.not_embed_tokens.weight",)) == usual
    assert usual.found_in(("embed_tokens.weight", "x.lm_head.weight")) == TensorNames("", "x.lm_head.")
    assert TensorNames("x.").spelled("model.layers.0.weight") == "x.layers.0.weight"
    assert TensorNames("x.").spelled("mtp.model.weight") == "mtp.model.weight"


def stack_experts(directory: Path) -> None:
    """Put the weights of a layer's experts into two tensors, gate and up side by side."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        parts = {
            part: [
                tensors.pop(f"{layer}.experts.{expert}.{part}.weight")
                for expert in range(sum(f"{layer}.experts." in name and part in name for name in tensors))
            ]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = np.concatenate([np.stack(parts["gate_proj"]), np.stack(parts["up_proj"])], axis=1)
        tensors[f"{layer}.experts.gate_up_proj"] = gate_up
        tensors[f"{layer}.experts.down_proj"] = np.stack(parts["down_proj"])
    save_file(tensors, file)


@pytest.mark.parametrize("golden", ["qwen2_moe", "qwen3_moe", "qwen3_5_moe", "qwen3_next"])
def test_experts_may_be_stacked(copy: Callable[[str], Path], golden: str) -> None:
    directory = copy(golden)
    expected = state_to_leaves(load_weights(directory, load_config(directory), progress=False))
    stack_experts(directory)
    config = load_config(directory)
    found = state_to_leaves(load_weights(directory, config, progress=False))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    names = {tensor.name for tensor in load_rules(config).tensors}
    assert names == set(load_file(directory / "model.safetensors"))
    assert sum(name.endswith(".experts.gate_up_proj") for name in names) == len(config.layers)


def test_a_checkpoint_without_its_encoder_has_a_text_model(
    copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy("gemma3_vl")
    whole = nnx.to_flat_state(load_weights(directory, load_config(directory), progress=False))
    file = directory / "model.safetensors"
    of_text = {name: values for name, values in load_file(file).items() if name.startswith("language_model.")}
    save_file(of_text, file)
    config = load_config(directory)
    assert config.vision is None
    assert "its text model alone is served" in caplog.text
    found = dict(nnx.to_flat_state(load_weights(directory, config, progress=False)))
    layers = {path: leaf for path, leaf in whole if path[0] == "layers"}
    assert layers
    for path, leaf in layers.items():
        np.testing.assert_array_equal(found[path][...], leaf[...])
