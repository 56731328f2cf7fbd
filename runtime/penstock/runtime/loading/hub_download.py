"""Downloads a model from the Hugging Face hub, and says what failed and what to do."""

from __future__ import annotations

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

FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
SKIPPED = ("[!0-9]*/*", "*/*/*", "consolidated*")
"""Other formats of the same weights, in folders or beside. Folders such as "1_Pooling" are those of Sentence
Transformers, whose config.json says how embeddings are made, and which may have weights for it."""


def download(repo_id: str) -> Path:
    """Download the files of a model that serving needs, with a progress bar, or find them in the hub's cache.
    Raises ConfigError.
    """
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
    """Tell the cause in words, with the setting that helps."""
    if isinstance(error, GatedRepoError):
        return "access to it must be granted: accept its terms on huggingface.co and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "it does not exist, or is private: check the id, and set HF_TOKEN if it is private"
    if isinstance(error, OfflineModeIsEnabled) or huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the model is not in the local cache: unset it to download"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached and the model is not in the local cache: check network and proxy"
    return "the download failed: check network, proxy, free disk space and HF_TOKEN"
