"""Tokenizers that are read without transformers are those that transformers reads: class, ids, texts, special
tokens and chats. The tokenizers are those of this repository, and tiny ones in the form of each class
and type of model; the texts are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GemmaTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from penstock.runtime.loading.hub import DEMO_DIRECTORY
from penstock.runtime.text.by_transformers import loaded
from penstock.runtime.text.codec import TextCodec
from penstock.runtime.text.tokenizer import DECLARED, FIXED, LoadedTokenizer, read_tokenizer
from tests.runtime.text.codecs import ALPHABET
from tests.support.goldens import GOLDEN, NAMES
from tests.support.suite.drawing import few

FOLDERS = {"demo": DEMO_DIRECTORY, **{name: GOLDEN / name for name in NAMES}}
TEXTS = (
    "",
    "the cat's 1234 words,\n\n  <|im_end|> \u00e9\u0301 \U0001f600 \u4f60\u597d",
    "<|im_start|>user\nhi",
)
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "What is <b>2 & 2</b>?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "\u00e9"},
]
DECLARATIONS = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "GemmaTokenizerFast",
    "LlamaTokenizerFast",
    "GPT2Tokenizer",
)
REBUILT = ("qwen2", "qwen2_yarn", "qwen3_5", "qwen3_5_moe")
"""Goldens with tokenizers that are not in the form that transformers gives those of their type of model."""
SPECIAL = ("<|endoftext|>", "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|im_end|>")


def by_transformers(folder: Path) -> LoadedTokenizer:
    return loaded(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))


def assert_equal(ours: LoadedTokenizer, theirs: LoadedTokenizer, texts: tuple[str, ...] = TEXTS) -> None:
    assert ours.class_name == theirs.class_name
    assert ours.special_tokens == theirs.special_tokens
    assert ours.token_names == theirs.token_names
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.chat_template == theirs.chat_template
    assert {i: token.__getstate__() for i, token in ours.added_tokens.items()} == {
        i: token.__getstate__() for i, token in theirs.added_tokens.items()
    }
    mine, other = TextCodec(ours), TextCodec(theirs)
    assert mine.end_token_ids == other.end_token_ids
    for text in texts:
        for special in (False, True):
            ids = mine.encode(text, add_special_tokens=special)
            assert ids == other.encode(text, add_special_tokens=special)
            assert ours.decode(ids, special) == theirs.decode(ids, special)


def written(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """Make a checkpoint's folder, as far as its tokenizer goes."""
    model_type = config.pop("model_type", None)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def byte_level(pattern: str | None = None) -> Tokenizer:
    """Make a tokenizer of bytes with one merge, which splits words by this pattern, as Qwen's do."""
    vocab = {c: i for i, c in enumerate(ALPHABET)} | {"th": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        tokenizer.normalizer = normalizers.NFC()
        parts.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Make a tokenizer as Gemma's."""
    words = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), "t", "h", "e", "\u2581", "th", "\u2581th"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("t", "h"), ("\u2581", "th")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def pattern_of(module: str) -> str:
    """Return the pattern by which a class of transformers splits words."""
    found: str = __import__(module, fromlist=["PRETOKENIZE_REGEX"]).PRETOKENIZE_REGEX
    return found


QWEN2, QWEN3_5 = pattern_of(Qwen2Tokenizer.__module__), pattern_of(Qwen3_5Tokenizer.__module__)
BACKENDS: Mapping[str, Callable[[], Tokenizer]] = {
    "plain": byte_level,
    "Qwen2Tokenizer": lambda: byte_level(QWEN2),
    "Qwen3_5Tokenizer": lambda: byte_level(QWEN3_5),
    "GemmaTokenizer": sentencepiece,
}
MODEL_TYPES = ("qwen2", "qwen3", "gemma3_text", "llama", "granite", "qwen3_5")


@pytest.mark.parametrize("name", FOLDERS)
def test_every_tokenizer_of_this_repository(name: str) -> None:
    ours = read_tokenizer(FOLDERS[name])
    if name in REBUILT:
        assert ours is None
        return
    assert ours is not None
    tokenizer = AutoTokenizer.from_pretrained(str(FOLDERS[name]))
    assert_equal(ours, loaded(tokenizer))
    if ours.chat_template:
        chat = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
        assert TextCodec(ours).render_chat(TURNS) == chat


@settings(deadline=None)
@given(text=st.text(max_size=60), name=st.sampled_from(["demo", "gemma3"]))
def test_any_text(text: str, name: str) -> None:
    assert_equal(OURS[name], THEIRS[name], (text,))


OURS = {name: TextCodec.from_pretrained(FOLDERS[name])._tokenizer for name in ("demo", "gemma3")}
THEIRS = {name: by_transformers(FOLDERS[name]) for name in ("demo", "gemma3")}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", few(MODEL_TYPES, ("qwen3", "gemma3_text"), ci=MODEL_TYPES))
def test_each_class_with_a_tokenizer_in_its_form(tmp_path: Path, backend: str, model_type: str) -> None:
    """Of a tokenizer in the form of another class transformers knows what it means, or it is read as here."""
    for declared in DECLARATIONS:
        fields: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "add_bos_token": True}
        folder = written(
            tmp_path, BACKENDS[backend](), model_type=model_type, tokenizer_class=declared, **fields
        )
        ours = read_tokenizer(folder)
        if ours is not None:
            assert_equal(ours, by_transformers(folder))
        elif declared.removesuffix("Fast") in ("TokenizersBackend", "PreTrainedTokenizer"):
            assert model_type in ("qwen2", "qwen3_5"), "transformers need not be asked"


@pytest.mark.parametrize(
    ("model_type", "backend", "declared"),
    [
        ("qwen2", "Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("qwen3", "Qwen2Tokenizer", "Qwen2TokenizerFast"),
        ("qwen3_5", "Qwen3_5Tokenizer", "Qwen2Tokenizer"),
        ("gemma3_text", "GemmaTokenizer", "GemmaTokenizerFast"),
        ("llama", "plain", "PreTrainedTokenizerFast"),
        ("deepseek_v3", "plain", "LlamaTokenizerFast"),
        ("phi3", "plain", "GPT2Tokenizer"),
    ],
)
def test_the_usual_checkpoints_need_no_transformers(
    tmp_path: Path, model_type: str, backend: str, declared: str
) -> None:
    folder = written(
        tmp_path,
        BACKENDS[backend](),
        model_type=model_type,
        tokenizer_class=declared,
        bos_token={"__type": "AddedToken", "content": "<bos>", "lstrip": False},
        eos_token="<eos>",
        image_token="<mask>",
        extra_special_tokens=["<pad>"],
        chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
    )
    ours = read_tokenizer(folder)
    assert ours is not None
    assert_equal(ours, by_transformers(folder))


@pytest.mark.ci
@pytest.mark.parametrize("model_type", sorted(DECLARED | FIXED.keys()))
def test_every_type_of_model(tmp_path: Path, model_type: str) -> None:
    """Which class transformers takes depends on the type: a newer version may take another."""
    for backend in BACKENDS.values():
        for declared in DECLARATIONS:
            written(tmp_path, backend(), model_type=model_type, tokenizer_class=declared, eos_token="<eos>")
            ours = read_tokenizer(tmp_path)
            if ours is not None:
                assert_equal(ours, by_transformers(tmp_path))


def listed(token: AddedToken) -> dict[str, Any]:
    state: dict[str, Any] = token.__getstate__()
    return state


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": None},
        {"tokenizer_class": "LlamaTokenizer", "model_type": "bert"},
        {"auto_map": {"AutoTokenizer": [None, "tokenizer.Own"]}},
        {"split_special_tokens": True},
        {"fix_mistral_regex": True},
        {"fast_tokenizer_files": ["tokenizer.4.0.json"]},
        {"model_specific_special_tokens": {"image_token": "<mask>"}},
        {"image_token": {"content": "<mask>"}},
        {"add_prefix_space": True},
        {"eos_token": "<other>"},
        {"image_token": "<other>"},
        {"extra_special_tokens": ["<other>"]},
        {"extra_special_tokens": {"image_token": "<other>"}},
        {"additional_special_tokens": ["<other>"]},
        {"added_tokens_decoder": {"300": listed(AddedToken("<other>", special=True))}},
        {"added_tokens_decoder": {"257": listed(AddedToken("<|endoftext|>", special=True, lstrip=True))}},
        {"added_tokens_decoder": {"257": {"flags": 1}}},
    ],
)
def test_what_files_do_not_say_alone_is_left_to_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    assert read_tokenizer(written(tmp_path, byte_level(), **plain)) is not None
    assert read_tokenizer(written(tmp_path, byte_level(), **(plain | config))) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"added_tokens": 3}'])
def test_absent_and_damaged_files_are_left_to_transformers(
    tmp_path: Path, file: str, content: str | None
) -> None:
    written(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_text(content)
    assert read_tokenizer(tmp_path) is None


def test_older_files_count_where_no_tokens_are_listed(tmp_path: Path) -> None:
    written(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast", eos_token="<eos>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    ours = read_tokenizer(tmp_path)
    assert ours is not None
    assert ours.special_tokens == {"eos_token": "<|im_end|>"}
    assert_equal(ours, by_transformers(tmp_path))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<other>": 300}))
    assert read_tokenizer(tmp_path) is None


@pytest.mark.parametrize("config", [{"eos_token": "<end>"}, {"image_token": "<end>"}])
def test_a_token_with_a_part_that_is_not_special_is_left_to_transformers(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """transformers makes it special, so that it is no text."""
    backend = byte_level()
    backend.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    written(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast", **config)
    assert read_tokenizer(tmp_path) is None
    codec = TextCodec.from_pretrained(tmp_path)
    assert codec.decode(codec.encode("th<end>")) == "th"


def test_a_token_that_only_the_padding_names_is_left_to_transformers(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_padding(pad_id=257, pad_token="<pad>")
    written(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast")
    assert read_tokenizer(tmp_path) is None
    assert TextCodec.from_pretrained(tmp_path).special_tokens["pad_token"] == "<pad>"
    written(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast", pad_token="<pad>")
    assert read_tokenizer(tmp_path) is not None


def test_a_class_of_gemma_with_another_normalizer_is_left_to_transformers(tmp_path: Path) -> None:
    """There the class, not the file, says how texts are split."""
    backend = sentencepiece()
    written(tmp_path, backend, tokenizer_class=GemmaTokenizer.__name__)
    assert read_tokenizer(tmp_path) is not None
    backend.normalizer = normalizers.Prepend("\u2581")
    written(tmp_path, backend, tokenizer_class=GemmaTokenizer.__name__)
    assert read_tokenizer(tmp_path) is None
