"""`quantise`: what it refuses before it costs anything, and the folder that it writes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.quantised.checkpoint import find_weights
from penstock.runtime.loading.quantised.layers import QuantisedWeight
from penstock.runtime.loading.safetensors_files import find_tensors, read_header
from penstock.runtime.quantising import quantise as module
from penstock.runtime.quantising.options import Method, QuantiseOptions
from penstock.runtime.quantising.output import new_folder
from penstock.runtime.quantising.quantise import quantise
from tests.support.goldens import GOLDEN, QUANTISED
from tests.support.models.random_model import write_random_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a small checkpoint in floats."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_random_model(folder, seed=3)
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "int3"}, "format: must be one of int4, int8"),
        ({"group": 16}, "group: must be one of 32, 64, 128"),
        ({"method": "best"}, "method: must be one of rtn, gptq, awq"),
        ({"calibration_tokens": 0}, "calibration_tokens: must be at least 1"),
        ({"method": "rtn", "calibration": Path("x")}, "calibration: method rtn uses no text"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        QuantiseOptions(**options)


@pytest.mark.parametrize(
    ("folder", "options", "says"),
    [
        (QUANTISED / "awq_g64", {}, "is quantised already"),
        (GOLDEN / "mixtral", {}, "layer 0 has experts"),
        (GOLDEN / "deepseek_v2", {}, "layer 0 has latent attention"),
        (GOLDEN / "olmo2", {"method": "awq"}, "layer 0 has norms of the kind 'post'; choose gptq"),
        (GOLDEN / "llama", {}, "no weight can be quantised"),
        (GOLDEN / "gguf" / "qwen3_mixed" / "model.gguf", {}, "a GGUF file"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_models_that_cannot_be_quantised_are_refused_by_name(
    folder: Path, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        quantise(folder, tmp_path / "out", QuantiseOptions(**options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "row", "value", "says"),
    [
        (NORM, ..., np.nan, f"tensor {NORM} has values"),
        (EMBEDDINGS, 500, np.inf, f"tensor {EMBEDDINGS} has values"),  # of a token that no judged text has
        pytest.param(NORM, ..., 3e38, "in floats layer 0 makes values", marks=pytest.mark.ci),
        pytest.param(Q_PROJ, 0, np.nan, f"tensor {Q_PROJ} has values", marks=pytest.mark.ci),
    ],
)
def test_a_tensor_with_values_that_are_no_numbers_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: Any, value: float, says: str
) -> None:
    monkeypatch.setattr(module, "JUDGED_TOKENS", 64)
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors[name][row] = value
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=says):
        quantise(model, tmp_path / "out", QuantiseOptions(method="rtn"), progress=False)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_or_has_no_room_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        quantise(model, model, QuantiseOptions())
    with pytest.raises(ConfigError, match="is no folder; make it first"):
        quantise(model, tmp_path / "none" / "out", QuantiseOptions())
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(ConfigError, match=r"has room for 0\.00 GB, and the quantised checkpoint takes"):
        quantise(model, tmp_path / "out", QuantiseOptions())


def test_an_interruption_leaves_nothing_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2  # the model, and the folder in the making
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantise(model, tmp_path / "out", QuantiseOptions(method="rtn"))
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_leaves_nothing_behind(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    number: signal.Signals,
) -> None:
    outer = signal.signal(number, signal.default_int_handler)  # nohup has pytest ignore SIGHUP
    request.addfinalizer(lambda: signal.signal(number, outer))
    before = signal.getsignal(number)

    def told(*args: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2  # the model, and the folder in the making
        assert signal.getsignal(number) is not before  # else the signal would end pytest
        signal.raise_signal(number)

    monkeypatch.setattr(module, "_make", told)

    def ended(code: int) -> None:
        assert list(tmp_path.iterdir()) == [model]  # nothing is computed after this
        sys.exit(code)

    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit) as ending:
        quantise(model, tmp_path / "out", QuantiseOptions(method="rtn"))
    assert ending.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_what_a_process_left_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    """But not what another process fills, or what is of another folder."""
    left, filled, other = (
        tmp_path / f".{name}" for name in ("out-unfinished-1", "out-unfinished-2", "out2-unfinished-3")
    )
    for folder in (left, filled, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"some")
    descriptor = os.open(filled, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with new_folder(tmp_path / "out") as made:
            assert set(tmp_path.iterdir()) == {filled, other, made}
    finally:
        os.close(descriptor)
    with new_folder(tmp_path / "out2") as made:
        with new_folder(tmp_path / "out3"):
            assert set(tmp_path.iterdir()) >= {tmp_path / "out", filled, made}
        assert not other.exists()


def test_a_name_that_is_too_long_and_a_disk_that_fills_up_are_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be made: .*File name too long"):
        quantise(model, tmp_path / ("x" * 300), QuantiseOptions())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_make", full)
    with pytest.raises(ConfigError, match=r"out cannot be made: .*No space left on device"):
        quantise(model, tmp_path / "out", QuantiseOptions(method="rtn"))
    assert list(tmp_path.iterdir()) == [model]


def exactly(folder: Path, name: str) -> np.ndarray:
    """Read a weight of a folder in float32."""
    tensor = find_weights(folder)[name]
    return np.asarray(tensor[0 : tensor.shape[0]]).astype(np.float32)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kinds", "factor"),
    [
        ((("rtn", 4), ("gptq", 4)), 1),
        pytest.param((("rtn", 4), ("awq", 4)), 1, marks=pytest.mark.sweep),
        pytest.param((("rtn", 4), ("rtn", 8)), 20, marks=pytest.mark.sweep),
        pytest.param((("rtn", 8), ("gptq", 8)), 1, marks=pytest.mark.sweep),
    ],
    ids=["gptq", "awq", "int8", "gptq8"],
)
def test_the_folder_loads_and_loses_less_than_with_a_plainer_method(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[tuple[Method, int], ...],
    factor: int,
) -> None:
    """Each folder has every tensor, those in codes near the floats. The KL divergence of the second kind is
    less than that of the first, divided by the factor.
    """
    monkeypatch.setattr(module, "_WATCHED_TOKENS", 64)
    monkeypatch.setattr(module, "JUDGED_TOKENS", 64)
    seen: list[tuple[int, int]] = []
    kl = []
    for method, bits in kinds:
        out = tmp_path / f"{method}{bits}"
        options = QuantiseOptions(
            format="int4" if bits == 4 else "int8", method=method, calibration_tokens=640
        )
        report = quantise(model, out, options, progress=lambda done, total: seen.append((done, total)))
        kl.append(report.score.kl)
        assert seen[-1][0] == seen[-1][1]
        assert report.num_quantised == 14
        assert report.kept == ()
        assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        assert load_config(out) == load_config(model)
        weights = find_weights(out)
        assert set(weights) == set(find_tensors(model))
        assert report.new_bytes == sum(entry.num_bytes for entry in find_tensors(out).values())
        assert sum(isinstance(weight, QuantisedWeight) for weight in weights.values()) == 14
        if method != "awq":  # which scales columns
            off = np.abs(exactly(out, Q_PROJ) - exactly(model, Q_PROJ))
            assert 0 < off.mean() < np.abs(exactly(model, Q_PROJ)).mean() / (8 if bits == 4 else 100)
    assert kl[1] < kl[0] / factor


_READ = """
import sys
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file
tensors = load_file(sys.argv[1] + "/model.safetensors")
bits, group, found = int(sys.argv[2]), 32, {}
for name in [name for name in tensors if name.endswith(".weight_packed")]:
    layer = name.removesuffix("_packed")
    shape = torch.Size(tensors[layer + "_shape"].tolist())
    values = unpack_from_int32(tensors[name], bits, shape).float().reshape(shape[0], -1, group)
    if layer + "_zero_point" in tensors:
        zeros = tensors[layer + "_zero_point"]
        of = torch.Size((shape[0], shape[1] // group))
        values = values - unpack_from_int32(zeros, bits, of, packed_dim=0).float()[:, :, None]
    found[layer] = (values * tensors[layer + "_scale"].float()[:, :, None]).reshape(shape).contiguous()
save_file(found, sys.argv[3])
"""
_LOAD = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
)
found = model.state_dict()
save_file({name: found[name].contiguous() for name in found if name.endswith("_proj.weight")}, sys.argv[3])
"""
TORCH_PYTHON = os.environ.get("PENSTOCK_TEST_TORCH_PYTHON")


@pytest.mark.sweep
@pytest.mark.skipif(
    TORCH_PYTHON is None,
    reason="PENSTOCK_TEST_TORCH_PYTHON names no Python with torch, transformers and compressed-tensors",
)
@pytest.mark.parametrize(
    ("program", "dtype"),
    [(_READ, np.float32), (_LOAD, ml_dtypes.bfloat16)],
    ids=["compressed-tensors", "transformers"],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_other_packages_read_the_same_values(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, program: str, dtype: type
) -> None:
    """compressed-tensors unpacks codes and zeros of the folder, and transformers loads a model of it, whose
    weights it multiplies by their scales in the scales' bfloat16. Every value is ours, to the last bit.
    """
    monkeypatch.setattr(module, "JUDGED_TOKENS", 64)
    out, values = tmp_path / "out", tmp_path / "values.safetensors"
    options = QuantiseOptions(format="int4" if bits == 4 else "int8", method="rtn")
    quantise(model, out, options, progress=False)
    assert TORCH_PYTHON is not None
    told = subprocess.run(
        [TORCH_PYTHON, "-c", program, str(out), str(bits), str(values)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    theirs = read_header(values)
    assert len(theirs) == 14
    for name, entry in theirs.items():
        np.testing.assert_array_equal(np.asarray(entry.map()).astype(dtype), exactly(out, name).astype(dtype))
