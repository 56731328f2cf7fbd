"""Finds the directory of a model by the name that the operator gives."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from penstock.runtime.errors import ConfigError

DEMO = "demo"
DEMO_DIRECTORY = Path(__file__).parent / "demo_model"
DEMO_TOKENS_PER_ROW = 2048
"""The demo model takes long prompts, so that programs which send them can be tried with it, but few do: a
first look need not take the memory for many of them at once.
"""
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
SKIPPED = ("[!0-9]*/*", "*/*/*", "*/*.safetensors", "consolidated*")
"""Other formats of the same weights, in folders or beside. Folders such as "1_Pooling" are those of Sentence
Transformers, whose config.json says how embeddings are made."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name_or_path: str) -> Path:
    """The directory of a model: "demo", an existing directory, or a Hugging Face hub id "org/name".

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
    if name_or_path and path.is_dir():
        return path
    if name_or_path and path.exists():
        raise ConfigError(f"{name_or_path} is a file; give the directory that holds the model's config.json")
    if not _HUB_ID.fullmatch(name_or_path):
        raise ConfigError(
            f"{name_or_path!r} is no directory here, and no Hugging Face id either (those read org/name); "
            f'give a directory that holds config.json and *.safetensors, an id, or "{DEMO}"'
        )
    return _download(name_or_path)


def _download(repo_id: str) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=list(FILES), ignore_patterns=list(SKIPPED)
            )
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"there is no directory {repo_id!r} here, and the Hugging Face hub did not give a model of that "
            f"id: {_what_failed(error)} ({type(error).__name__}: {first_line}). Instead, download it where "
            f"the hub can be reached (hf download {repo_id} --local-dir DIR) and pass DIR"
        ) from error


def _what_failed(error: Exception) -> str:
    """The cause in words, with the setting that helps."""
    if isinstance(error, GatedRepoError):
        return "access to it must be granted: accept its terms on huggingface.co and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "it does not exist, or is private: check the id, and set HF_TOKEN if it is private"
    if isinstance(error, OfflineModeIsEnabled) or huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the model is not in the local cache: unset it to download"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached and the model is not in the local cache: check network and proxy"
    return "the download failed: check network, proxy, free disk space and HF_TOKEN"
