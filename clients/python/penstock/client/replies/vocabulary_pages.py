"""Joins the pages of a vocabulary."""

from __future__ import annotations

from penstock.client.errors import ProtocolError
from penstock.client.values.server_values import Vocabulary
from penstock.v1 import control_pb2


class VocabularyPages:
    """The pages so far, and which one comes next."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []
        self._special: list[int] = []
        self._last: control_pb2.GetVocabularyResponse | None = None

    def next_request(self) -> control_pb2.GetVocabularyRequest | None:
        """What to ask for; None where all pages are here."""
        if self._last is not None and not self._last.HasField("next_token_id"):
            return None
        return control_pb2.GetVocabularyRequest(first_token_id=len(self._tokens))

    def add(self, page: control_pb2.GetVocabularyResponse) -> None:
        """Take the page that was asked for. Raises ProtocolError if it does not follow the one before it, as
        when another server has taken the place of the first one meanwhile.
        """
        before = self._last or page
        self._tokens += page.tokens
        end = len(self._tokens)
        expected = page.next_token_id if page.HasField("next_token_id") else page.vocab_size
        if not page.tokens or end != expected or page.vocab_size != before.vocab_size:
            raise ProtocolError.local(
                f"the pages of the vocabulary do not join: {end} tokens, then {expected}"
            )
        self._special += page.special_token_ids
        self._last = page

    def joined(self) -> Vocabulary:
        """The whole vocabulary, once all pages are here."""
        assert self._last is not None, "there is at least one page"
        return Vocabulary(
            tokens=tuple(self._tokens),
            special_token_ids=frozenset(self._special),
            is_exact=self._last.is_exact,
            dropped_leading_spaces=self._last.dropped_leading_spaces,
        )
