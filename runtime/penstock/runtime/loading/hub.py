"""Finds the directory of a model by the name that the operator gives."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.gguf.file import is_gguf

DEMO = "demo"
DEMO_DIRECTORY = Path(__file__).parent / "demo_model"
DEMO_TEXT = DEMO_DIRECTORY / "stories.txt"
"""What the demo model wrote (`tools.demo_model.write`), in which a lookup finds what it may write next."""
DEMO_TOKENS_PER_ROW = 2048
"""The demo model takes long prompts, so that programs which send them can be tried with it, but few do: a
first look need not take the memory for many of them at once.
"""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name_or_path: str) -> Path:
    """Find the directory of a model, or its GGUF file: "demo", an existing path, or a Hugging Face id
    "org/name".

    A hub id is downloaded (only the files that serving needs, with a progress bar), or found in the hub's
    cache. Raises ConfigError, which says what failed and what to do.
    """
    if name_or_path == DEMO:
        if not (DEMO_DIRECTORY / "config.json").is_file():
            raise ConfigError(
                f"the demo model is not installed: {DEMO_DIRECTORY} is not there; reinstall penstock"
            )
        return DEMO_DIRECTORY
    path = Path(name_or_path).expanduser()
    if name_or_path and (path.is_dir() or is_gguf(path)):
        return path
    if name_or_path and path.exists():
        raise ConfigError(
            f"{name_or_path} is a file; give the directory that holds the model's config.json, or a file "
            "that ends in .gguf"
        )
    if not _HUB_ID.fullmatch(name_or_path):
        raise ConfigError(
            f"{name_or_path!r} is no directory here, and no Hugging Face id either (those read org/name); "
            f'give a directory that holds config.json and *.safetensors, a .gguf file, an id, or "{DEMO}"'
        )
    # Imported here, because importing the hub's client takes half a second.
    from penstock.runtime.loading.hub_download import download  # noqa: PLC0415

    return download(name_or_path)
