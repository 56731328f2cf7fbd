"""A checkpoint's tokenizer, and how it is read from its files by the package `tokenizers` alone.

transformers reads every tokenizer there is, but with a large vocabulary it takes four times as long and keeps
300 MiB more, beside the second that its import takes. So `read_tokenizer` reads the files itself where they
say all that matters. For everything else it returns None, and `by_transformers` reads it. What files mean is
what transformers makes of them: which of its classes it takes, and what that class adds. A test compares
both, for each type of model here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from penstock.runtime.model_files import read_json_object

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FURTHER_TEMPLATES = "additional_chat_templates"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Fields of tokenizer_config.json that name a special token. A model may have further ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer of a checkpoint."""

    backend: Tokenizer | None
    """Hugging Face's fast tokenizer underneath; None: it is written in Python."""
    encode: Callable[[str, bool], list[int]] | None
    """From a text, and whether to add special tokens, to token ids; None: as the backend does."""
    decode: Callable[[Sequence[int], bool], str]
    """From token ids, and whether to skip special tokens, to their text."""
    added_tokens: Mapping[int, AddedToken]
    """The tokens besides the vocabulary, by their ids."""
    special_tokens: Mapping[str, str]
    """The special tokens that have a part, by its name, such as "eos_token"."""
    token_names: tuple[str, ...]
    """All such names, also of those that this tokenizer does not have."""
    eos_token_id: int | None
    chat_template: str | Mapping[str, str] | None
    """The model's template, or several by their names."""
    class_name: str
    """The class that loads it in transformers."""
    longest_token: int | None = None
    """How many characters the longest token has; None: whoever wants to know it must look at all of them."""


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of transformers that takes only vocabulary and merges from tokenizer.json, and has the rest in
    its code.
    """

    names: Mapping[str, str]
    """The special tokens that it has unless the files name others."""
    normalizer: Mapping[str, Any]
    pre_tokenizer: Mapping[str, Any]
    decoder: str | tuple[str, ...]
    """The types of its parts."""
    model: Mapping[str, Any]

    def is_in(self, backend: Tokenizer) -> bool:
        """Say whether the file has what the class would put in its place."""
        decoder = _state(backend.decoder)
        parts = [part["type"] for part in decoder.get("decoders", [decoder])]
        model = {name: getattr(backend.model, name, None) for name in self.model}
        return (
            _state(backend.normalizer) == self.normalizer
            and _without_offsets(_state(backend.pre_tokenizer)) == self.pre_tokenizer
            and tuple(parts) == self.decoder
            and model == self.model
        )


def _qwen(pattern: str) -> _Class:
    """Describe Qwen's classes, which differ in how they split words."""
    end = "<|endoftext|>"
    return _Class(
        names={"eos_token": end, "unk_token": end, "pad_token": end},
        normalizer={"type": "NFC"},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        decoder=("ByteLevel",),
        model={"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
        | {"ignore_merges": False},
    )


_PLAIN = "TokenizersBackend"
_CLASSES = {
    "Qwen2Tokenizer": _qwen(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Qwen3_5Tokenizer": _qwen(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "GemmaTokenizer": _Class(
        names={
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        pre_tokenizer={
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        decoder=("Replace", "ByteFallback", "Fuse"),
        model={"dropout": None, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
        | {"ignore_merges": False},
    ),
}
"""The classes that are known here. `TokenizersBackend` takes all from the file, and adds nothing."""

DECLARED = frozenset((
    "apertus", "arcee", "bamba", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1",
    "exaone4", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_neox",
    "gpt_oss", "gptj", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2", "lfm2_moe", "llama",
    "llama4_text", "mamba2", "mpt", "nemotron_h", "olmo", "olmoe", "opt", "phi", "qwen2_5_vl", "qwen2_moe",
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "starcoder2",
    "vaultgemma",
))  # fmt: skip
"""Types of models of which transformers takes the class that tokenizer_config.json declares."""
FIXED = {
    "ernie4_5": _PLAIN,
    "ernie4_5_moe": _PLAIN,
    "flex_olmo": _PLAIN,
    "glm": _PLAIN,
    "glm4": _PLAIN,
    "glm4_moe": _PLAIN,
    "gpt_bigcode": _PLAIN,
    "granite": _PLAIN,
    "granitemoe": _PLAIN,
    "granitemoehybrid": _PLAIN,
    "granitemoeshared": _PLAIN,
    "minimax_m2": _PLAIN,
    "ministral3": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": _PLAIN,
    "nemotron": _PLAIN,
    "olmo2": _PLAIN,
    "olmo3": _PLAIN,
    "phi3": _PLAIN,
    "phimoe": _PLAIN,
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "stablelm": _PLAIN,
}
"""Types of models of which it takes one class, whatever is declared."""
_CHANGING = (
    "add_prefix_space",
    "auto_map",
    "fast_tokenizer_files",
    "fix_mistral_regex",
    "from_slow",
    "model_specific_special_tokens",
    "split_special_tokens",
)
"""Fields of tokenizer_config.json that change how a tokenizer encodes, which file it is, or which tokens are
special. transformers knows how.
"""


def read_tokenizer(folder: Path) -> LoadedTokenizer | None:
    """Read a checkpoint's tokenizer; None if only transformers knows what its files mean. A file that is
    damaged is left to transformers, too.
    """
    if not ((folder / FILE).is_file() and (folder / CONFIG).is_file()):
        return None
    try:
        return _read(folder)
    except Exception:  # noqa: BLE001 # `tokenizers` raises nothing narrower
        return None


def _read(folder: Path) -> LoadedTokenizer | None:
    config = read_json_object(folder / CONFIG)
    model_type = _if_there(folder / "config.json").get("model_type")
    if any(config.get(name) for name in _CHANGING):
        return None
    if any(isinstance(config[name], dict) for name in _further(config)):
        return None  # a part that only some models have must be a text there
    backend = Tokenizer.from_file(str(folder / FILE))
    class_name = class_of(config.get("tokenizer_class"), model_type, backend)
    known = _CLASSES.get(class_name)
    if class_name != _PLAIN and (known is None or not known.is_in(backend)):
        return None
    more = {} if "added_tokens_decoder" in config else _if_there(folder / "special_tokens_map.json")
    names = _named({**({} if known is None else known.names), **config, **more})
    added = backend.get_added_tokens_decoder()
    by_name = {token.content: token for token in added.values()}
    wanted = [*names.values(), *_extra_tokens(config | more), *_if_there(folder / "added_tokens.json")]
    if not by_name.keys() >= set(wanted) or not _agree(config, by_name):
        return None
    if not all(by_name[token].special for token in names.values()):
        return None  # transformers makes special what has a part
    if backend.padding is not None and "pad_token" not in names:
        return None  # it takes the token from there
    backend.no_padding()
    backend.no_truncation()
    end = names.get("eos_token")
    return LoadedTokenizer(
        backend=backend,
        encode=None,
        decode=lambda ids, skip: backend.decode(ids, skip_special_tokens=skip),
        added_tokens=added,
        special_tokens=names,
        token_names=tuple(dict.fromkeys((*NAMED_TOKENS, *names))),
        eos_token_id=None if end is None else backend.token_to_id(end),
        chat_template=_templates(folder, config.get("chat_template")),
        class_name=class_name,
    )


def class_of(declared: str | None, model_type: str | None, backend: Tokenizer) -> str:
    """Name the class that transformers takes for a tokenizer; empty if that is not known here."""
    if declared is None or (model_type is not None and model_type not in DECLARED | FIXED.keys()):
        return ""
    fixed = FIXED.get(model_type or "")
    if fixed is not None:
        return fixed
    name = declared.removesuffix("Fast")
    if name == "LlamaTokenizer" and "ByteLevel" in set(_types(_state(backend.pre_tokenizer))):
        return _PLAIN  # a tokenizer as Llama 3's, which has nothing of that class
    return _PLAIN if name == "PreTrainedTokenizer" else name


def _named(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that have a part."""
    extra = fields.get("extra_special_tokens")
    fields = {**fields, **(extra if isinstance(extra, dict) else {})}
    found = {name: _content(fields.get(name)) for name in (*NAMED_TOKENS, *_further(fields))}
    return {name: token for name, token in found.items() if token is not None}


def _further(fields: Mapping[str, Any]) -> list[str]:
    """List the fields that name a special token which only some models have."""
    return sorted(name for name in fields if name.endswith("_token") and name not in NAMED_TOKENS)


def _extra_tokens(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens without a part."""
    for name in ("extra_special_tokens", "additional_special_tokens"):
        tokens = fields.get(name)
        for token in tokens if isinstance(tokens, list) else ():
            content = _content(token)
            if content is not None:
                yield content


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _templates(folder: Path, configured: Any) -> str | Mapping[str, str] | None:
    """Return the model's templates: those of files, and else those of tokenizer_config.json."""
    file = folder / TEMPLATE
    found = {"default": file.read_text("utf-8")} if file.is_file() else {}
    found |= {each.stem: each.read_text("utf-8") for each in (folder / FURTHER_TEMPLATES).glob("*.jinja")}
    if found:
        return found["default"] if found.keys() == {"default"} else found
    if isinstance(configured, list):
        return {one["name"]: one["template"] for one in configured}
    template: str | Mapping[str, str] | None = configured
    return template


def _if_there(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if there is no such file."""
    return read_json_object(file) if file.is_file() else {}


def _agree(config: Mapping[str, Any], added: Mapping[str, AddedToken]) -> bool:
    """Say whether tokenizer_config.json lists only tokens that tokenizer.json has, and has just so."""
    for listed in config.get("added_tokens_decoder", {}).values():
        token = added.get(listed["content"])
        if token is None or token.__getstate__() != AddedToken(**listed).__getstate__():
            return False
    return True


def _state(part: Any) -> dict[str, Any]:
    """Read a part of a tokenizer as tokenizer.json spells it; empty if there is none."""
    return {} if part is None else json.loads(part.__getstate__())


def _without_offsets(part: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what only says where in the text a token lies."""
    inner = part.get("pretokenizers")
    more = {} if inner is None else {"pretokenizers": [_without_offsets(one) for one in inner]}
    return {name: value for name, value in part.items() if name != "trim_offsets"} | more


def _types(part: Mapping[str, Any]) -> Iterable[str]:
    """Yield the types of a part and of those in it."""
    yield part.get("type", "")
    for inner in part.get("pretokenizers", ()):
        yield from _types(inner)
