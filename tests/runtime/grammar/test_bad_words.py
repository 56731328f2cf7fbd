"""Bad words of several tokens, compared with a formula that is simple and slow."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.bad_words import MAX_BAD_WORDS, BadWords, bad_word_ids
from penstock.runtime.requests.constraint import mask_words
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.text.codec import TextCodec
from tests.support.schemas import allowed_ids


def allowed(constraint: BadWords, vocab_size: int) -> set[int]:
    mask = np.full(mask_words(vocab_size), 0x5A5A5A5A, np.int32)
    constraint.fill(mask)
    return {int(i) for i in allowed_ids(mask, vocab_size)}


class Only:
    """An inner constraint that allows the same tokens at every step."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = set(token_ids)
        self.accepted: list[int] = []
        self.is_complete = False

    def fill(self, mask) -> None:
        mask[:] = 0
        for i in self.token_ids:
            mask.view(np.uint32)[i // 32] |= np.uint32(1 << i % 32)

    def accept(self, token_ids) -> None:
        self.accepted += token_ids


def test_by_hand():
    words = BadWords([(3, 31), (1, 2, 3), (3, 3), (3, 40)], None, 33)
    everything = set(range(33))
    assert allowed(words, 33) == everything, "no word has begun yet"
    words.accept([3])
    assert allowed(words, 33) == everything - {31, 3}, "token 40 is not in the vocabulary"
    words.accept([1, 2])
    assert allowed(words, 33) == everything - {3}
    words.accept([2])
    assert allowed(words, 33) == everything
    assert not words.is_complete


VOCAB = 5
TOKENS = st.integers(0, VOCAB - 1)


@given(
    st.lists(st.lists(TOKENS, min_size=2, max_size=4), max_size=6),
    st.lists(TOKENS, max_size=25),
    st.none() | st.sets(TOKENS, min_size=1),
)
def test_masks_agree_with_the_formula(words, written, inner):
    constraint = BadWords(words, Only(sorted(inner)) if inner else None, VOCAB)
    candidates = inner or set(range(VOCAB))
    for i in range(len(written) + 1):
        so_far = written[:i]
        fine = {t for t in candidates if not any([*so_far, t][-len(w) :] == w for w in words)}
        assert allowed(constraint, VOCAB) == (fine or candidates)
        if inner is None:
            masks = np.zeros((len(written) - i, 1), np.int32)
            constraint.fill_ahead(masks, written[i:])
            for j, mask in enumerate(masks, i + 1):
                fine = {t for t in range(VOCAB) if not any([*written[:j], t][-len(w) :] == w for w in words)}
                assert set(allowed_ids(mask, VOCAB)) == (fine or set(range(VOCAB)))
        constraint.accept(written[i : i + 1])


def test_the_inner_constraint_accepts_every_token_and_decides_the_end():
    inner = Only([1])
    words = BadWords([(1, 1)], inner, 40)
    words.accept([1])
    words.accept([2, 3])
    assert inner.accepted == [1, 2, 3]
    inner.is_complete = True
    assert words.is_complete


def test_the_grammar_wins(compiler, backend):
    """If only "b" may follow "a", it may; if something else may follow too, "b" may not."""
    a, b = backend.token_to_id("a"), backend.token_to_id("b")
    forced = BadWords([(a, b)], compiler.constraint(Grammar.regex("ab")), 2048)
    forced.accept([a])
    assert allowed(forced, 2048) == {b}
    free = BadWords([(a, b)], compiler.constraint(Grammar.regex("a[bc]")), 2048)
    free.accept([a])
    assert allowed(free, 2048) == {backend.token_to_id("c")}
    ended = BadWords([(a, 2041), (a, 2039)], compiler.constraint(Grammar.regex("a")), 2048)
    ended.accept([a])
    assert allowed(ended, 2048) == {2041, 2039}
    assert ended.is_complete


def test_words_of_one_token_are_left_to_the_bias():
    with pytest.raises(ValueError, match="bias"):
        BadWords([(1,)], None, 10)


@pytest.fixture(scope="module")
def codec(backend) -> TextCodec:
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_words_with_and_without_a_leading_space(codec):
    ids = bad_word_ids(codec, ["rainbow trout", "the", " the", "zq"])
    texts = [codec.decode(sequence) for sequence in ids]
    assert texts == ["rainbow trout", " rainbow trout", "the", " the", "zq", " zq"]
    assert ids == tuple(tuple(codec.encode(text, add_special_tokens=False)) for text in texts)
    assert len(set(ids)) == len(ids)
    assert bad_word_ids(codec, []) == ()


def test_words_that_are_refused(codec):
    with pytest.raises(InvalidRequest) as caught:
        bad_word_ids(codec, ["fine", "", "  ", "x" * 1001])
    assert [v.field for v in caught.value.violations] == [f"sampling.bad_words[{i}]" for i in (1, 2, 3)]
    with pytest.raises(InvalidRequest, match="at most 1000 words"):
        bad_word_ids(codec, ["x"] * (MAX_BAD_WORDS + 1))


class EverythingHasASpace:
    """A tokenizer that puts a space before every text, and that must not be asked for special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(char) for char in " " + text.lstrip(" ")]


def test_a_word_given_twice_counts_once():
    assert bad_word_ids(EverythingHasASpace(), ["a", " a"]) == ((32, 97),)
