"""Text at the edge of the engine: encodes prompts, renders chats and decodes tokens.

The engine itself sees token ids only. Callers know `TextCodec` as `interface.Text`. A tokenizer comes from
`tokenizer`, which reads its files, or from `by_transformers`, which is imported only where that must do it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from penstock.runtime.chat.messages import Chat, ChatTurn
from penstock.runtime.chat.template import ChatTemplates, render, render_here, render_turns
from penstock.runtime.chat.template_reading import check_template, variables_of
from penstock.runtime.chat.template_sandbox import TemplateFailed, TemplateSandbox
from penstock.runtime.chat.tool_formats import harmony
from penstock.runtime.errors import ConfigError, InvalidRequest, UnsupportedFeature
from penstock.runtime.model_files import check_downloaded, read_json_object
from penstock.runtime.text.decoder import (
    IncrementalDecoder,
    PieceDecoder,
    Pieces,
    TokenBytes,
    WindowDecoder,
    decoder_state,
    left_to_strip,
    piece_rule,
)
from penstock.runtime.text.tokenizer import (
    CONFIG,
    FILE,
    FURTHER_TEMPLATES,
    TEMPLATE,
    LoadedTokenizer,
    read_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "The answer is forty-two."


def end_token_ids(tokenizer: LoadedTokenizer, templates: ChatTemplates) -> frozenset[int]:
    """Return the tokens that end a text or a turn: the tokenizer's own end token, and the one that the
    model's chat template writes directly after what an assistant has said. In Harmony, where an answer is one
    of several messages, they are the markers after the last of them.

    A checkpoint may say so nowhere else. With the end tokens of its configuration alone, which may be those
    of the model that it was trained from, its model would go on after its turn.
    """
    found = frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
    template = templates.default
    if not template:
        return found
    tokens = {str(token): i for i, token in tokenizer.added_tokens.items()}
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return found | {tokens[end] for end in (harmony.CALL, harmony.RETURN) if end in tokens}
    after = _written_after_an_answer(templates)
    longest = max(
        ((len(token), i) for token, i in tokens.items() if after.startswith(token)),
        default=None,
    )
    return found if longest is None else found | {longest[1]}


def _written_after_an_answer(templates: ChatTemplates) -> str:
    """Return what the template writes after a conversation's last words, if they are the assistant's; ""
    where it does not take such a conversation.
    """
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_here(
            {
                **templates.special_tokens,
                "messages": turns,
                "chat_template": templates.default,
                "add_generation_prompt": False,
            }
        )
    except TemplateFailed:
        return ""
    return text.rpartition(_ANSWER)[2]


TOKENIZER_FILES = (FILE, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_OLDER_TEMPLATE = "chat_template.json"
_OTHER_FILES = (
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    TEMPLATE,
    _OLDER_TEMPLATE,
)


def _load(folder: Path) -> LoadedTokenizer:
    """Load the tokenizer of a folder with its chat templates. ConfigError, which names the file as far as it
    can be told, if one of its files is damaged.
    """
    files = [folder / name for name in (*TOKENIZER_FILES, *_OTHER_FILES)]
    for file in [*files, *(folder / FURTHER_TEMPLATES).glob("*.jinja")]:
        check_downloaded(file)
    tokenizer = read_tokenizer(folder) or _by_transformers(folder, files)
    older = folder / _OLDER_TEMPLATE
    if older.is_file() and not (folder / TEMPLATE).is_file():
        template = read_json_object(older).get("chat_template")
        if not isinstance(template, str):
            raise ConfigError(f"{older} must have the field chat_template, a text")
        tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    own = tokenizer.chat_template
    for name, template in own.items() if isinstance(own, Mapping) else [("default", own)] if own else []:
        try:
            check_template(template)
        except Exception as error:  # see `check_template`
            file = _file_of_template(folder, name)
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(f"{file}: the chat template is not valid{line}: {error}") from error
    return tokenizer


def _by_transformers(folder: Path, files: Sequence[Path]) -> LoadedTokenizer:
    """Have transformers load the tokenizer, which takes a second to import. `files`: those that it may read.
    ConfigError if it cannot.
    """
    from penstock.runtime.text import by_transformers  # noqa: PLC0415  # a second, which few need

    try:
        return by_transformers.load(folder)
    except Exception as error:  # it may raise anything
        there = [file for file in files if file.exists()]
        for file in there:
            if file.suffix == ".json":
                read_json_object(file)
        names = ", ".join(file.name for file in there)
        raise ConfigError(f"{folder}: the tokenizer cannot be loaded from {names}: {error!r}") from error


def _file_of_template(folder: Path, name: str) -> Path:
    """Tell where the template of this name is read from."""
    places = [folder / FURTHER_TEMPLATES / f"{name}.jinja"]
    if name == "default":
        places += [folder / TEMPLATE, folder / _OLDER_TEMPLATE]
    return next((place for place in places if place.is_file()), folder / CONFIG)


class TextCodec:
    """A checkpoint's tokenizer and chat template. Thread-safe: encoding may run in any thread."""

    def __init__(self, tokenizer: LoadedTokenizer | PreTrainedTokenizerBase) -> None:
        """`tokenizer` may be one of transformers', too."""
        if not isinstance(tokenizer, LoadedTokenizer):
            from penstock.runtime.text import by_transformers  # noqa: PLC0415  # as above

            tokenizer = by_transformers.loaded(tokenizer)
        self._tokenizer = tokenizer
        self._templates = ChatTemplates(tokenizer.chat_template, tokenizer.special_tokens)
        self._backend: Any = tokenizer.backend
        self._rule = None if self._backend is None else piece_rule(decoder_state(self._backend))
        self._special = frozenset(
            i for i, token in tokenizer.added_tokens.items() if getattr(token, "special", True)
        )
        self._pieces = Pieces(self._piece)
        self._shown: dict[frozenset[int], Pieces] = {frozenset(): self._pieces}
        """For each set of hidden tokens the pieces of the others. There are few sets: a model's special
        tokens, without those that a form of chat makes visible."""
        self.max_token_chars = self._longest_token()
        """No token stands for more characters than this; None if that is not known.

        So a prompt that is longer than the context times this number is too long, and need not be tokenized
        to see it."""
        self._sandbox = TemplateSandbox()

    def _longest_token(self) -> int | None:
        """Compute the longest token at the start, because it takes a tenth of a second, for which the first
        request would hold up all others.
        """
        if self._rule is None:
            return None
        if self._tokenizer.longest_token is not None:
            return self._tokenizer.longest_token
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> TextCodec:
        """Read the tokenizer of a checkpoint folder. ConfigError if there is none, or if it or its chat
        template cannot be read.
        """
        return cls(_load(Path(folder)))

    @classmethod
    def find(cls, folder: str | Path) -> TextCodec | None:
        """Read the tokenizer of a checkpoint folder; None if the folder has none: the server then takes
        token ids only. ConfigError if it cannot be read.
        """
        if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            return None
        return cls.from_pretrained(folder)

    @property
    def backend(self) -> Tokenizer | None:
        """The `tokenizers.Tokenizer` underneath; None if the tokenizer is not one of Hugging Face's fast
        ones.
        """
        return self._tokenizer.backend

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens."""
        if self._rule is None:
            return TokenBytes(
                lambda i: self._tokenizer.decode([i], False).encode(), self._special, is_exact=False
            )
        return TokenBytes(self._piece, self._special, True, self._rule.strip_leading_spaces)

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end a text or a turn, by the tokenizer and the model's own template."""
        return end_token_ids(self._tokenizer, self._templates)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._templates.own)

    @property
    def template_names(self) -> tuple[str, ...]:
        """The names of the model's templates, if it has several; else empty."""
        return self._templates.names

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens that are spelt out in it are recognised, as Hugging
        Face does.
        """
        if self._tokenizer.encode is not None:
            return self._tokenizer.encode(text, add_special_tokens)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts that are read together, with special tokens, and the type of each
        token. UnsupportedFeature where the tokenizer is not one of Hugging Face's fast ones.
        """
        if self._tokenizer.encode is not None:
            raise UnsupportedFeature(["documents"], "the tokenizer does not put two texts together")
        encoding = self._backend.encode(first, second)
        return list(encoding.ids), list(encoding.type_ids)

    @cached_property
    def special_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens before and behind a text."""
        inner, whole = (tuple(self.encode("a", add_special_tokens=special)) for special in (False, True))
        for at in range(len(whole) - len(inner) + 1):
            if whole[at : at + len(inner)] == inner:
                return whole[:at], whole[at + len(inner) :]
        return (), ()

    @property
    def chat_template(self) -> str:
        """The model's template, for `chat.parser.detect`: if it has several, all of them joined; empty if it
        has none.
        """
        return "\n".join(self._templates.texts)

    @property
    def default_template(self) -> str:
        """The model's template, or the one named "default" if it has several; empty if there is none."""
        return self._templates.default

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The special tokens that have a part, by its name, such as "eos_token"."""
        return dict(self._tokenizer.special_tokens)

    @property
    def tokenizer_class(self) -> str:
        """The class that loads the tokenizer in Hugging Face transformers."""
        return self._tokenizer.class_name

    @cached_property
    def template_variables(self) -> tuple[str, ...]:
        """The variables that the model's templates read and a request may set, such as "enable_thinking";
        without the names of special tokens, which it may set, too.
        """
        return variables_of(self._templates.texts, self._tokenizer.token_names)

    @cached_property
    def shows_names(self) -> bool:
        """Whether the model's own template shows the model who speaks (`ChatTurn.name`). Turns with names are
        tried, because templates read the names of functions, too.
        """
        name = "Mnemosyne"
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            try:
                if name in self.render_chat(Chat(tuple(ChatTurn(role, "x", name=name) for role in roles))):
                    return True
            except InvalidRequest:  # there is no template, or it takes no such turns
                continue
        return False

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Text to id, for the tokens that the tokenizer has besides its vocabulary."""
        return {str(token): i for i, token in self._tokenizer.added_tokens.items()}

    def render_chat(self, chat: Chat | Sequence[Mapping[str, str]]) -> str:
        """Render the prompt that asks for the assistant's next turn; InvalidRequest if the template refuses
        the chat.

        A chat with a template of its own may take seconds (`chat.template_sandbox`), so never call this on an
        event loop. Mappings are turns with "role" and "content".
        """
        if not isinstance(chat, Chat):
            chat = Chat(tuple(ChatTurn(turn["role"], turn["content"]) for turn in chat))
        return render(self._templates, chat, self._sandbox)

    def render_turns(self, turns: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> str:
        """Return what the model's own template makes of turns, which may have roles that no conversation has.
        InvalidRequest if it refuses them.
        """
        return render_turns(self._templates, turns, options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens; an id that the tokenizer does not have stands for no text.

        It is equal to Hugging Face's, except for SentencePiece's byte tokens: here an invalid byte does not
        spoil the valid characters that are spelt in bytes next to it.
        """
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.flush()

    def decoder(
        self,
        *,
        skip_special_tokens: bool = True,
        visible: Set[str] = frozenset(),
        after: Sequence[int] = (),
    ) -> IncrementalDecoder:
        """Make a decoder for one sequence of tokens. `visible` are special tokens that have text all the
        same. The text goes on from that of the tokens `after`: together they are the text of all the tokens,
        so that only one of the two loses the space that a tokenizer drops at the start.
        """
        hidden = self._special if skip_special_tokens else frozenset[int]()
        if visible:
            hidden = hidden - {i for token, i in self.added_tokens.items() if token in visible}
        if self._rule is not None:
            pieces = self._pieces_without(hidden)
            left = left_to_strip(self._rule.strip_leading_spaces, map(pieces.__getitem__, after))
            return PieceDecoder(pieces, left)
        if not visible:
            return WindowDecoder(lambda ids: self._tokenizer.decode(ids, skip_special_tokens), after)
        return WindowDecoder(
            lambda ids: self._tokenizer.decode([i for i in ids if i not in hidden], False), after
        )

    def _pieces_without(self, hidden: frozenset[int]) -> Pieces:
        shown = self._shown.get(hidden)
        if shown is None:
            shown = self._shown[hidden] = Pieces(lambda i: b"" if i in hidden else self._pieces[i])
        return shown

    def _piece(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        assert self._rule is not None
        return b"" if token is None else self._rule.piece(token)
