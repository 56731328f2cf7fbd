"""What callers of the engine need of a model's tokenizer and chat template. It loads no transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

from tokenizers import Tokenizer

from penstock.runtime.chat.messages import Chat
from penstock.runtime.text.decoder import IncrementalDecoder, TokenBytes


class Text(Protocol):
    """A tokenizer with its chat template; `codec.TextCodec`, which says more of each part, is that of a
    checkpoint. Any thread may use it.
    """

    @property
    def max_token_chars(self) -> int | None:
        """No token stands for more characters than this; None if that is not known."""
        ...

    @property
    def backend(self) -> Tokenizer | None:
        """Hugging Face's fast tokenizer; None if it is not one of those."""
        ...

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template."""
        ...

    @property
    def template_names(self) -> tuple[str, ...]:
        """The names of the templates, if there are several; else empty."""
        ...

    @property
    def chat_template(self) -> str:
        """The template, or all of them joined; empty if there is none."""
        ...

    @property
    def default_template(self) -> str:
        """The template, or the one named "default"; empty if there is none."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The special tokens that have a part, by its name, such as "eos_token"."""
        ...

    @property
    def tokenizer_class(self) -> str:
        """The class that loads the tokenizer in Hugging Face transformers."""
        ...

    @property
    def template_variables(self) -> tuple[str, ...]:
        """The variables of the templates that a request may set."""
        ...

    @property
    def shows_names(self) -> bool:
        """Whether the model's own template shows the model who speaks."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Text to id, for the tokens besides the vocabulary."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts that are read together, with special tokens, and the type of each
        token. UnsupportedFeature where the tokenizer cannot say.
        """
        ...

    @property
    def special_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens before and behind a text."""
        ...

    def render_chat(self, chat: Chat | Sequence[Mapping[str, str]]) -> str:
        """Render the prompt that asks for the assistant's next turn. Raises InvalidRequest."""
        ...

    def render_turns(self, turns: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> str:
        """Return what the model's own template makes of turns, which may have roles that no conversation has.
        Raises InvalidRequest.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens."""
        ...

    def decoder(
        self,
        *,
        skip_special_tokens: bool = True,
        visible: Set[str] = frozenset(),
        after: Sequence[int] = (),
    ) -> IncrementalDecoder:
        """Make a decoder for one sequence of tokens. `visible` are special tokens that have text all the
        same. The text goes on from that of the tokens `after`.
        """
        ...
