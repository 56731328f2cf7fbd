"""Tokenizers that transformers reads: those of which `tokenizer.read_tokenizer` knows too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from penstock.runtime.text.tokenizer import LoadedTokenizer


def load(folder: Path) -> LoadedTokenizer:
    """Load the tokenizer of a folder. Raises anything, because transformers does so for a value that it does
    not expect.
    """
    # Else transformers would ask on the terminal whether code of the checkpoint may run. It may not.
    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    # The engine decides how long a prompt may be. For prompts above the tokenizer's own limit, transformers
    # would log that "indexing errors" follow, even if they are cut before the model sees them.
    tokenizer.model_max_length = VERY_LARGE_INTEGER
    return loaded(tokenizer)


def loaded(tokenizer: PreTrainedTokenizerBase) -> LoadedTokenizer:
    """Return what a tokenizer of transformers shows of itself."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    encode = None if _is_plain(tokenizer) else _encode(tokenizer)
    if encode is None:
        # What transformers does around the backend takes twice as long as a short prompt's tokens.
        backend.no_padding()  # as the tokenizer has it when it encodes one text
        backend.no_truncation()
        backend.encode_special_tokens = tokenizer.split_special_tokens
    end = tokenizer.eos_token_id
    return LoadedTokenizer(
        backend=backend,
        encode=encode,
        decode=lambda ids, skip: cast(
            "str",
            tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False),
        ),
        added_tokens=tokenizer.added_tokens_decoder,
        special_tokens=dict(tokenizer.special_tokens_map),
        token_names=tuple(tokenizer.SPECIAL_TOKENS_ATTRIBUTES),
        eos_token_id=None if end is None else int(end),
        chat_template=getattr(tokenizer, "chat_template", None),
        class_name=type(tokenizer).__name__,
    )


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Say whether the tokenizer is one of Hugging Face's fast ones that changes nothing of how they
    encode.
    """
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, TokenizersBackend)
        and kind.encode is PreTrainedTokenizerBase.encode
        and kind._encode_plus is TokenizersBackend._encode_plus
    )


def _encode(tokenizer: PreTrainedTokenizerBase) -> Any:
    return lambda text, special: tokenizer.encode(text, add_special_tokens=special)
