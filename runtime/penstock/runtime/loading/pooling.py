"""Reads how a checkpoint's embeddings and judgements are made, from the files that Sentence Transformers has
beside it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.safetensors_files import TensorEntry, find_tensors
from penstock.runtime.model_files import read_json, read_json_object
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.encoder import Activation, ProjectionConfig
from penstock.runtime.requests.request import Pooling

_log = logging.getLogger(__name__)

MODULES = "modules.json"
_TRANSFORMER = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_TOKENIZER = "tokenizer_config.json"
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
_ACTIVATIONS: Mapping[str, Activation | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
}
"""The last part of what a module Dense calls its activation, a class of torch.nn, to ours."""
_MOST_NUMBERS = 1 << 16
"""Most numbers of an embedding that a module Dense may make."""
_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_lasttoken": Pooling.LAST_TOKEN,
    "pooling_mode_cls_token": Pooling.FIRST_TOKEN,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_max_tokens": Pooling.MAX,
}
"""The fields of which one is true, in files that Sentence Transformers wrote before it had `pooling_mode`."""
_MODES: Mapping[str, Pooling] = {
    "lasttoken": Pooling.LAST_TOKEN,
    "cls": Pooling.FIRST_TOKEN,
    "mean": Pooling.MEAN,
    "max": Pooling.MAX,
}
"""What `pooling_mode` may be."""


def read_pooling(directory: Path, otherwise: Pooling) -> Pooling:
    """Read the pooling of a checkpoint that was made for embeddings; `otherwise` for all others. ConfigError
    where its files ask for another kind of pooling.
    """
    modules = _modules(directory)
    others = sorted({kind for kind, _ in modules if kind not in _KNOWN})
    if others:
        raise ConfigError(f"{directory / MODULES}: {', '.join(others)} is not supported in embeddings")
    paths = [path for kind, path in modules if kind == "Pooling"]
    if not paths:
        return otherwise
    path = paths[0]
    config = read_json_object(path)
    if config.get("include_prompt", True) is not True:
        raise ConfigError(
            f"{path}: include_prompt must be true: to leave the tokens of prompts out of the pooling is not "
            "supported; change it if you put no prompt before your texts"
        )
    named = config.get("pooling_mode")
    if named is None:
        supported = _FLAGS
        modes: list[object] = [
            name for name, on in config.items() if name.startswith("pooling_mode_") and on is True
        ]
    else:
        supported, modes = _MODES, named if isinstance(named, list) else [named]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in supported:
        described = " and ".join(map(str, modes)) or "none"
        raise ConfigError(f"{path}: the pooling must be one of {', '.join(supported)}, not {described}")
    return supported[modes[0]]


def with_projections(config: ModelConfig, directory: Path) -> tuple[ModelConfig, Mapping[str, TensorEntry]]:
    """Return the model with the layers that `modules.json` has behind the pooling (Dense), and their tensors,
    whose names begin with the module's folder. ConfigError if it is no encoder, or if the files of such a
    layer are wrong.
    """
    file, modules = directory / MODULES, _modules(directory)
    kinds = [kind for kind, _ in modules]
    if "Dense" not in kinds:
        return config, {}
    if config.encoder is None or config.classifier is not None:
        raise ConfigError(f"{file}: Dense is supported in encoders that make embeddings only")
    if "Dense" in kinds[: kinds.index("Pooling") if "Pooling" in kinds else None]:
        raise ConfigError(f"{file}: Dense must come behind a Pooling")
    if "Normalize" in kinds and "Dense" in kinds[kinds.index("Normalize") :]:
        raise ConfigError(f"{file}: Dense must come before Normalize")
    size, projections, tensors = config.hidden_size, list[ProjectionConfig](), dict[str, TensorEntry]()
    for path in projection_files(directory):
        projection = _projection(path, size)
        size = projection.out_size
        projections.append(projection)
        found = find_tensors(path.parent)
        tensors |= {f"{projection.folder}.{name}": tensor for name, tensor in found.items()}
    encoder = dataclasses.replace(config.encoder, projections=tuple(projections))
    return dataclasses.replace(config, encoder=encoder), tensors


def projection_files(directory: Path) -> list[Path]:
    """List the files with the options of a checkpoint's layers behind the pooling, in whose folders their
    tensors are.
    """
    return [path for kind, path in _modules(directory) if kind == "Dense"]


def _projection(path: Path, in_size: int) -> ProjectionConfig:
    """Read the layer that a module's config.json describes, behind something that makes `in_size` numbers."""
    config = read_json_object(path)
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = named.rpartition(".")[2] if isinstance(named, str) else ""
    out_size, bias = config.get("out_features"), config.get("bias", True)
    problems = list[str]()
    if config.get("in_features") != in_size:
        problems.append(f"in_features must be {in_size}, the size of what the layer takes")
    if type(out_size) is not int or not 1 <= out_size <= _MOST_NUMBERS:
        problems.append(f"out_features must be from 1 to {_MOST_NUMBERS}")
    if not isinstance(bias, bool):
        problems.append("bias must be true or false")
    if activation not in _ACTIVATIONS:
        problems.append(f"activation_function must be one of {', '.join(_ACTIVATIONS)}, not {named!r}")
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            problems.append(f"{name} must be sentence_embedding")
    if config.get("use_residual", False) is not False:
        problems.append("use_residual must be false")
    if problems:
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    return ProjectionConfig(
        folder=path.parent.name,
        in_size=in_size,
        out_size=cast(int, out_size),
        bias=cast(bool, bias),
        activation=_ACTIVATIONS[activation],
    )


def read_most_tokens(directory: Path) -> int | None:
    """Read the length at which Sentence Transformers cuts texts of a checkpoint; None: files say none. Newer
    versions have it in the tokenizer's file. What else its files ask for, and a request has to do itself, is
    logged.
    """
    file, prompts_file = directory / _TRANSFORMER, directory / _PROMPTS
    if prompts_file.exists():
        config = read_json_object(prompts_file)
        prompts, default = config.get("prompts"), config.get("default_prompt_name")
        if isinstance(prompts, dict) and any(prompts.values()):
            texts = ", ".join(f"{name}: {text!r}" for name, text in prompts.items())
            usual = "" if default is None else f"; by default {default!r} stands before each text there"
            told = "%s names prompts, which callers put before their texts: %s%s"
            _log.info(told, prompts_file, texts, usual)
    if not file.exists():
        return None
    config = read_json_object(file)
    if config.get("do_lower_case") is True:
        _log.warning("%s: do_lower_case is left to the tokenizer", file)
    name = "max_seq_length"
    if config.get(name) is None and (directory / _TOKENIZER).exists():
        name, file = "model_max_length", directory / _TOKENIZER
        config = read_json_object(file)
    most = config.get(name)
    if isinstance(most, float) and most.is_integer():
        most = int(most)  # transformers' 1e30 for no limit
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ConfigError(f"{file}: {name} must be a number of tokens, not {most!r}")
    return most


def read_answer_tokens(directory: Path, vocab_size: int) -> tuple[int, int] | None:
    """Read the tokens that mean yes and no in a checkpoint that was made to judge documents. None for all
    others, and for judges whose score is that of one token alone. ConfigError where its files name no tokens.
    """
    for kind, path in _modules(directory):
        if kind == "LogitScore":
            config = read_json_object(path)
            yes, no = (config.get(name) for name in ("true_token_id", "false_token_id"))
            if no is None:
                return None
            for token_id in (yes, no):
                if type(token_id) is not int or not 0 <= token_id < vocab_size:
                    raise ConfigError(f"{path}: true_token_id and false_token_id must be two token ids")
            return cast("tuple[int, int]", (yes, no))
    return None


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """Read the kind of each module of the checkpoint, and the file with its options."""
    file = directory / MODULES
    if not file.exists():
        return []
    modules = read_json(file)
    if not isinstance(modules, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        for each in modules
    ):
        raise ConfigError(f"{file} must hold a list of modules, each with a type and a path")
    outside = [each["path"] for each in modules if Path(each["path"]).parts[1:] or ".." in each["path"]]
    if outside:
        raise ConfigError(f"{file} names {', '.join(outside)}, which is no folder beside it")
    return [(each["type"].rpartition(".")[2], directory / each["path"] / "config.json") for each in modules]
