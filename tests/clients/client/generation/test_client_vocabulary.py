"""The pages of a vocabulary become one value, in both clients."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import AsyncClient, Client, ProtocolError, Vocabulary
from penstock.v1 import control_pb2

WHOLE = Vocabulary(
    tokens=(b"<s>", b"\xe2\x82", b"\xac", b"", b"</s>"),
    special_token_ids=frozenset({0, 4}),
    is_exact=True,
    dropped_leading_spaces=1,
)


def page(tokens: list[bytes], size: int = 5, **fields: Any) -> control_pb2.GetVocabularyResponse:
    return control_pb2.GetVocabularyResponse(
        tokens=tokens, vocab_size=size, is_exact=True, dropped_leading_spaces=1, **fields
    )


FIRST = page([b"<s>", b"\xe2\x82"], special_token_ids=[0], next_token_id=2)


@pytest.fixture
def pages(server: Any) -> dict[int, control_pb2.GetVocabularyResponse]:
    told = {
        0: FIRST,
        2: page([b"\xac"], next_token_id=3),
        3: page([b"", b"</s>"], special_token_ids=[4]),
    }
    server.vocabulary = told
    return told


async def test_pages_are_joined(server: Any, pages: Any) -> None:
    with Client(server.addr) as client:
        assert client.vocabulary(metadata={"authorization": "Bearer x"}) == WHOLE
    async with AsyncClient(server.addr) as client:
        assert await client.vocabulary() == WHOLE
    assert [call.first_token_id for call in server.calls] == [0, 2, 3, 0, 2, 3]
    assert [sent.get("authorization") for sent in server.metadata[:3]] == ["Bearer x"] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        page([], next_token_id=2),
        page([b"a"], next_token_id=4),
        page([b"a"]),
        page([b"a", b"b", b"c", b"d"]),
        page([b"a"], size=3),
        page([b"a", b"b"], size=4),
    ],
    ids=["empty", "a gap", "an early end", "too many", "an end of another size", "another size"],
)
async def test_pages_that_do_not_join(server: Any, pages: Any, wrong: Any) -> None:
    """So it is if a server of another model answers the second call."""
    pages[2] = wrong
    with Client(server.addr) as client, pytest.raises(ProtocolError, match="do not join"):
        client.vocabulary()
