"""Token ids to text, a few tokens at a time, never splitting a character.

Nearly every checkpoint has one of two decoders, both of which map each token to bytes:

- byte-level BPE (GPT-2, Llama 3, Qwen, GPT-OSS): each character of a token stands for one byte;
- SentencePiece with byte fallback (Llama 2, Mistral, Gemma, Phi 3): U+2581 is a space, `<0xE9>` is a byte,
  and one leading space may be dropped from the whole text.

For these the bytes go through Python's incremental UTF-8 decoder, which keeps an unfinished character back
and replaces invalid bytes as Unicode recommends (one U+FFFD per maximal subpart, as Rust and WHATWG do), as
soon as they cannot be completed. `tokenizers.decoders.DecodeStream` was not taken: it holds everything back
while the tail is invalid, and cannot be flushed at the end.

Any other decoder (WordPiece, Metaspace, ...) is run by Hugging Face on a window of tokens.

`TokenBytes` has the bytes that single tokens stand for, for those who show tokens or join them without a
tokenizer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class TokenBytes:
    """What tokens of one tokenizer stand for."""

    of: Callable[[int], bytes]
    """The bytes of a token: of a special one those of its name, and none of an id that the tokenizer does not
    have.
    """
    special: frozenset[int]
    """The tokens that a text may leave out, as end tokens."""
    is_exact: bool
    """Whether the bytes of any tokens, joined, are their text, but for `dropped_leading_spaces`. Else a token
    has the bytes of the text that it has alone.
    """
    dropped_leading_spaces: int = 0
    """How many spaces a text loses at its start, if it begins with so many."""


class IncrementalDecoder(Protocol):
    """Text of the tokens so far, handed out piece by piece; joined, the pieces are the whole text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens made certain."""
        ...

    def flush(self) -> str:
        """Return the rest of the text, when there are no more tokens. An unfinished character becomes
        U+FFFD.
        """
        ...


def _byte_of_char() -> dict[str, int]:
    """Invert GPT-2's printable alphabet: printable Latin-1 is itself, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTES = _byte_of_char()


def byte_level_piece(token: str) -> bytes:
    """Return the bytes of a byte-level token; an added token with a character outside the alphabet stands for
    itself.
    """
    try:
        return bytes(_BYTES[c] for c in token)
    except KeyError:
        return token.encode()


def sentencepiece_piece(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: `<0xE9>` is one byte, U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How tokens become bytes, and how many leading spaces the whole text loses."""

    piece: Callable[[str], bytes]
    strip_leading_spaces: int = 0


def piece_rule(decoder: dict[str, Any] | None) -> PieceRule | None:
    """Return the rule for a decoder as tokenizer.json spells it; None if its tokens do not each stand for
    bytes.
    """
    if decoder is None:
        return None
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [part["type"] for part in parts]
    if names == ["ByteLevel"]:
        return PieceRule(byte_level_piece)
    if names[:3] != ["Replace", "ByteFallback", "Fuse"] or names[3:] not in ([], ["Strip"]):
        return None
    if parts[0]["pattern"] != {"String": "\u2581"} or parts[0]["content"] != " ":
        return None
    if names[3:] and (parts[3]["content"] != " " or parts[3]["stop"] != 0):
        return None
    return PieceRule(sentencepiece_piece, parts[3]["start"] if names[3:] else 0)


def decoder_state(backend: Any) -> dict[str, Any] | None:
    """Return the decoder of a `tokenizers.Tokenizer` as a dict; None if it has none."""
    decoder = backend.decoder
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state


class Pieces(dict[int, bytes]):
    """Maps token ids to their bytes. Each is looked up when it is first asked for."""

    def __init__(self, look_up: Callable[[int], bytes]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._look_up(token_id)
        return piece


def left_to_strip(strip_leading_spaces: int, pieces: Iterable[bytes]) -> int:
    """Tell how many of the leading spaces that a text loses are not in these pieces, with which it begins."""
    left = strip_leading_spaces
    for piece in pieces if left else ():
        if len(piece) >= left or piece.strip(b" "):
            return 0
        left -= len(piece)
    return left


class PieceDecoder:
    """Joins the bytes of tokens and hands out whole characters."""

    def __init__(self, pieces: Mapping[int, bytes], strip_leading_spaces: int = 0) -> None:
        self._piece_of = pieces.__getitem__
        self._strip = strip_leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True
        """Whether no character is unfinished."""

    def push(self, token_ids: Sequence[int]) -> str:
        data = b"".join(map(self._piece_of, token_ids))
        text = self._whole(data) if self._is_between else None
        if text is None:
            text = self._utf8.decode(data)
            self._is_between = not self._utf8.getstate()[0]
        return self._strip_start(text) if self._strip else text

    @staticmethod
    def _whole(data: bytes) -> str | None:
        """Decode the text of bytes that are whole characters, as nearly all are; None if they are not. This
        takes a third of the time of the incremental decoder.
        """
        try:
            return data.decode()
        except UnicodeDecodeError:
            return None

    def flush(self) -> str:
        return self._strip_start(self._utf8.decode(b"", final=True))

    def _strip_start(self, text: str) -> str:
        if not self._strip or not text:
            return text
        spaces = min(self._strip, len(text) - len(text.lstrip(" ")))
        self._strip = self._strip - spaces if spaces == len(text) else 0
        return text[spaces:]


class WindowDecoder:
    """Decodes the last tokens again with each new one, and hands out what was added.

    The window starts with tokens whose text is handed out already. A decoder that treats the first token
    specially (Metaspace, WordPiece) does so in both decodings, and the difference is the text of the new
    tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        """Let the text go on from that of the tokens `after`."""
        self._decode = decode
        size = 1
        while size < len(after) and not decode(after[-size:]):
            size *= 2
        self._window = list(after[-size:])
        self._sent = len(self._window)
        """How many tokens at the start of the window have been handed out."""

    def push(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        before, after = self._texts()
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._window = self._window[self._sent :]
        self._sent = len(self._window)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._texts()
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._window[: self._sent]), self._decode(self._window)
