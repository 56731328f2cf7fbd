"""Converts which page of the vocabulary a caller asks for."""

from __future__ import annotations

from penstock.service.requests.convert_params import Violations
from penstock.service.requests.support import check_supported
from penstock.v1 import control_pb2

MOST_TOKENS = 32_768


def to_page(message: control_pb2.GetVocabularyRequest, vocab_size: int) -> range:
    """Check and convert the request to the ids of the tokens that the page may have, at least one. Raises
    UnsupportedFeature and InvalidRequest.
    """
    check_supported(message)
    bad = Violations()
    first = message.first_token_id
    if first >= vocab_size:
        bad.add("first_token_id", f"must be below the vocabulary size {vocab_size}, not {first}")
    most = message.max_tokens if message.HasField("max_tokens") else MOST_TOKENS
    if not 1 <= most <= MOST_TOKENS:
        bad.add("max_tokens", f"must be from 1 to {MOST_TOKENS}, not {most}")
    bad.raise_if_any()
    return range(first, min(first + most, vocab_size))
