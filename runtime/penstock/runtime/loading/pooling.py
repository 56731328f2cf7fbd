"""Reads how a checkpoint's embeddings are made, from the files that Sentence Transformers has beside it."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.runtime.errors import ConfigError
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
    try:
        modules = json.loads((directory / MODULES).read_bytes())
    except FileNotFoundError:
        return Pooling.LAST_TOKEN
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / MODULES}: {error}") from error
    others = sorted(
        {kind for each in modules if (kind := each.get("type", "").rpartition(".")[2]) not in _KNOWN}
    )
    if others:
        raise ConfigError(f"{directory / MODULES}: {', '.join(others)} is not supported in embeddings")
    folders = [each["path"] for each in modules if each.get("type", "").endswith(".Pooling")]
    if not folders:
        return Pooling.LAST_TOKEN
    path = directory / folders[0] / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _SUPPORTED:
        described = " and ".join(modes) or "none"
        raise ConfigError(f"{path}: the pooling must be one of {', '.join(_SUPPORTED)}, not {described}")
    return _SUPPORTED[modes[0]]
