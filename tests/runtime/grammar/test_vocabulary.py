"""The bytes of tokens that llguidance gets are those that `penstock.runtime.text.codec` decodes the tokens
to.
"""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.runtime.errors import ConfigError
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.vocabulary import Vocabulary, pack
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.text.codec import TextCodec
from tests.support.schemas import RandomWriter, allowed_ids


def sentencepiece() -> Tokenizer:
    """Make a tokenizer in the style of Llama 2's: byte tokens, U+2581 for a space, and some added tokens."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["\u2581", "a", "b", "\u2581a", "ab", "é", "\u2581b\u2581a"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", "[TOOL]"])
    tokenizer.add_tokens([AddedToken("    ", normalized=False), AddedToken("<note>", normalized=False)])
    return tokenizer


def test_bytes_are_those_of_the_text(backend, vocabulary):
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend))
    for i, token in enumerate(vocabulary.tokens):
        decoded = codec.decode([i], skip_special_tokens=False)
        assert token.decode(errors="replace") == decoded


def test_sentencepiece_bytes():
    ids = sentencepiece().get_vocab(with_added_tokens=True)
    vocabulary = Vocabulary.from_tokenizer(sentencepiece(), 300, [2])
    assert vocabulary.tokens[ids["\u2581b\u2581a"]] == b" b a"
    assert vocabulary.tokens[ids["<0xC3>"]] == b"\xc3"
    assert vocabulary.tokens[ids["é"]] == "é".encode()
    assert vocabulary.tokens[ids["    "]] == b"    "
    assert vocabulary.special == {ids[name] for name in ("<unk>", "<s>", "</s>", "[TOOL]", "<note>")}
    assert vocabulary.tokens[-1] == b""


def test_an_added_run_of_spaces_is_text():
    tokenizer = sentencepiece()
    compiler = GrammarCompiler.from_tokenizer(tokenizer, vocab_size=300, eos_token_ids=[2])
    ids = tokenizer.get_vocab(with_added_tokens=True)
    constraint = compiler.constraint(Grammar.regex("a {4}b"))
    constraint.accept([ids["a"], ids["    "], ids["b"]])
    assert constraint.is_complete
    compiler.close()


def test_a_vocabulary_larger_than_the_tokenizer(backend):
    """Ids that only pad the logits are never allowed, even if a grammar allows any token."""
    vocabulary = Vocabulary.from_tokenizer(backend, 2100, [2041, 2039])
    compiler = GrammarCompiler(vocabulary, CompilerConfig(time_limit_s=60.0))
    mask = np.zeros(66, np.int32)
    for grammar in (Grammar.ebnf("start: <[*]> <[2060]>"), Grammar.regex("(?s:.*)"), Grammar.json_object()):
        constraint = compiler.constraint(grammar)
        constraint.fill(mask)
        assert allowed_ids(mask, 2112).max() < 2048
    writer = RandomWriter(vocabulary.tokens, vocabulary.eos_token_ids)
    walk = writer.write(compiler.constraint(Grammar.regex("[a-z ]{5,20}")), 0)
    assert walk.complete
    compiler.close()


def test_a_vocabulary_smaller_than_the_tokenizer(backend):
    """The model has no logits for the other tokens, so texts must be written without them."""
    vocabulary = Vocabulary.from_tokenizer(backend, 300, [255])
    assert len(vocabulary.tokens) == 300
    compiler = GrammarCompiler(vocabulary, CompilerConfig(time_limit_s=60.0))
    walk = RandomWriter(vocabulary.tokens, [255]).write(
        compiler.constraint(Grammar.choice(["hello world"])), 0
    )
    assert walk.complete
    assert b"".join(vocabulary.tokens[i] for i in walk.token_ids if i != 255) == b"hello world"
    compiler.close()


def test_end_tokens_need_not_be_in_the_tokenizer(backend):
    compiler = GrammarCompiler.from_tokenizer(
        backend, vocab_size=2100, eos_token_ids=[2041, 2090, 5000], config=CompilerConfig(time_limit_s=60.0)
    )
    constraint = compiler.constraint(Grammar.regex("a?"))
    mask = np.zeros(66, np.int32)
    constraint.fill(mask)
    assert set(allowed_ids(mask, 2100)) == {backend.token_to_id("a"), 2041, 2090}
    constraint.accept([2090])
    assert constraint.is_complete
    compiler.close()


def test_vocabularies_that_are_refused(backend):
    with pytest.raises(ConfigError, match="end token"):
        Vocabulary.from_tokenizer(backend, 2048, [])
    with pytest.raises(ConfigError, match="end token"):
        Vocabulary.from_tokenizer(backend, 2048, [2048, -1])
    words = Tokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="stand for bytes"):
        Vocabulary.from_tokenizer(words, 2, [1])


def test_pack():
    assert pack([0, 31, 33], 40).tolist() == [1 - 2**31, 2]
    assert pack([], 64).tolist() == [0, 0]
    assert pack(range(33), 33).tolist() == [-1, 1]
