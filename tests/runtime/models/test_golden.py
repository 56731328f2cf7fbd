"""Logits, greedy tokens and log-probabilities, compared with PyTorch's in float32 and eager mode, without the
engine.

tests/golden holds tiny random checkpoints, and what transformers 5.23 computed from them without a cache.
"""

import json

import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import load_config, load_weights
from tests.support.goldens import GOLDEN, NAMES, ROWS, WITH_PICTURES, check_greedy, check_last_logits
from tests.support.suite.drawing import few

ALWAYS = ("qwen3", "gpt_oss", "deepseek_v3", "lfm2")
"""What `make test` compares: a dense model, windows and experts, latent attention, and a recurrent state."""


def test_every_golden_is_compared():
    assert sorted((*NAMES, *WITH_PICTURES)) == sorted(
        folder.parent.name for folder in GOLDEN.glob("*/config.json")
    )


@pytest.fixture(scope="module", params=few(NAMES, ALWAYS, ci=set(NAMES) - set(ROWS)))
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
