"""Every family in int4, against PyTorch in float32 on the weights that int4 stands for: the matrices of these
goldens are such that int4 holds them exactly (`tests.support.int4_goldens`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models import params
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.ops.codes import FORMS
from penstock.runtime.ops.native import library
from tests.support import int4_goldens
from tests.support.goldens import NAMES, check_greedy, check_last_logits
from tests.support.models.witness import log_softmax
from tests.support.suite.drawing import few

INT4 = LinearFormat(codes=FORMS[0])
NOT_IN_4_BITS = {
    "embed_tokens",
    "embed_positions",
    "table",
    "lm_head",
    "router",
    "key_up",
    "value_up",
    "in_proj_steps",
    "in_proj_ba",
}
"""Matrices that stay in floats, or of heads and tables in 8 bits."""


def test_every_golden_has_one_in_int4() -> None:
    assert sorted(NAMES) == sorted(file.stem for file in int4_goldens.FOLDER.glob("*.json"))


def written(name: str, folder: Path) -> tuple[ModelConfig, list[dict[str, Any]]]:
    """Write a golden's checkpoint, and return its config and its cases."""
    golden = int4_goldens.read(name)
    int4_goldens.write_checkpoint(folder, golden["config"], golden["tensors"])
    return load_config(folder), golden["cases"]


@pytest.mark.parametrize("name", few(NAMES, (), ci=("qwen3",)))
def test_int4_is_what_pytorch_computes(name: str, tmp_path: Path, make_sequence: Any) -> None:
    config, cases = written(name, tmp_path)
    shapes = params.leaf_shapes(config, linear=INT4)
    others = {path[-2] for path, leaf in shapes.items() if leaf.ndim > 1 and leaf.dtype != np.uint8}
    assert others <= NOT_IN_4_BITS
    state = load_weights(tmp_path, config, linear=INT4, progress=False)
    sequence = make_sequence(config, state, linear=INT4)
    for case in cases:
        sequence.reset()
        logits = sequence.feed(case["prompt"])
        check_last_logits(logits, case)
        check_greedy(logits, sequence.feed, case)


@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
@pytest.mark.parametrize("name", few(("qwen3", "gpt2", "mixtral", "gemma3"), ()))
def test_the_kernels_of_int4_agree_with_pytorch(name: str, tmp_path: Path, make_sequence: Any) -> None:
    """They round activations to 8 bits, and all else is in bfloat16. So a token's log-probability is another
    by some hundredths.
    """
    config, cases = written(name, tmp_path)
    native = LinearFormat(packed=True, codes=FORMS[0])
    state = load_weights(tmp_path, config, "bfloat16", linear=native, progress=False)
    sequence = make_sequence(config, state, "bfloat16", native)
    errors = []
    for case in cases:
        sequence.reset()
        logits = sequence.feed(case["prompt"])
        for token, logprob in zip(case["tokens"], case["logprobs"], strict=True):
            errors.append(abs(log_softmax(logits.astype(np.float64))[token] - logprob))
            logits = sequence.feed([token])
    assert np.median(errors) < 0.1
