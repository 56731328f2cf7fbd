"""What each process of a group loads: its rules fill its devices' entries of every leaf, or the leaves of its
stage, as all rules together do.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.own_rules import own_rules, own_shapes, rules_of_leaves
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.params import leaf_shapes, load_rules
from penstock.runtime.models.stages import stages_of
from tests.support.goldens import GOLDEN


def filled(rules, shapes, tensors):
    leaves = {path: np.zeros(shape.shape, shape.dtype) for path, shape in shapes.items()}
    for rule in rules.rules:
        rule.fill(leaves, tensors, 0, rule.num_rows)
    return leaves


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("own", [range(1), range(1, 2), range(2)])
def test_a_process_fills_the_entries_of_its_devices(name, own):
    devices = 2
    config, tensors = cut(load_config(GOLDEN / name), devices), find_tensors(GOLDEN / name)
    rules, shapes = load_rules(config), leaf_shapes(config)
    whole = filled(rules, shapes, tensors)
    ours = filled(own_rules(rules, own, devices), own_shapes(shapes, own, devices), tensors)
    assert ours.keys() == whole.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, whole[path][own.start : own.stop], err_msg=str(path))


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma4", "qwen3_5"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_fills_the_leaves_of_its_stage_and_no_others(name, number):
    """What both stages have is whole in each: small parameters, and embeddings that are the head, too."""
    devices = 1 if name == "gemma4" else 2
    config, tensors = cut(load_config(GOLDEN / name), devices), find_tensors(GOLDEN / name)
    stage, rules, shapes = stages_of(config, 2)[number], load_rules(config), leaf_shapes(config)
    whole = filled(rules, shapes, tensors)
    own = {path: shape for path, shape in shapes.items() if stage.has(path)}
    ours = filled(rules_of_leaves(rules, stage.has), own, tensors)
    assert 0 < len(own) < len(whole)
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, whole[path], err_msg=str(path))
