"""Helpers for tests of uploads: an engine of a checkpoint, tensors as bytes, and the values of the engine's
leaves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock.runtime import Engine, EngineConfig, StoppingParams
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.models.params import state_to_leaves
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import UpdateOptions
from penstock.runtime.updating.upload import Upload
from tests.support.collector import GREEDY_PARAMS
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.toy import toy_backend

Arrays = Mapping[str, NDArray[Any]]


def tensors_of(directory: Path) -> dict[str, NDArray[Any]]:
    """Return the checkpoint's tensors by name."""
    return dict(load_file(directory / "model.safetensors"))


def small_engine(directory: Path, **changes: Any) -> Engine:
    """Start an engine with few programs; the caller shuts it down."""
    options: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "max_decode_steps": 1,
        "compilation_cache": TEST_CACHE,
        "show_progress": False,
    }
    engine = Engine.from_pretrained(str(directory), EngineConfig(**(options | changes)))
    engine.start()
    return engine


def bits(engine: Engine) -> list[bytes]:
    """Return the bytes of the leaves that serve."""
    return [np.asarray(leaf).tobytes() for leaf in engine.updater._device.leaves]


def tokens(engine: Engine) -> list[int]:
    """Return the engine's greedy tokens after a fixed prompt."""
    answer = engine.generate([5, 6, 7], sampling=GREEDY_PARAMS, stopping=StoppingParams(max_tokens=8))
    return list(answer.token_ids)


def fresh_bits(directory: Path, tensors: Arrays, into: Path, **changes: Any) -> list[bytes]:
    """Return the bytes of the leaves of a fresh engine that loads these tensors in place of those of
    `directory`.
    """
    into.mkdir()
    shutil.copy(directory / "config.json", into)
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, into / "model.safetensors")
    options = EngineConfig(show_progress=False, **changes)
    config = load_config(into)
    dtype = options.dtype if options.dtype not in (None, "auto") else config.dtype
    linear = toy_backend(options).linear_format(np.dtype(dtype), options.quantization)
    state = load_weights(into, config, dtype, linear=linear, progress=False)
    return [np.asarray(leaf).tobytes() for leaf in state_to_leaves(state)]


def described(tensors: Arrays, *, checksums: bool = False) -> list[SentTensor]:
    """Return the tensors as a manifest describes them."""
    return [
        SentTensor(
            name,
            name_of(tensor.dtype),
            tensor.shape,
            google_crc32c.value(tensor.tobytes()) if checksums else 0,
        )
        for name, tensor in tensors.items()
    ]


def options(update_id: str = "u", **changes: Any) -> UpdateOptions:
    return UpdateOptions(**({"update_id": update_id, "label": f"label of {update_id}"} | changes))


def begun(engine: Engine, tensors: Arrays, update_id: str = "u", **changes: Any) -> Upload:
    return engine.updater.begin(options(update_id, **changes), described(tensors, checksums=True))


def send(upload: Upload, tensors: Arrays, only: Iterable[int] | None = None) -> int:
    """Write whole tensors, in the order of `only`. Returns the number of bytes."""
    values = list(tensors.values())
    total = 0
    for index in range(len(values)) if only is None else only:
        data = values[index].tobytes()
        for offset in range(0, len(data), 5000):
            upload.write(index, offset, data[offset : offset + 5000])
        total += len(data)
    return total


def changed(tensors: Arrays, factor: float = -0.5) -> dict[str, NDArray[Any]]:
    """Other weights of the same dtypes: the tensors times `factor`, which is exact."""
    return {name: (tensor * np.asarray(factor, tensor.dtype)) for name, tensor in tensors.items()}


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found
