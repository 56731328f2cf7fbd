"""Repeats prompts in the answers to them, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.client import PromptInfo, Vocabulary
from penstock.openai.answers.large import Columns, completion_columns
from penstock.openai.failures import ApiError

MOST_CHARACTERS: Final = 4 << 20
"""How many characters of prompts an answer may repeat, in all of its choices together. A token id counts as
the bytes of its token.
"""

_SLICE: Final = 65_536
"""How many token ids are counted without a break."""

Sent = str | Sequence[int]
"""A prompt as its caller sent it, which is a text or token ids."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """What the choices of one prompt begin with."""

    text: str
    logprobs: Columns | None


@dataclass(frozen=True, slots=True)
class Echo:
    """How the choices of a completion begin with their prompts."""

    prompts: Sequence[Sent]
    vocabulary: Vocabulary | None
    """None only where all prompts are texts, of which nothing is cut, without log-probabilities."""
    has_logprobs: bool = False
    with_special: bool = False
    """Whether the text of token ids has special tokens."""
    is_all: bool = False
    """Whether the prompts are all that is told, so that what the server added is left out."""

    async def check(self, num_choices: int) -> None:
        """Raise ApiError if all choices together would repeat too much. Token ids are counted in slices,
        between which the event loop serves others.
        """
        repeated = 0
        for prompt in self.prompts:
            if isinstance(prompt, str):
                repeated += len(prompt)
                continue
            for first in range(0, len(prompt), _SLICE):
                repeated += self._num_bytes(prompt[first : first + _SLICE])
                await asyncio.sleep(0)
        if num_choices * repeated > MOST_CHARACTERS:
            message = (
                f"The answer would repeat more than {MOST_CHARACTERS} characters of prompts: "
                "leave echo out, or ask for fewer choices."
            )
            raise ApiError(400, message, param="echo", code="response_too_large")

    async def repeated(self, number: int, prompt: PromptInfo) -> Repeated:
        """What the choices of this prompt begin with. `number` is its index. A text is repeated as it was
        sent, unless the server has cut it: then, as that of token ids, it is the text of its tokens.
        """
        sent = self.prompts[number]
        if isinstance(sent, str) and not prompt.truncated_tokens:
            text = sent
        else:
            assert self.vocabulary is not None
            text = self.vocabulary.text_of(prompt.token_ids, with_special=self.with_special)
        if not self.has_logprobs:
            return Repeated(text, None)
        assert self.vocabulary is not None
        assert prompt.logprobs is not None, "the server was asked for them"
        columns = await completion_columns(prompt.logprobs, prompt.token_ids, self.vocabulary, prompt=text)
        return Repeated(text, columns)

    def _num_bytes(self, token_ids: Sequence[int]) -> int:
        """How many bytes the tokens have. The server refuses ids that there are not, so they have none."""
        assert self.vocabulary is not None
        tokens = self.vocabulary.tokens
        return sum(len(tokens[i]) for i in token_ids if 0 <= i < len(tokens))
