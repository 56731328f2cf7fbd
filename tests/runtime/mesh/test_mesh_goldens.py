"""Goldens on several devices of the CPU, in processes of their own: logits, tokens and log-probabilities, or
the states and classes of a model that generates nothing, are PyTorch's, and the programs have exactly the
collectives that ARCHITECTURE.md names.
"""

import functools
import json
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.config import AttentionConfig
from penstock.runtime.models.configs.recurrent import MambaConfig
from penstock.runtime.models.cutting import cut
from tests.support.goldens import GOLDEN, NAMES
from tests.support.suite.drawing import few

pytestmark = pytest.mark.timeout(2000)
"""The first test of a number of devices waits for all goldens there: in the whole sweep more than 60."""
ALWAYS = ((2, "qwen3"),)
AT_FOUR = ("qwen3", "olmo2")
"""Goldens with fewer heads of keys than four devices, and with norms that are cut."""
SIX_HEADS = ("bamba", "falcon_h1", "granite_hybrid", "mamba2", "nemotron_h")
"""The mixers of these goldens have six heads, which four devices cannot share."""
READERS = sorted(f"encoders/{file.parent.name}" for file in (GOLDEN / "encoders").glob("*/config.json"))
CASES = [
    *((2, name) for name in (*NAMES, *READERS)),
    *((4, name) for name in NAMES if name not in SIX_HEADS),
]
MIXTURES = ("deepseek_v3", "gpt_oss", "llama4", "gemma4_moe", "mixtral", "qwen3_5_moe", "minimax_m2")
DEALT = "2, with whole experts"
MODES = {
    DEALT: (2, "experts"),
    "2, with dealt pages": (2, "pages"),
    "4, with dealt pages": (4, "pages"),
}
AT_TWO = ("gemma4", "deepseek_v3", "lfm2", "qwen3_5", "falcon_h1", "encoders/mpnet")
"""One golden for each part of a layer that is cut in a way of its own: embeddings of each layer, latent
attention with experts, short convolutions, delta nets, Mamba's mixer beside attention, and a model that
reads. Windows, scales and caps are the same on each device.
"""
CI = (*((2, name) for name in AT_TWO), *((4, name) for name in AT_FOUR))


@functools.cache
def results(devices, names):
    """Return what the process says of each golden."""
    if devices in MODES:
        devices, mode = MODES[devices]
        names = [f"{name}:{mode}" for name in names]
    command = [sys.executable, "-m", "tests.support.mesh_goldens", str(devices), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = map(json.loads, done.stdout.splitlines())
    return {line["name"].partition(":")[0]: line for line in lines}


def expected_collectives(config, devices):
    """Return the table of `cutting`. XLA joins the two lookups of Gemma 4, the sums of an MLP and of the
    experts beside it, and those of attention and of what stands beside it.
    """
    sums = 1  # embeddings
    passes = () if config.encoder is None else config.encoder.passes
    for layer in [config.layers[number] for number in passes] or config.layers:
        attention = layer.attention
        sums += layer.mlp is not None  # what the MLP adds
        is_cut = not isinstance(attention, AttentionConfig) or attention.qk_norm != "layer"
        sums += is_cut and not layer.norms.startswith("parallel")  # what attention adds, or what stands there
        if isinstance(attention, AttentionConfig):
            sums += attention.qk_norm == "all"
        mixers = (part for part in (attention, layer.beside) if isinstance(part, MambaConfig))
        sums += sum(mixer.normed and mixer.num_groups < devices for mixer in mixers)
    return {"all-reduce": sums, **({"all-gather": 1} if config.generates else {})}


@pytest.fixture(scope="module")
def asked(request):
    """Return the goldens that this run compares on so many devices, which one process runs."""
    ours = (item for item in request.session.items if item.module is request.module)
    cases = [item.callspec.params for item in ours if hasattr(item, "callspec")]
    return {
        devices: tuple(sorted({case["name"] for case in cases if case.get("devices") == devices}))
        for devices in (2, 4, *MODES)
    }


@pytest.mark.parametrize(("devices", "name"), few(CASES, ALWAYS, ci=CI))
def test_several_devices_give_pytorch_s_tokens(asked, devices, name):
    result = results(devices, asked[devices])[name]
    assert result["problem"] == ""
    assert result["collectives"] == expected_collectives(load_config(GOLDEN / name), devices)


@pytest.mark.parametrize("name", SIX_HEADS)
def test_four_devices_do_not_share_six_heads(name):
    with pytest.raises(ConfigError, match="cannot be cut over 4 devices: mamba_n_heads are 6"):
        cut(load_config(GOLDEN / name), 4)


@pytest.mark.parametrize("devices", [DEALT])
@pytest.mark.parametrize("name", few(MIXTURES, (), ci=("deepseek_v3", "gpt_oss")))
def test_experts_that_stay_whole_give_pytorch_s_tokens(asked, devices, name):
    """Without a collective more: what a device's own experts give is added up as parts of experts are."""
    result = results(devices, asked[devices])[name]
    assert result["problem"] == ""
    assert result["collectives"] == expected_collectives(load_config(GOLDEN / name), 2)


@pytest.mark.sweep
@pytest.mark.parametrize("devices", [name for name, (_, mode) in MODES.items() if mode == "pages"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_pages_that_are_dealt_give_pytorch_s_tokens(asked, devices, name):
    """Each layer has two collectives more: a gather of its queries, and an all-to-all of what was added up.
    The cache of each device has its share of the pages (`Sequence`).
    """
    config = load_config(GOLDEN / name)
    result = results(devices, asked[devices])[name]
    assert result["problem"] == ""
    expected = Counter(expected_collectives(config, MODES[devices][0]))
    layers = len(config.layers)
    assert result["collectives"] == expected + Counter({"all-gather": layers, "all-to-all": layers})


@pytest.mark.ci
def test_eight_devices_give_pytorch_s_tokens(tmp_path):
    """No golden has eight heads. This one has each head of queries twice, and each counts half, which changes
    nothing of what the model computes. Its two heads of keys are on four devices each.
    """
    shutil.copytree(GOLDEN / "qwen3", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    heads, dim = config["num_attention_heads"], config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2 * heads}))
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            twice = np.repeat(tensor.reshape(heads, dim, -1), 2, axis=0)
            tensors[name] = twice.reshape(2 * heads * dim, -1)
        elif name.endswith("o_proj.weight"):
            twice = np.repeat(tensor.reshape(-1, heads, dim), 2, axis=1) / np.float32(2)
            tensors[name] = np.ascontiguousarray(twice.reshape(-1, 2 * heads * dim))
    save_file(tensors, tmp_path / "model.safetensors")
    result = results(8, (str(tmp_path),))[str(tmp_path)]
    assert result["problem"] == ""
    assert result["collectives"] == expected_collectives(load_config(tmp_path), 8)
