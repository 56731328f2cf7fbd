"""What each process of a group loads: its rules fill its devices' entries of every leaf as all rules together
do.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.own_rules import own_rules, own_shapes
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.params import leaf_shapes, load_rules
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
