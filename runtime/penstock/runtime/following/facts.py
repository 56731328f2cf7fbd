"""What must be equal in all processes of a group: versions, options, the model's files, and programs."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
from pathlib import Path

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.program_set import Programs, StagePrograms
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.following.interface import Facts
from penstock.runtime.loading.gguf.file import is_gguf, read_gguf
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.loading.pooling import projection_files
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.model_files import read_json_object

PROTOCOL = 7
"""The version of what leader and followers tell each other."""
_PACKAGES = ("penstock", "jax", "jaxlib", "flax", "numpy")
_OWN = frozenset(
    {
        "adapter_dir",  # the leader alone reads adapters
        "compilation_cache",
        "lookup_text",  # the leader alone proposes
        "draft_model",  # as the model: a digest of its files is compared
        "metrics",
        "native_folder",
        "served_model_name",
        "show_progress",
        "switch_interval_s",
        "threads",
    }
)
"""Options that each process may have for itself."""
_CONFIGS = ("config.json", "generation_config.json", "quantize_config.json", "quant_config.json")
"""The files that say how tensors are read, the latter two those of older tools that quantise."""
_SAMPLE_BYTES = 4096
_VECTORS = ("amx", "asimd", "avx", "f16c", "fma", "sve")


def process_facts(model: str, config: EngineConfig, processes: int) -> Facts:
    """Collect what can be told before anything is loaded. ConfigError if there is no such model."""
    options = {
        field.name: repr(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _OWN
    }
    return {
        "the protocol": str(PROTOCOL),
        "processes": str(processes),
        **{f"the version of {name}": importlib.metadata.version(name) for name in _PACKAGES},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "the instruction sets": _instruction_sets(),
        **options,
        "the digest of the model's files": model_digest(resolve_model(model)),
        "the digest of the draft's files": _draft_digest(config.draft_model),
    }


def _draft_digest(name: str | None) -> str:
    """Compute the digest of a draft's files; empty for none."""
    if name is None:
        return ""
    try:
        return model_digest(resolve_model(name))
    except ConfigError as error:
        raise ConfigError(f"draft_model: {name}: {error}") from error


def program_facts(runner: ModelRunner, programs: Programs | StagePrograms) -> Facts:
    """Collect what is known once programs are compiled. Where there are stages, nothing guesses."""
    guesses = programs.guesses if isinstance(programs, Programs) else {}
    return {
        "the pages of the KV cache": ", ".join(map(str, runner.device.num_pages)),
        "max_model_len": str(runner.config.max_model_len),
        "state_snapshots": str(runner.config.num_snapshots),
        "the list of programs": ", ".join(key.name for key in programs.steps),
        "the rows of programs that guess": ", ".join(map(str, guesses)),
    }


def model_digest(model: Path) -> str:
    """Compute a digest of the configuration, and of names, shapes and first bytes of all tensors, in
    hexadecimal. Layers behind an encoder's pooling count. It does not read all of the weights, which takes
    minutes for a large model. model: a directory or a GGUF file. Raises ConfigError.
    """
    digest = hashlib.sha256()
    if is_gguf(model):
        header = read_gguf(model)
        digest.update(repr(sorted(header.metadata.items())).encode())
        for name, info in sorted(header.tensors.items()):
            digest.update(f"{name} {info.type.name} {info.shape}".encode())
            rows = min(info.num_rows, max(1, _SAMPLE_BYTES // info.row_bytes))
            digest.update(info.blocks(0, rows).tobytes()[:_SAMPLE_BYTES])
        return digest.hexdigest()[:32]
    for name in _CONFIGS:
        file = model / name
        digest.update(file.read_bytes() if file.is_file() else b"")
    projections = projection_files(model)
    for file in projections:
        digest.update(repr(read_json_object(file)).encode())
    for folder in (model, *(file.parent for file in projections)):
        for name, tensor in sorted(find_tensors(folder).items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            if tensor.shape and tensor.num_bytes:
                rows = max(1, _SAMPLE_BYTES * tensor.shape[0] // tensor.num_bytes)
                digest.update(tensor[0:rows].tobytes()[:_SAMPLE_BYTES])
    return digest.hexdigest()[:32]


def _instruction_sets() -> str:
    """Return what Linux says of the processor's vectors; machines of which it differs compute other bits."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next(
        (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), []
    )
    return " ".join(sorted(flag for flag in flags if flag.startswith(_VECTORS)))
