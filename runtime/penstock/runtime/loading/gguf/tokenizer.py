"""Builds the tokenizer of a GGUF file, with its chat templates, from the metadata.

The file has the vocabulary, and the name of what the regular expressions and other parts around it are. Here
they are written as the tokenizer.json of the models that have this name writes them, so that token ids are
Hugging Face's. A name that is not listed is refused: its text would be cut otherwise than in training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from penstock.runtime.chat.template_reading import check_template
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.gguf.file import GgufFile
from penstock.runtime.ops.native.merges import find_merges
from penstock.runtime.text.tokenizer import NAMED_TOKENS, LoadedTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens."""
_SPACE = "▁"
_FILLING = re.compile(r"\[PAD\d+\]")
"""What converters call the tokens that a vocabulary lacks where the embeddings have more rows."""
_MOST_CHARACTERS = 256
"""Of a token of a SentencePiece vocabulary, whose parts are all tried."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LONG_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(after: str) -> str:
    """Match words of which capitals come before small letters; `after`: what may follow a word."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{after}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pre:
    """What stands before the merges of a byte-level vocabulary.

    patterns: each cuts what the ones before have left whole. digits: every digit stands alone. gpt2: whether
    GPT-2's own pattern cuts last. nfc: text is normalised. whole: a word that is a token is that token,
    whatever the merges would make of it. bos: whether a text begins with that token unless the file says so.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_GPT2 = _Pre(gpt2=True)
_DIGITS = _Pre(gpt2=True, digits=True)
_LLAMA3 = _Pre(patterns=(rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}",), whole=True, bos=True)
_CL100K = _Pre(patterns=_LLAMA3.patterns)
_QWEN2 = _Pre(patterns=(rf"{_WORDS}|\p{{N}}{_REST}",), nfc=True)
_QWEN35 = _Pre(
    patterns=(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
    nfc=True,
)
_GPT4O = _Pre(patterns=(_cased(f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}{_LONG_REST}",), whole=True)
_TEKKEN = _Pre(patterns=(_cased("") + rf"|\p{{N}}{_LONG_REST}",), whole=True, bos=True)
_DEEPSEEK3 = _Pre(
    patterns=(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    )
)
_PRE: Mapping[str, _Pre] = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _CL100K,
    "dbrx": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK3,
}
"""The values of tokenizer.ggml.pre."""


class _Metadata:
    """The keys of a tokenizer, with the types that they must have."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._file.path}: {key} {problem}")

    def value(self, key: str, kind: type) -> Any:
        """Read a value of exactly this type; None if it is absent."""
        value = self._file.metadata.get(key)
        if value is not None and type(value) is not kind:
            raise self.error(key, f"must be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def listed(self, key: str, kind: type) -> list[Any]:
        """Read a list of values of exactly this type; an empty one if it is absent."""
        values: list[Any] = self.value(key, list) or []
        if not {kind}.issuperset(map(type, values)):
            wrong = next(i for i, value in enumerate(values) if type(value) is not kind)
            raise self.error(key, f"must be a list of {kind.__name__}, which entry {wrong} is not")
        return values

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, bool)
        return default if value is None else value


def find_tokenizer(file: GgufFile) -> LoadedTokenizer | None:
    """Find the tokenizer of a model; None if the file has none. Raises ConfigError, which names the key."""
    data = _Metadata(file)
    kind = data.value("tokenizer.ggml.model", str)
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise data.error("tokenizer.ggml.model", f"{kind!r} is not supported; supported: 'gpt2', 'llama'")
    tokens = data.listed("tokenizer.ggml.tokens", str)
    types = data.listed("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise data.error("tokenizer.ggml.token_type", f"has {len(types)} types for {len(tokens)} tokens")
    ids = _ids(tokens, types)
    try:
        tokenizer = _byte_level(data, ids) if kind == "gpt2" else _sentence_piece(data, ids, tokens, types)
        _add_tokens(tokenizer, file, kind, tokens, types)
        return _loaded(data, tokenizer, tokens, ids, kind)
    except ConfigError:
        raise
    except Exception as error:  # `tokenizers` may raise anything for a vocabulary that it does not expect
        raise data.error("tokenizer.ggml.tokens", f"makes no tokenizer: {error}") from error


def _ids(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Map tokens to ids. Of several with one text the first one counts, and filling does not."""
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if _UNUSED not in types and "" not in ids and len(ids) == len(tokens):
        return ids  # a large vocabulary is mostly so, and has no time for the loop below
    ids = {}
    for i, token in enumerate(tokens):
        if token and not (types[i] == _UNUSED and _FILLING.fullmatch(token)):
            ids.setdefault(token, i)
    return ids


def _byte_level(data: _Metadata, ids: Mapping[str, int]) -> Tokenizer:
    """Build it as GPT-2 and most models since have it."""
    key = "tokenizer.ggml.pre"
    name = data.value(key, str)
    if name not in _PRE:
        said = "is absent, as in files of old converters" if name is None else f"{name!r} is not supported"
        raise data.error(key, f"{said}; supported: {', '.join(_PRE)}")
    pre = _PRE[name]
    merges: list[tuple[str, str]] = []
    for i, line in enumerate(data.listed("tokenizer.ggml.merges", str)):
        at = line.find(" ", 1)
        if at < 0:
            raise data.error("tokenizer.ggml.merges", f"must have two parts each, unlike entry {i}")
        merges.append((line[:at], line[at + 1 :]))
    tokenizer = Tokenizer(BPE(vocab=dict(ids), merges=merges, fuse_unk=False, ignore_merges=pre.whole))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: _Pre) -> pre_tokenizers.PreTokenizer:
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2))
    return pre_tokenizers.Sequence(steps)


def _sentence_piece(
    data: _Metadata, ids: Mapping[str, int], tokens: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    """Build it as Llama 2, Mistral and Gemma have it: SentencePiece's BPE, in which the score of a piece says
    when it is merged, and bytes stand for characters that the vocabulary lacks.
    """
    scores = data.listed("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise data.error("tokenizer.ggml.scores", f"has {len(scores)} scores for {len(tokens)} tokens")
    pieces = [i for token, i in ids.items() if types[i] in (_NORMAL, _USER_DEFINED, _UNUSED)]
    longest = max(pieces, key=lambda i: len(tokens[i]), default=0)
    if len(tokens[longest]) > _MOST_CHARACTERS:
        raise data.error("tokenizer.ggml.tokens", f"has token {longest} of {len(tokens[longest])} characters")
    unknown = next((token for token, i in ids.items() if types[i] == _UNKNOWN), None)
    unknown_id = data.value("tokenizer.ggml.unknown_token_id", int)
    if unknown_id is not None and 0 <= unknown_id < len(tokens):
        unknown = tokens[unknown_id]
    tokenizer = Tokenizer(
        BPE(
            vocab=dict(ids),
            merges=_merges({tokens[i]: scores[i] for i in pieces}),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if data.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, the one of the highest score first, as transformers
    derives merges of a SentencePiece vocabulary.
    """
    pieces = list(scores)
    places = find_merges(pieces, np.array(list(scores.values()), np.float64))
    if places is not None:
        texts = np.array(pieces, object)
        return list(zip(texts[places[:, 0]].tolist(), texts[places[:, 1]].tolist(), strict=True))
    found: list[tuple[float, int, str, str]] = []
    for piece, score in scores.items():
        for at in range(1, len(piece)):
            left = piece[:at]
            if left in scores and (right := piece[at:]) in scores:
                found.append((-score, -at, left, right))
    found.sort()
    return [(left, right) for _, _, left, right in found]


def _add_tokens(
    tokenizer: Tokenizer, file: GgufFile, kind: str, tokens: Sequence[str], types: Sequence[int]
) -> None:
    """Make tokens that stand for themselves, wherever they are spelt out in a text: control tokens are
    special, those that the model's makers defined are not. The latter are stored as the text has them, also
    those of Gemma that are several spaces.
    """
    is_phi = kind == "llama" and file.metadata.get("general.architecture") == "phi3"

    def added(token: str, *, special: bool) -> AddedToken:
        # What follows a marker of Phi-3 loses its spaces; no key says so, and llama.cpp knows it by the name.
        strips = is_phi and token not in ("<unk>", "<s>", "<|endoftext|>")
        return AddedToken(token, rstrip=strips, special=special, normalized=False)

    def of(*kinds: int) -> Iterable[str]:
        return (token for token, kind in zip(tokens, types, strict=True) if token and kind in kinds)

    tokenizer.add_special_tokens([added(token, special=True) for token in of(_CONTROL, _UNKNOWN)])
    tokenizer.add_tokens([added(token, special=False) for token in of(_USER_DEFINED)])


_PARTS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""The tokens that have a part: what keys call it, and what transformers does."""


def _loaded(
    data: _Metadata, tokenizer: Tokenizer, tokens: Sequence[str], ids: Mapping[str, int], kind: str
) -> LoadedTokenizer:
    """Load a tokenizer with what stands around a text, and the chat templates."""
    parts: dict[str, str] = {}
    for key, name in _PARTS.items():
        token_id = data.value(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is not None and 0 <= token_id < len(tokens) and ids.get(tokens[token_id]) == token_id:
            parts[name] = tokens[token_id]
    pre = _PRE.get(data.value("tokenizer.ggml.pre", str) or "", _Pre())
    around: list[list[str]] = []
    for key, default in (("bos", pre.bos if kind == "gpt2" else True), ("eos", False)):
        name = f"{key}_token"
        wanted = data.value(f"tokenizer.ggml.add_{name}", bool)
        if wanted and name not in parts:
            raise data.error(f"tokenizer.ggml.{name}_id", "is no token, but a text shall have it")
        is_added = name in parts and (default if wanted is None else wanted)
        around.append([parts[name]] if is_added else [])
    before, after = around
    if before or after:
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(token, ids[token]) for token in {*before, *after}],
        )
    # As transformers does: a token that has a part is special, unless the model's makers defined it.
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in parts.values() if token not in known]
    )
    end = parts.get("eos_token")
    templates = _templates(data)
    return LoadedTokenizer(
        backend=tokenizer,
        encode=None,
        decode=lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip),
        added_tokens=tokenizer.get_added_tokens_decoder(),
        special_tokens=parts,
        token_names=NAMED_TOKENS,
        eos_token_id=None if end is None else ids[end],
        chat_template=templates if len(templates) > 1 else templates.get("default"),
        class_name="TokenizersBackend",
        longest_token=max(map(len, tokens)),
    )


def _templates(data: _Metadata) -> dict[str, str]:
    """Read the chat templates by their names; that without a name is "default"."""
    names = data.listed("tokenizer.chat_templates", str)
    keys = {"default": "tokenizer.chat_template"} | {
        name: f"tokenizer.chat_template.{name}" for name in names
    }
    found: dict[str, str] = {}
    for name, key in keys.items():
        template = data.value(key, str)
        if template:
            try:
                check_template(template)
            except Exception as error:  # see `check_template`
                raise data.error(key, f"is no valid chat template: {error}") from error
            found[name] = template
    return found
