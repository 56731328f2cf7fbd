"""Engine options in the form `--set NAME=VALUE`, so that a new option of EngineConfig can be measured at
once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.runtime.config import EngineConfig

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 2304,
        "kv_cache_bytes": 3 * 2**30,
        "speculation": "off",
    }
)
"""Room for every workload of the table in the Qwen3-0.6B shape: W5 needs at most 20,480 tokens, W3 2,049.
Greedy text of random weights repeats itself, so a lookup would be right more often than for real text."""

_FLAGS = {"generation_config": "override-generation-config"}
"""Flags that are not named as their option."""


def parse(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse assignments such as `["page_size=32", "dtype=auto"]`. A value is JSON if it can be, else text.
    Raises ValueError for one without "=".
    """
    found: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {assignment}: write NAME=VALUE")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the options over EngineConfig's own defaults. Raises TypeError for an unknown option,
    ConfigError for a bad value.
    """
    values = dict(options)
    for name in ("compilation_cache", "native_folder", "adapter_dir"):
        if values.get(name) is not None:
            values[name] = Path(values[name])
    return EngineConfig(**values)


def serve_arguments(options: Mapping[str, Any]) -> list[str]:
    """Spell the options as flags of `penstock serve`."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = _FLAGS.get(name, name.removesuffix("_s").replace("_", "-"))
        if value is None:
            arguments += ["--compilation-cache", "off"] if name == "compilation_cache" else []
        elif isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            arguments += [f"--{flag}", text]
    return arguments
