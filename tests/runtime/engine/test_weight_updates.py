"""Weight updates of a real decoder: updates of parts of fused leaves, and the memory that updates take."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench.checkpoint import SHAPES, Shape, write_checkpoint
from penstock.runtime import EngineConfig
from penstock.runtime.loading import leaves
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.load_rules import LoadRules
from penstock.runtime.models.params import load_rules
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.linear import unpack
from tests.runtime.engine.update_memory import UPDATES
from tests.support.collector import at_gate
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.toy import toy_backend
from tests.support.updating import small_engine

LAYER = "model.layers.1.self_attn."
Q, K, V = (f"{LAYER}{part}.weight" for part in ("q_proj", "k_proj", "v_proj"))
NORM, Q_NORM = "model.norm.weight", f"{LAYER}q_norm.weight"
WIDE = Shape(1024, 4096, 4, 16, 4, 64, 4096, 300, 4096)  # 130 MB
REPOSITORY = Path(__file__).parents[3]
CLEAR_REFS = Path("/proc/self/clear_refs")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint(directory, SHAPES["tiny"])
    return directory


def rows_of(rules: LoadRules, leaves: Any, name: str) -> Any:
    """Return what leaves hold of a tensor, as the checkpoint has it."""
    rule = next(rule for rule in rules.rules if rule.sources[0].name == name)
    (target,) = rule.targets
    held = np.asarray(leaves[target.path])[target.part(0, rule.num_rows)]
    return unpack(held) if target.rows_per_entry > 1 else held


@pytest.mark.ci
@pytest.mark.parametrize("native", ["auto", pytest.param("off", marks=pytest.mark.sweep)])
def test_updates_of_parts_that_were_staged_together_all_stay(tiny: Path, native: Any) -> None:
    """Each is staged beside weights that the others have not changed yet; q, k and v are one leaf."""
    engine = small_engine(tiny, native=native)
    try:
        device = engine.updater._device
        linear = toy_backend(EngineConfig(native=native)).linear_format(np.dtype(jnp.bfloat16), "none")
        assert linear.packed == (native == "auto" and library.available())
        rules = load_rules(load_config(tiny), jnp.bfloat16, linear)
        old = {name: np.array(entry.map()) for name, entry in find_tensors(tiny).items()}
        new = {name: (2 * old[name].astype(np.float32)).astype(jnp.bfloat16) for name in (Q, K, NORM, Q_NORM)}
        before = device.leaves_by_path
        gate = at_gate(engine, tokens=8)
        updates = [engine.update_weights({name: new[name]}, label=name, partial=True) for name in new]
        assert all(device.leaves_by_path[path] is leaf for path, leaf in before.items())
        gate.open()
        assert [update.result(60).current.label for update in updates] == list(new)
        after = device.leaves_by_path
        for name, tensor in (old | new).items():
            np.testing.assert_array_equal(rows_of(rules, after, name), tensor, err_msg=name)
        np.testing.assert_array_equal(rows_of(rules, before, Q), old[Q])  # nothing changed in place
        assert sum(before[path] is not after[path] for path in before) == 2  # qkv, vectors
        engine.update_weights(old, label="whole").result(60)
        for name, tensor in old.items():
            np.testing.assert_array_equal(rows_of(rules, device.leaves_by_path, name), tensor, err_msg=name)
    finally:
        engine.shutdown()


@pytest.mark.ci
@pytest.mark.parametrize(("threads", "expected"), [(1, [1, 1]), (6, [6, 3])])
def test_loading_takes_the_threads_it_is_given_and_an_update_half(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, threads: int, expected: list[int]
) -> None:
    """The rest is left to those that compute steps."""
    taken: list[int] = []

    def pool(max_workers: int, name: str, initializer: Any) -> ThreadPoolExecutor:
        taken.append(max_workers)
        return ThreadPoolExecutor(max_workers, name, initializer=initializer)

    monkeypatch.setattr(leaves, "ThreadPoolExecutor", pool)
    engine = small_engine(tiny, threads=threads)
    try:
        engine.update_weights({NORM: find_tensors(tiny)[NORM].map()}, label="x", partial=True).result(60)
        assert taken == expected
    finally:
        engine.shutdown()


@pytest.mark.ci
@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="needs Linux's /proc")
def test_an_update_takes_one_checkpoint_of_memory_and_gives_it_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, WIDE)
    checkpoint = (tmp_path / "model.safetensors").stat().st_size
    command = [sys.executable, "-m", "tests.runtime.engine.update_memory", str(tmp_path), str(TEST_CACHE)]
    found = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY).stdout
    )
    serving = found["serving"]["bytes"]
    for name in UPDATES:
        share = 0.5 if name == "in place" else 1.15  # in place: a few leaves
        assert found[name]["peak"] < serving + share * checkpoint, (name, found)
        assert found[name]["idle"] < serving + 0.15 * checkpoint, found
        assert found[name]["bytes"] < serving + 0.15 * checkpoint, found
        assert found[name]["tokens"] == found["serving"]["tokens"]
    lives = [name for name in UPDATES if name not in ("refused", "abandoned", "discarded")]
    assert [found[name]["generation"] for name in lives] == list(range(2, len(lives) + 2))
    assert found["abandoned"]["generation"] == found["discarded"]["generation"] == 4
