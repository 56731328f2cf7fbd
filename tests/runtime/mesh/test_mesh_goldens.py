"""Goldens on several devices of the CPU, in processes of their own: logits, tokens and log-probabilities are
PyTorch's, and the programs have exactly the collectives that ARCHITECTURE.md names.
"""

import functools
import json
import subprocess
import sys

import pytest

from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.config import AttentionConfig, LatentConfig
from tests.support.goldens import GOLDEN, KINDS, NAMES
from tests.support.suite.drawing import few

ALWAYS = ("qwen3",)


@functools.cache
def results(devices, names):
    """What the process says of each golden."""
    command = [sys.executable, "-m", "tests.support.mesh_goldens", str(devices), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def expected_collectives(config):
    """One sum for what attention adds and one for what the MLP adds, and one gather of the logits, where the
    head is cut. Where experts stand beside an MLP, XLA makes one sum of both.
    """
    sums = 0
    for layer in config.layers:
        attention = layer.attention
        heads_are_cut = isinstance(attention, AttentionConfig) and attention.qk_norm != "all"
        sums += heads_are_cut or isinstance(attention, LatentConfig)
        sums += 1
    gathers = {} if config.tie_word_embeddings else {"all-gather": 1}
    return {"all-reduce": sums, **gathers}


@pytest.fixture(scope="module")
def asked(request):
    """The goldens that this run compares, which one process runs."""
    items = (item for item in request.session.items if item.module is request.module)
    return tuple(sorted({item.callspec.params["name"] for item in items}))


@pytest.mark.parametrize("name", few(NAMES, ALWAYS, ci=KINDS))
def test_two_devices_give_pytorch_s_tokens(asked, name):
    result = results(2, asked)[name]
    assert result["problem"] == ""
    assert result["collectives"] == expected_collectives(load_config(GOLDEN / name))
