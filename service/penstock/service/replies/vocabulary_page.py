"""Makes pages of the vocabulary."""

from __future__ import annotations

from penstock.runtime.text.token_bytes import TokenBytes
from penstock.v1 import control_pb2

PAGE_BYTES = 1024 * 1024
"""About the most bytes of a page: gRPC's clients refuse messages above 4 MiB by default, and in JSON bytes
take a third more.
"""
_FIELD_BYTES = 3
"""Bytes around a token in a message."""


def vocabulary_page(known: TokenBytes, page: range, vocab_size: int) -> control_pb2.GetVocabularyResponse:
    """The tokens of the page, or the first of them if all have more than PAGE_BYTES. Takes some milliseconds
    for ten thousand tokens, so it is called in a thread.
    """
    reply = control_pb2.GetVocabularyResponse(
        vocab_size=vocab_size,
        is_exact=known.is_exact,
        dropped_leading_spaces=known.dropped_leading_spaces,
    )
    size = 0
    for token in map(known.of, page):
        size += len(token) + _FIELD_BYTES
        if size > PAGE_BYTES and reply.tokens:
            break
        reply.tokens.append(token)
    end = page.start + len(reply.tokens)
    reply.special_token_ids.extend(i for i in range(page.start, end) if i in known.special)
    if end < vocab_size:
        reply.next_token_id = end
    return reply
