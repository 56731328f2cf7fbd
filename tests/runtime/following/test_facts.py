"""What processes of a group compare before they serve together."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.following.facts import model_digest, process_facts
from tests.support.goldens import GOLDEN

_GGUF = GOLDEN / "gguf" / "llama_gqa4_q5_0" / "model.gguf"


def test_a_gguf_file_has_a_digest_of_what_it_holds(tmp_path):
    copy = tmp_path / "copy.gguf"
    shutil.copy(_GGUF, copy)
    assert model_digest(copy) == model_digest(_GGUF)
    data = bytearray(copy.read_bytes())
    at = data.index(b"general.architecture")
    data[at : at + 7] = b"GENERAL"
    copy.write_bytes(data)
    assert model_digest(copy) != model_digest(_GGUF)


def test_another_tensor_is_another_digest(tmp_path):
    copy = tmp_path / "copy.gguf"
    data = bytearray(_GGUF.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert model_digest(copy) != model_digest(_GGUF)


def test_what_says_how_tensors_are_read_counts(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwen3" / name, tmp_path / name)
    before = model_digest(tmp_path)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "sym": false}')
    assert model_digest(tmp_path) != before


def test_layers_behind_the_pooling_count(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwen3" / name, tmp_path / name)
    without = model_digest(tmp_path)
    folder, weight = tmp_path / "2_Dense", np.zeros((8, 4), np.float32)
    folder.mkdir()
    (tmp_path / "modules.json").write_text('[{"type": "models.Dense", "path": "2_Dense"}]')
    (folder / "config.json").write_text('{"out_features": 8}')
    save_file({"linear.weight": weight}, folder / "model.safetensors")
    found = [without, model_digest(tmp_path)]
    save_file({"linear.weight": weight + 1}, folder / "model.safetensors")
    found.append(model_digest(tmp_path))
    (folder / "config.json").write_text('{"out_features": 8, "bias": false}')
    found.append(model_digest(tmp_path))
    assert len(set(found)) == 4


def test_a_draft_counts_by_its_files_and_not_by_their_place(tmp_path):
    shutil.copytree(GOLDEN / "arcee", tmp_path / "copy")
    drafts = (GOLDEN / "arcee", tmp_path / "copy", GOLDEN / "llama")
    options = [EngineConfig(speculation="draft", draft_model=str(draft)) for draft in drafts]
    same, copied, other = (process_facts(str(GOLDEN / "qwen3"), each, 2) for each in options)
    assert same == copied
    assert [name for name in same if same[name] != other[name]] == ["the digest of the draft's files"]
    with pytest.raises(ConfigError, match=r"draft_model: \./none: "):
        process_facts(str(GOLDEN / "qwen3"), EngineConfig(speculation="draft", draft_model="./none"), 2)
