"""Tokenizers of GGUF files: their ids are those of the tokenizers that were written into the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.gguf.file import GgufFile, read_gguf
from penstock.runtime.loading.gguf.tokenizer import _PRE, _merges, _pre_tokenizer, find_tokenizer
from penstock.runtime.loading.hub import DEMO_DIRECTORY
from penstock.runtime.ops.native import library
from penstock.runtime.text.codec import TextCodec
from tests.support.gguf_bytes import header, padded, typed
from tests.support.gguf_tokenizers import metadata_of
from tests.support.goldens import GOLDEN

_TEXTS = (
    "",
    "Hello, world!",
    " leading and trailing  ",
    "two  three   four    spaces\n\n\nlines\t\ttabs\r\n",
    "don't I'LL we've 'tis it'S",
    "1234567890 3.14 12,345 007",
    "日本語のテキスト、中文。 한국어 ไทย",
    "é é Å ﬁ ½ ①",
    "🙂👩‍👩‍👧 \u200d\ufeff",
    "snake_case CamelCase HTTPServer x=1;y+=2 //comment\n",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "<s>[INST] hi </s> <0x41> <bos>",
    "▁under ▁▁score",
    "\x00\x07\x7f",
    "مرحبا नमस्ते Привет ΑΒΓ",
)
_CORPUS = [
    *_TEXTS,
    Path(__file__).read_text(),
    *(path.read_text() for path in Path(__file__).parent.glob("*.py")),
]


def _byte_level(pre_tokenizer: Any) -> Tokenizer:
    """Make a byte-level vocabulary of 600 tokens, learned from the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _parts(tokenizer: Tokenizer) -> tuple[dict[str, int], Any]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _split(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _qwen2() -> Any:
    """Make a tokenizer of transformers' own class, which makes everything but the vocabulary itself."""
    learned = _byte_level(Qwen2Tokenizer().backend_tokenizer.pre_tokenizer)
    vocab, merges = _parts(learned)
    tokenizer = Qwen2Tokenizer(vocab | {"<|endoftext|>": len(vocab)}, merges)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


def _llama3() -> Any:
    """With the pattern of transformers' converter of tiktoken's vocabularies."""
    tokenizer = _byte_level(_split(TikTokenConverter().pattern))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    return tokenizer


def _sentence_piece(kind: Any, specials: list[str], **options: Any) -> Any:
    """Make a vocabulary of whole words and bytes, learned from the corpus, in transformers' class of a
    family.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    tokenizer.train_from_iterator([text[:4000] for text in _CORPUS[:-3]], trainer)
    learned, merges = _parts(tokenizer)
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: i for i, name in enumerate(names)}
    for piece in sorted(learned, key=learned.__getitem__):
        vocab.setdefault(piece, len(vocab))
    return kind(vocab=vocab, merges=merges, **options)


def _llama2() -> Any:
    """With the normalizer of Llama 2's tokenizer.json, which adds a space also before a space, as
    SentencePiece does; transformers' class does not.
    """
    tokenizer = _sentence_piece(LlamaTokenizer, ["<unk>", "<s>", "</s>"], legacy=True, add_bos_token=True)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    return tokenizer


def _gemma() -> Any:
    return _sentence_piece(GemmaTokenizer, ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], add_bos_token=True)


_MADE: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "golden": (lambda: AutoTokenizer.from_pretrained(GOLDEN / "llama"), {"pre": "gpt-2"}),
    "demo": (lambda: AutoTokenizer.from_pretrained(DEMO_DIRECTORY), {"pre": "gpt-2"}),
    "qwen2": (_qwen2, {"pre": "qwen2"}),
    "llama-bpe": (_llama3, {"pre": "llama-bpe", "add_bos_token": False}),
    "llama2": (_llama2, {"model": "llama"}),
    "gemma": (_gemma, {"model": "llama", "add_space_prefix": False}),
}


def _found(tmp_path: Path, keys: Mapping[str, Any]) -> TextCodec:
    path = tmp_path / "model.gguf"
    path.write_bytes(padded(header({key: typed(value) for key, value in keys.items()})))
    tokenizer = find_tokenizer(read_gguf(path))
    assert tokenizer is not None
    return TextCodec(tokenizer)


@pytest.mark.parametrize("name", _MADE)
def test_ids_and_texts_are_those_of_the_tokenizer_that_was_written(tmp_path: Path, name: str) -> None:
    make, keys = _MADE[name]
    theirs = make()
    found = _found(tmp_path, metadata_of(theirs, **keys))
    backend = getattr(theirs, "backend_tokenizer", theirs)
    for text in _CORPUS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False) == ids, text[:50]
        assert found.encode(text) == backend.encode(text).ids
        if text in _TEXTS[:5]:
            assert found.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("name", sorted(_PRE))
def test_patterns_are_those_that_transformers_has_for_the_name(name: str) -> None:
    """transformers reads GGUF files, too, and has a table of its own; names that it lacks have the pattern of
    one that it has, or a parameter of `tokenizers` for them.
    """
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    splits = theirs.GGUF_PRE_TOKENIZER_SPLITS
    pattern = splits.get(_SAME_AS.get(name, name))
    if pattern is None:
        assert name in ("gpt-2", "olmo", "smollm", "starcoder", "refact", "deepseek-v3")
        return
    expected, found = _split(pattern), _pre_tokenizer(_PRE[name])
    for text in _CORPUS:
        assert found.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


_SAME_AS = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe"}
_TINY: Mapping[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|end|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}


def test_templates_and_parts_are_read(tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "plain {{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools {{ messages[0].content }}",
    }
    found = _found(tmp_path, {**_TINY, **templates})
    assert found.template_names == ("default", "tool_use")
    assert found.render_chat([{"role": "user", "content": "ab"}]) == "plain ab"
    assert dict(found.special_tokens) == {"eos_token": "<|end|>"}
    assert found.encode("abb<|end|>") == [2, 1, 3]
    assert found.end_token_ids == {3}


@pytest.mark.parametrize(("architecture", "strips"), [("phi3", True), ("llama", False)])
def test_markers_of_phi3_take_the_spaces_behind_them(tmp_path: Path, architecture: str, strips: bool) -> None:
    """As AddedToken.rstrip of its tokenizer.json, which no key of a GGUF file has. Its <s> takes none."""
    theirs = _llama2()
    theirs.add_tokens(["<|user|>"], special_tokens=True)
    found = _found(tmp_path, metadata_of(theirs, model="llama") | {"general.architecture": architecture})
    assert (found.encode("<|user|> \n hi") == found.encode("<|user|>hi")) is strips
    assert found.encode("<s> hi") != found.encode("<s>hi")


def test_a_file_without_a_tokenizer_has_none() -> None:
    assert find_tokenizer(GgufFile(Path("m.gguf"), {}, {})) is None


_WRONG: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "model": ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
    "pre": ({"pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not supported"),
    "no pre": ({"pre": None}, "tokenizer.ggml.pre is absent"),
    "tokens": ({"tokens": 5}, "tokenizer.ggml.tokens must be of type list"),
    "no tokens": ({"tokens": [], "token_type": []}, "0 types for 0 tokens"),
    "a token": ({"tokens": [1, 2, 3, 4]}, "tokenizer.ggml.tokens must be a list of str"),
    "types": ({"token_type": [1]}, "1 types for 4 tokens"),
    "merge": ({"merges": ["ab"]}, "tokenizer.ggml.merges must have two parts"),
    "merge of no tokens": ({"merges": ["a x"]}, "tokenizer.ggml.tokens makes no tokenizer"),
    "scores": ({"model": "llama", "scores": [0.5]}, "1 scores for 4 tokens"),
    "long piece": (
        {
            "model": "llama",
            "tokens": ["a", "b", "ab", "x" * 10_000],
            "token_type": [1] * 4,
            "scores": [0.5] * 4,
        },
        "token 3 of 10000 characters",
    ),
    "bos": ({"add_bos_token": True}, "tokenizer.ggml.bos_token_id is no token"),
    "bos beyond": ({"add_bos_token": True, "bos_token_id": 99}, "tokenizer.ggml.bos_token_id is no token"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_what_makes_no_tokenizer_is_refused_by_its_key(name: str) -> None:
    changes, message = _WRONG[name]
    changed = {**_TINY, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    keys = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        find_tokenizer(GgufFile(Path("m.gguf"), keys, {}))


def test_a_template_that_is_no_template_is_refused() -> None:
    keys = {**_TINY, "tokenizer.chat_template": "{% if %}"}
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.chat_template is no valid chat template"):
        find_tokenizer(GgufFile(Path("m.gguf"), keys, {}))


_PIECES = st.dictionaries(
    st.text("ab▁é🙂", min_size=1, max_size=6), st.sampled_from([-3.0, -2.5, -1.0, 0.0]), max_size=60
)


@pytest.mark.parametrize("is_native", [True, False])
@given(pieces=_PIECES)
def test_merges_are_all_pairs_of_pieces_that_are_a_piece(is_native: bool, pieces: dict[str, float]) -> None:
    """Native code, and the loop in its place, find them in the order that transformers derives them in."""
    native = library.load() if is_native else None
    with mock.patch.object(library, "loaded", return_value=native):
        found = _merges(pieces)
    pairs = [(left, right) for left in pieces for right in pieces if left + right in pieces]
    assert found == sorted(pairs, key=lambda pair: (-pieces["".join(pair)], -len(pair[0]), *pair))
    distinct = {piece: float(i) for i, piece in enumerate(pieces)}
    with mock.patch.object(library, "loaded", return_value=native):
        assert _merges(distinct) == generate_merges(dict.fromkeys(pieces, 0), distinct)
