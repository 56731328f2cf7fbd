"""Checkpoint files that are absent, cut short or damaged are refused. The error names the file and what to do
next.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.safetensors_files import find_tensors

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def test_no_weights_at_all(tmp_path):
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor .*download"):
        find_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"found pytorch_model\.bin.*convert"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 8, 1000, -1, -5000])
def test_truncated_file(copy, keep):
    file = copy() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a complete safetensors file.*again"):
        find_tensors(file.parent)


def header(**tensors):
    data = json.dumps(
        {n: dict(zip(("dtype", "shape", "data_offsets"), t, strict=True)) for n, t in tensors.items()}
    )
    return len(data).to_bytes(8, "little") + data.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{nop",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        header(a=("F32", [2], [0, 4])) + bytes(4),  # size and shape disagree
        header(a=("F32", [2], [0, 8])) + bytes(9),  # trailing bytes
        header(a=("F32", [1], [4, 8])) + bytes(8),  # a hole
        header(a=("F32", [1], [0, 4]), b=("F32", [1], [0, 4])) + bytes(4),  # overlap
        header(a=("F32", [-1], [0, 4])) + bytes(4),
        header(a=("F4", [1], [0, 4])) + bytes(4),
        header(a=("F32", [1], [0])) + bytes(4),
        header(a=("F32", "x", [0, 4])) + bytes(4),
        header(**{"\ud800": ("F32", [1], [0, 4])}) + bytes(4),  # a name that is no Unicode
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_damaged_header(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        find_tensors(tmp_path)


def test_scalars_and_empty_tensors_are_mapped(tmp_path):
    save_file({"scalar": np.array(3, np.float32), "empty": np.zeros((0, 4))}, tmp_path / "model.safetensors")
    found = find_tensors(tmp_path)
    assert found["scalar"].map() == 3
    assert found["empty"].map().shape == (0, 4)


def test_absent_shards_are_named(copy, into_shards):
    directory = copy()
    into_shards(directory)
    for number in (1, 3):
        (directory / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"2 of 3 shards.*model-00001-of-00003.*model-00003-of-00003.*again"
    ):
        find_tensors(directory)


def test_truncated_shard_is_named(copy, into_shards):
    directory = copy()
    into_shards(directory)
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors is not a complete"):
        find_tensors(directory)


def test_index_and_shards_of_different_downloads(copy, into_shards):
    directory = copy()
    weight_map = into_shards(directory)
    moved = {
        **weight_map,
        UP: next(s for s in weight_map.values() if s != weight_map[UP]),
        "ghost": weight_map[UP],
    }
    (directory / INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ConfigError, match=rf"not where it says: ghost, {UP}"):
        find_tensors(directory)


def test_a_tensor_in_two_shards(copy, into_shards):
    directory = copy()
    into_shards(directory)
    first = directory / "model-00001-of-00003.safetensors"
    second = directory / "model-00002-of-00003.safetensors"
    tensors = load_file(second)
    save_file({**tensors, next(iter(load_file(first))): np.zeros(1, np.float32)}, second)
    with pytest.raises(ConfigError, match=r"is in both model-00001-of-00003\.safetensors and model-00002"):
        find_tensors(directory)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_bad_index(copy, text):
    directory = copy()
    (directory / "model.safetensors").unlink()
    (directory / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=INDEX):
        find_tensors(directory)


def test_an_index_cannot_point_outside_its_directory(copy):
    directory = copy()
    (directory / "model.safetensors").rename(directory.parent / "x.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": {UP: "../x.safetensors"}}))
    with pytest.raises(ConfigError, match=r"outside its own directory: \.\./x\.safetensors"):
        find_tensors(directory)
