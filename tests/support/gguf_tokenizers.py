"""Tokenizers of Hugging Face as the metadata of a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def metadata_of(tokenizer: Any, *, model: str = "gpt2", **keys: Any) -> dict[str, Any]:
    """Return the keys of a tokenizer of transformers, or of `tokenizers`. keys: what the converter knows of
    it by its name, such as `pre`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    data = json.loads(backend.to_str())
    by_id = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
    types = [_NORMAL if i in by_id else _UNUSED for i in range(len(tokens))]
    for i, token in enumerate(tokens):
        if model == "llama" and token.startswith("<0x") and len(token) == 6:
            types[i] = _BYTE
    for added in data["added_tokens"]:
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    found = {"model": model, "tokens": tokens, "token_type": types, **keys}
    if model == "gpt2":
        found["merges"] = merges
    else:
        found["scores"] = _scores(tokens, [tuple(pair.split(" ")) for pair in merges])
    for part, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = getattr(tokenizer, f"{part}_token", None)
        if token is not None:
            found[f"{name}_token_id"] = backend.token_to_id(str(token))
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """SentencePiece's scores: the earlier a piece is merged, the higher; what nothing makes comes last."""
    ranks = {"".join(pair): rank for rank, pair in reversed(list(enumerate(merges)))}
    return [-float(ranks.get(token, len(merges))) for token in tokens]
