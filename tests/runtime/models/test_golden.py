"""Logits, greedy tokens and log-probabilities, compared with PyTorch's in float32 and eager mode, without the
engine.

tests/golden holds tiny random checkpoints, and what transformers 5.23 computed from them without a cache.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models import params
from penstock.runtime.models.linear import LinearFormat
from tests.support.goldens import GOLDEN, KINDS, NAMES, WITH_IMAGES, check_greedy, check_last_logits
from tests.support.suite.drawing import few

ALWAYS = ("qwen3", "gpt_oss", "deepseek_v3", "lfm2")
"""What `make test` compares: a dense model, windows and experts, latent attention, and a recurrent state."""


def test_every_golden_is_compared():
    assert sorted((*NAMES, *WITH_IMAGES)) == sorted(
        folder.parent.name for folder in GOLDEN.glob("*/config.json")
    )


@pytest.fixture(scope="module", params=few(NAMES, ALWAYS, ci=KINDS))
def golden(request, golden_root, make_sequence):
    directory = golden_root / request.param
    config = load_config(directory)
    sequence = make_sequence(config, load_weights(directory, config, progress=False))
    return sequence, json.loads((directory / "expected.json").read_text())["cases"]


@pytest.mark.parametrize("case", range(3))
def test_matches_pytorch(golden, case):
    sequence, cases = golden
    expected = cases[case]
    sequence.reset()
    logits = sequence.feed(expected["prompt"])
    check_last_logits(logits, expected)
    ids = [token for token, _ in expected["last_logits_top"]]
    assert list(np.argsort(-logits)[: len(ids)]) == ids
    check_greedy(logits, sequence.feed, expected)


IN_INT8 = (
    "qwen3",
    "gpt2",
    "falcon",
    "mpt",
    "phimoe",
    "granite_moe",
    "gpt_oss",
    "deepseek_v2",
    "lfm2",
    "qwen3_next",
)
"""One for each way in which a checkpoint stores its weights, and for each kind of layer."""


@pytest.mark.parametrize("name", few(IN_INT8, (), ci=("gpt2",)))
def test_int8_changes_each_row_of_a_weight_alone(golden_root, make_sequence, name):
    """The other model has the floats of these rows, rounded by numpy to 127 steps of their largest one."""
    directory, int8 = golden_root / name, LinearFormat(int8=True)
    config = load_config(directory)
    prompt = json.loads((directory / "expected.json").read_text())["cases"][1]["prompt"]
    exact = load_weights(directory, config, progress=False)
    leaves = dict(zip(params.leaf_shapes(config), params.state_to_leaves(exact), strict=True))
    for path, shape in params.leaf_shapes(config, linear=int8).items():
        if shape.dtype == np.int8:
            weight = np.asarray(leaves[path])
            step = np.abs(weight).max(axis=-1, keepdims=True) / np.float32(127)
            step[step == 0] = 1
            leaves[path] = jnp.asarray(np.rint(weight / step) * step)
    expected = make_sequence(config, params.state_of(config, leaves)).feed(prompt)
    quantised = load_weights(directory, config, linear=int8, progress=False)
    got = make_sequence(config, quantised, linear=int8).feed(prompt)
    assert np.abs(expected - make_sequence(config, exact).feed(prompt)).max() > 1e-3
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
