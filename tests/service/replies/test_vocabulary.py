"""GetVocabulary: pages of the bytes of tokens, as a client joins them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.text.decoder import TokenBytes
from penstock.service.replies.messages import PAGE_BYTES, vocabulary_page
from penstock.v1 import control_pb2
from tests.service.codecs import QWEN_VOCAB, qwen_codec
from tests.service.rig import Rig, failure_of, fake, serving, until
from tests.support.models.byte_text import EOS

QWEN = [bytes([b]) for b in range(256)] + [
    b"<|end|>",
    b"<think>",
    b"</think>",
    b"<tool_call>",
    b"</tool_call>",
]


async def ask(rig: Rig, **fields: Any) -> control_pb2.GetVocabularyResponse:
    reply: control_pb2.GetVocabularyResponse = await rig.control.GetVocabulary(
        control_pb2.GetVocabularyRequest(**fields)
    )
    return reply


async def pages_of(rig: Rig, **fields: Any) -> list[control_pb2.GetVocabularyResponse]:
    """All pages, from the first one on."""
    pages = [await ask(rig, **fields)]
    while pages[-1].HasField("next_token_id"):
        pages.append(await ask(rig, first_token_id=pages[-1].next_token_id, **fields))
    return pages


@pytest.mark.parametrize(("size", "num_pages"), [({}, 1), ({"max_tokens": 100}, 3), ({"max_tokens": 88}, 3)])
async def test_pages_join_to_the_whole_vocabulary(size: dict[str, int], num_pages: int) -> None:
    """The model has three tokens more than its tokenizer."""
    async with serving(fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB)) as rig:
        pages = await pages_of(rig, **size)
    assert len(pages) == num_pages
    assert [token for page in pages for token in page.tokens] == [*QWEN, b"", b"", b""]
    assert [i for page in pages for i in page.special_token_ids] == [EOS, 257, 258, 259, 260]
    assert {page.vocab_size for page in pages} == {QWEN_VOCAB}
    assert {(page.is_exact, page.dropped_leading_spaces) for page in pages} == {(True, 0)}


async def test_a_page_may_begin_anywhere() -> None:
    async with serving(fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB)) as rig:
        page = await ask(rig, first_token_id=255, max_tokens=3)
    assert (list(page.tokens), list(page.special_token_ids)) == (QWEN[255:258], [256, 257])
    assert page.next_token_id == 258


def test_a_page_of_long_tokens_has_fewer_and_at_least_one() -> None:
    """No page is larger than gRPC's clients take by default, unless one token alone is."""
    third = PAGE_BYTES // 3
    names = [letter * third for letter in (b"a", b"b", b"c", b"d", b"e")] + [b"f" * 2 * PAGE_BYTES, b"g"]
    known = TokenBytes(names.__getitem__, frozenset(), is_exact=True)
    pages = [vocabulary_page(known, range(7), 7)]
    while pages[-1].HasField("next_token_id"):
        pages.append(vocabulary_page(known, range(pages[-1].next_token_id, 7), 7))
    assert [len(page.tokens) for page in pages] == [2, 2, 1, 1, 1]
    assert [token for page in pages for token in page.tokens] == names


@pytest.mark.parametrize(("is_exact", "dropped"), [(True, 1), (False, 0)])
def test_what_the_bytes_mean_is_told(is_exact: bool, dropped: int) -> None:
    page = vocabulary_page(TokenBytes(lambda i: b"x", frozenset({1}), is_exact, dropped), range(2), 2)
    assert (page.is_exact, page.dropped_leading_spaces) == (is_exact, dropped)
    assert list(page.special_token_ids) == [1]


async def test_what_is_out_of_range_is_named() -> None:
    async with serving(fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB)) as rig:
        failure = await failure_of(ask(rig, first_token_id=QWEN_VOCAB, max_tokens=0))
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert failure.violations == {
        "first_token_id": "must be below the vocabulary size 264, not 264",
        "max_tokens": "must be from 1 to 32768, not 0",
    }


async def test_a_page_counts_as_waiting_until_it_has_left() -> None:
    async with serving(fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB)) as rig:
        budget = rig.serving.budget
        share = budget.hold(budget.most)
        failure = await failure_of(ask(rig))
        assert failure.reason == "BUSY"
        share.close()
        await ask(rig)
        await until(lambda: budget.used == 0)
