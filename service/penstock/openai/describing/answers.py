"""The shapes of what the front answers, as JSON Schemas.

Answers are written field by field (answers/), without models of their own, because most of them are the
chunks of streams. So these schemas say which fields are always there and what they hold; a test compares them
with real answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_IDS: Final[Schema] = {"type": "array", "items": _COUNT}
_OBJECT_OR_NULL: Final[Schema] = {"type": ["object", "null"]}


def _always(**fields: Schema) -> dict[str, Any]:
    """An object that always has these fields, and sometimes further ones."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _word(*words: str | bool | None) -> dict[str, Any]:
    return {"enum": list(words)}


def _list_of(schema: Schema) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_ENDINGS: Final = ("stop", "length", "tool_calls", None)

SCHEMAS: Final[Mapping[str, Schema]] = {
    "Error": _always(
        error=_always(
            message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code={"type": ["string", "integer", "null"]}
        )
    ),
    "Usage": _always(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_always(cached_tokens=_COUNT),
        completion_tokens_details=_always(reasoning_tokens=_COUNT),
    ),
    "Model": _always(
        id=_TEXT,
        object=_word("model"),
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len=_COUNT,
        input_modalities=_list_of(_word("text", "image")),
    ),
    "ModelList": _always(object=_word("list"), data=_list_of(_of("Model"))),
    "ToolCall": _always(id=_TEXT, type=_word("function"), function=_always(name=_TEXT, arguments=_TEXT)),
    "ChatCompletion": _always(
        id=_TEXT,
        object=_word("chat.completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list_of(
            _always(
                index=_COUNT,
                finish_reason=_word(*_ENDINGS[:3]),
                logprobs=_OBJECT_OR_NULL,
                message={
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {
                        "role": _word("assistant"),
                        "content": _TEXT_OR_NULL,
                        "reasoning": _TEXT,
                        "tool_calls": _list_of(_of("ToolCall")),
                    },
                },
            )
        ),
        usage=_of("Usage"),
    ),
    "ChatCompletionChunk": _always(
        id=_TEXT,
        object=_word("chat.completion.chunk"),
        created=_COUNT,
        model=_TEXT,
        choices=_list_of(_always(index=_COUNT, delta={"type": "object"}, finish_reason=_word(*_ENDINGS))),
    ),
    "Completion": _always(
        id=_TEXT,
        object=_word("text_completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list_of(
            _always(index=_COUNT, text=_TEXT, logprobs=_OBJECT_OR_NULL, finish_reason=_word("stop", "length"))
        ),
        usage=_of("Usage"),
    ),
    "CompletionChunk": _always(
        id=_TEXT,
        object=_word("text_completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list_of(_always(index=_COUNT, text=_TEXT, finish_reason=_word("stop", "length", None))),
    ),
    "Response": _always(
        id=_TEXT,
        object=_word("response"),
        created_at={"type": "number"},
        model=_TEXT,
        status=_word("completed", "incomplete", "failed", "in_progress"),
        output=_list_of(_always(id=_TEXT, type=_TEXT)),
        error=_OBJECT_OR_NULL,
        incomplete_details=_OBJECT_OR_NULL,
        store=_word(False),
    ),
    "ResponseEvent": _always(type=_TEXT, sequence_number=_COUNT),
    "Embeddings": _always(
        object=_word("list"),
        data=_list_of(
            _always(
                object=_word("embedding"),
                index=_COUNT,
                embedding={"anyOf": [{"type": "array", "items": {"type": "number"}}, _TEXT]},
            )
        ),
        model=_TEXT,
        usage=_always(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Tokens": _always(count=_COUNT, max_model_len=_COUNT, tokens=_IDS),
    "Text": _always(prompt=_TEXT),
    "Health": _always(status=_word("ok", "draining", "unavailable")),
}
"""The schemas by name."""

ANSWERS: Final[Mapping[str, tuple[str, str | None]]] = {
    "/v1/models": ("ModelList", None),
    "/v1/models/{model:path}": ("Model", None),
    "/v1/chat/completions": ("ChatCompletion", "ChatCompletionChunk"),
    "/v1/completions": ("Completion", "CompletionChunk"),
    "/v1/responses": ("Response", "ResponseEvent"),
    "/v1/embeddings": ("Embeddings", None),
    "/tokenize": ("Tokens", None),
    "/detokenize": ("Text", None),
    "/health": ("Health", None),
}
"""By path, the schema of the answer, and that of each event where the request may ask for a stream."""
