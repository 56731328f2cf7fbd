"""Special tokens around texts and between pairs, as the tokenizers of encoders put them: BERT's with types of
tokens, RoBERTa's without. The expected ids are written by hand.
"""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.prompting.prompts import Truncation
from penstock.runtime.prompting.relevance import pair_ids
from penstock.runtime.prompting.results import fit_inputs, special_around
from penstock.runtime.requests.reader import Reader
from penstock.runtime.text.codec import TextCodec

WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "c": 5, "##a": 6}
CLS, SEP, A, B, C = 1, 2, 3, 4, 5


def codec(single: str, pair: str) -> TextCodec:
    words = Tokenizer(models.WordPiece(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", CLS), ("[SEP]", SEP)]
    words.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=words, cls_token="[CLS]", sep_token="[SEP]"))


@pytest.fixture(scope="module")
def bert() -> TextCodec:
    return codec("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1")


def test_a_pair_has_the_types_of_its_texts(bert: TextCodec) -> None:
    assert bert.encode_pair("a b", "c aa") == ([CLS, A, B, SEP, C, A, 6, SEP], [0, 0, 0, 0, 1, 1, 1, 1])
    typed = Reader(kind="a classifier", reads_whole=True, token_types=2)
    assert pair_ids(bert, typed, "a b", "c", 100) == (CLS, A, B, SEP, 100 + C, 100 + SEP)
    untyped = Reader(kind="a classifier", reads_whole=True)
    roberta = codec("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]")
    assert pair_ids(roberta, untyped, "a b", "c", 100) == (CLS, A, B, SEP, SEP, C, SEP)


def test_special_tokens_stay_around_what_is_cut(bert: TextCodec) -> None:
    reader = Reader(kind="an encoder", reads_whole=True)
    around = special_around(bert, reader)
    assert around == ((CLS,), (SEP,))
    assert special_around(bert, None) == ((), ()), "prompts of decoders are cut as ever"
    long = (CLS, A, B, C, A, B, SEP)

    def cut(truncation: Truncation, room: int = 6) -> tuple[tuple[int, ...], int]:
        (one,) = fit_inputs([long], truncation, room, around)
        return one.token_ids, one.num_truncated

    assert cut(Truncation.RIGHT) == ((CLS, A, B, C, SEP), 2)
    assert cut(Truncation.LEFT) == ((CLS, C, A, B, SEP), 2)
    assert cut(Truncation.MIDDLE) == ((CLS, A, A, B, SEP), 2)
    assert cut(Truncation.RIGHT, room=8) == (long, 0)
    with pytest.raises(InvalidRequest, match="at most 5 tokens, not 7"):
        cut(Truncation.REJECT)
    (ids,) = fit_inputs([(A, B, C, A, B, C)], Truncation.RIGHT, 6, around)
    assert ids.token_ids == (A, B, C, A, B), "token ids are used as they are"


def test_a_tokenizer_without_special_tokens_has_none() -> None:
    assert codec("$A", "$A $B").special_around == ((), ())
