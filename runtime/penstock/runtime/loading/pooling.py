"""Reads how a checkpoint's embeddings are made, from the files that Sentence Transformers has beside it."""

from __future__ import annotations

from pathlib import Path

from penstock.runtime.errors import ConfigError
from penstock.runtime.model_files import read_json, read_json_object
from penstock.runtime.requests.request import Pooling

MODULES = "modules.json"
_KNOWN = ("Transformer", "Pooling", "Normalize")
_SUPPORTED = {
    "pooling_mode_lasttoken": Pooling.LAST_TOKEN,
    "pooling_mode_mean_tokens": Pooling.MEAN,
}


def read_pooling(directory: Path) -> Pooling:
    """The pooling of a checkpoint that was made for embeddings; the last token's for all others. ConfigError
    where its files ask for another kind of pooling.
    """
    file = directory / MODULES
    if not file.exists():
        return Pooling.LAST_TOKEN
    modules = read_json(file)
    if not isinstance(modules, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        for each in modules
    ):
        raise ConfigError(f"{file} must hold a list of modules, each with a type and a path")
    others = sorted({kind for each in modules if (kind := each["type"].rpartition(".")[2]) not in _KNOWN})
    if others:
        raise ConfigError(f"{file}: {', '.join(others)} is not supported in embeddings")
    folders = [each["path"] for each in modules if each["type"].endswith(".Pooling")]
    if not folders:
        return Pooling.LAST_TOKEN
    path = directory / folders[0] / "config.json"
    config = read_json_object(path)
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _SUPPORTED:
        described = " and ".join(modes) or "none"
        raise ConfigError(f"{path}: the pooling must be one of {', '.join(_SUPPORTED)}, not {described}")
    return _SUPPORTED[modes[0]]
