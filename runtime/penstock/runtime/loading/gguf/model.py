"""What a GGUF file says of a model, as `loading.served_model` needs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.gguf.architectures import find_tensors, read_config
from penstock.runtime.loading.gguf.file import GgufFile, read_gguf
from penstock.runtime.loading.gguf.tokenizer import find_tokenizer
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.load_rules import Tensor
from penstock.runtime.models.registry import parse_config
from penstock.runtime.requests.sampling import GenerationDefaults, override_defaults
from penstock.runtime.text.codec import TextCodec

_log = logging.getLogger(__name__)

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""What keys call a default of sampling, and what generation_config.json does."""
_SAMPLING_PREFIX = "general.sampling."


@dataclass(frozen=True, slots=True)
class GgufModel:
    """All of a file but the values of its weights."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    """By their names in safetensors files."""
    text: TextCodec | None
    defaults: GenerationDefaults
    stored: str
    """The types of its matrices, and how many bits a weight takes."""


def read_model(path: Path, generation_config: Mapping[str, Any] | None = None) -> GgufModel:
    """Read a file's header. generation_config: replaces defaults of sampling. Raises ConfigError, which names
    the file and the key or tensor, or UnknownArchitecture.
    """
    file = read_gguf(path)
    fields = read_config(file)
    try:
        config = parse_config(fields)
    except ConfigError as error:
        raise ConfigError(f"{path}: its metadata, in the fields of a config.json: {error}") from error
    num_tokens = len(_list(file.metadata.get("tokenizer.ggml.tokens")))
    if num_tokens > config.vocab_size:
        raise ConfigError(
            f"{path}: tokenizer.ggml.tokens has {num_tokens} tokens, and token_embd.weight has "
            f"{config.vocab_size} rows"
        )
    tokenizer = find_tokenizer(file)
    return GgufModel(
        path=path,
        config=config,
        tensors=find_tensors(file, fields),
        text=None if tokenizer is None else TextCodec(tokenizer),
        defaults=override_defaults(_defaults(file), generation_config or {}),
        stored=_stored(file),
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _defaults(file: GgufFile) -> GenerationDefaults:
    """Read the defaults of sampling that the model's makers recommend."""
    given = {
        key.removeprefix(_SAMPLING_PREFIX): value
        for key, value in file.metadata.items()
        if key.startswith(_SAMPLING_PREFIX)
    }
    for name in sorted(given.keys() - _SAMPLING.keys()):
        _log.warning("%s: %s%s = %s is not honoured", file.path, _SAMPLING_PREFIX, name, given[name])
    known = {field: given[name] for name, field in _SAMPLING.items() if name in given}
    try:
        return override_defaults(GenerationDefaults(), known)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {_SAMPLING_PREFIX}*: {error}") from error


def _stored(file: GgufFile) -> str:
    matrices = [info for info in file.tensors.values() if len(info.shape) > 1]
    weights: dict[str, int] = {}
    for info in matrices:
        weights[info.type.name] = weights.get(info.type.name, 0) + info.num_rows * info.shape[-1]
    kinds = ", ".join(sorted(weights, key=lambda name: -weights[name]))
    bits = 8 * sum(info.num_bytes for info in matrices) / sum(weights.values())
    return f"GGUF: {kinds}; {bits:.2f} bits a weight"
