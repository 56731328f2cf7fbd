"""Golden checkpoints, as single files or in shards, and the parts of leaves that belong to their tensors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime.models import params

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def by_name():
    """Make a function (config, unpacked leaves in the state's order, dtype) -> the values of each tensor in
    the leaves, by its name.
    """

    def find(config, leaves, dtype=None):
        by_path = dict(zip(params.leaf_shapes(config, dtype), leaves, strict=True))
        found = {}
        for rule in params.load_rules(config, dtype).rules:
            (source,), (target,) = rule.sources, rule.targets
            found[source.name] = np.asarray(by_path[target.path])[target.part(0, rule.num_rows)]
        return found

    return find


@pytest.fixture(scope="session")
def golden_root() -> Path:
    """Return the folder of golden checkpoints."""
    return GOLDEN


@pytest.fixture
def copy(golden_root, tmp_path):
    """Make a function (golden name) -> a folder of the test with a copy of that checkpoint."""

    def make(name="qwen2"):
        shutil.copytree(golden_root / name, tmp_path / name)
        return tmp_path / name

    return make


def shard(directory, count=3):
    """Turn model.safetensors into `count` shards and an index, as transformers writes them."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({n: tensors[n] for n in names[i::count]}, directory / file)
        weight_map |= dict.fromkeys(names[i::count], file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    )
    return weight_map


@pytest.fixture(scope="session")
def into_shards():
    """Make a function (directory) -> weight_map, which replaces model.safetensors by three shards and an
    index.
    """
    return shard
