"""Tokenizers of each kind of decoder, and Hugging Face's decode of their tokens, the witness of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.runtime.text.codec import TextCodec
from penstock.runtime.text.decoder import byte_level_piece

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3"
EOS = 256
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: byte_level_piece(c)[0])


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer in which token b is the byte b, 256 the special end token, and 257 an ordinary added
    token with a space in it.
    """
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<a b>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentencepiece_tokenizer(strip: bool) -> PreTrainedTokenizerFast:
    """Tokens 0 to 255 are byte tokens, and words follow. It decodes as Llama 2 does (with `strip`) or as
    Gemma does (without).
    """
    words = ["\u2581", "\u2581the", "\u2581\u2581", "cat", "\u00e9", "\U0001f600", "<0xZZ>"]
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "##s": 3, ".": 4, "do": 5, "not": 6, "[SEP]": 7}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {w: i for i, w in enumerate(["<unk>", "\u2581the", "\u2581cat", "s", "\u2581", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


WITNESSES: Mapping[str, Any] = {
    "bytes": bytes_tokenizer(),
    "golden": AutoTokenizer.from_pretrained(str(GOLDEN)),
    "wordpiece": wordpiece_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "llama2": sentencepiece_tokenizer(strip=True),
    "gemma": sentencepiece_tokenizer(strip=False),
}
CODECS = {name: TextCodec(tokenizer) for name, tokenizer in WITNESSES.items() if name != "golden"}
CODECS["golden"] = TextCodec.from_pretrained(GOLDEN)
BYTES = CODECS["bytes"]
VOCABULARY = {"bytes": 260, "golden": 512, "wordpiece": 8, "metaspace": 6, "llama2": 263, "gemma": 263}


def reference(name: str, ids: list[int], skip: bool) -> str:
    text = WITNESSES[name].decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
