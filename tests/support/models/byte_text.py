"""Texts of a tokenizer whose tokens are bytes, without transformers, which takes a second to load.

Servers with the fake engine use them. Tests that need all that a checkpoint's tokenizer does take
`byte_codec` of tests/service/codecs.py, which has the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.runtime.chat.messages import Chat, ChatTurn
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.text.decoder import IncrementalDecoder, PieceDecoder, TokenBytes, byte_level_piece

EOS = 256
VOCAB = 260
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
)
"""Renders a user's "hi" as "u:hi|"."""


def byte_tokenizer(end: str = END, markers: Sequence[str] = ()) -> Tokenizer:
    """Token b is the byte b, 256 is the special end token, and then come `markers`, special ones, too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: byte_level_piece(c)[0])
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end, *markers])
    return tokenizer


class ByteText:
    """What a server needs of a tokenizer; see `penstock.runtime.text.interface.Text`. Chats are rendered as
    CHAT_TEMPLATE says, and callers cannot send a template of their own.
    """

    has_chat_template = True
    template_names: tuple[str, ...] = ()
    template_variables: tuple[str, ...] = ()
    shows_names = False
    chat_template = CHAT_TEMPLATE
    default_template = CHAT_TEMPLATE
    special_tokens: Mapping[str, str] = {"eos_token": END}
    tokenizer_class = "TokenizersBackend"
    max_token_chars = len(END)

    def __init__(self) -> None:
        self.backend = byte_tokenizer()
        self.added_tokens: Mapping[str, int] = {END: EOS}
        self.token_bytes = TokenBytes(_piece, frozenset([EOS]), is_exact=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def render_chat(self, chat: Chat | Sequence[Mapping[str, str]]) -> str:
        if not isinstance(chat, Chat):
            chat = Chat(tuple(ChatTurn(turn["role"], turn["content"]) for turn in chat))
        if chat.template is not None:
            raise InvalidRequest([Violation("chat.chat_template", "this server takes none")])
        if any(turn.role == "system" for turn in chat.messages[1:]):
            raise InvalidRequest([Violation("chat.messages", "the chat template says: system comes first")])
        return "".join(f"{turn.role[0]}:{turn.content}|" for turn in chat.messages)

    def render_turns(self, turns: Sequence[Mapping[str, str]], options: Mapping[str, object]) -> str:
        return "".join(f"{turn['role'][0]}:{turn['content']}|" for turn in turns)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.flush()

    def decoder(
        self,
        *,
        skip_special_tokens: bool = True,
        visible: Set[str] = frozenset(),
        after: Sequence[int] = (),  # a text of bytes loses nothing at its start
    ) -> IncrementalDecoder:
        pieces = {token_id: _piece(token_id) for token_id in range(VOCAB)}
        if skip_special_tokens and END not in visible:
            pieces[EOS] = b""
        return PieceDecoder(pieces)


def _piece(token_id: int) -> bytes:
    if token_id < EOS:
        return bytes([token_id])
    return END.encode() if token_id == EOS else b""
