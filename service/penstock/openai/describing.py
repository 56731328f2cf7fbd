"""The OpenAPI document, made of the table of endpoints, of the models of their bodies, and of the shapes of
answers.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.batches.storing import Status
from penstock.openai.endpoints import Endpoint
from penstock.openai.failures import TABLE
from penstock.openai.jsonbytes import json_bytes
from penstock.openai.schemas.base import Body
from penstock.openai.schemas.batches import LEAST_KEPT_S, MOST_KEPT_S

Schema = Mapping[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_IDS: Final[Schema] = {"type": "array", "items": _COUNT}
_OBJECT_OR_NULL: Final[Schema] = {"type": ["object", "null"]}


def _always(**fields: Schema) -> dict[str, Any]:
    """Describe an object that always has these fields, and sometimes further ones."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _word(*words: str | bool | None) -> dict[str, Any]:
    return {"enum": list(words)}


def _list_of(schema: Schema) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _page(schema: Schema) -> dict[str, Any]:
    return _always(
        object=_word("list"),
        data=_list_of(schema),
        first_id=_TEXT_OR_NULL,
        last_id=_TEXT_OR_NULL,
        has_more={"type": "boolean"},
    )


_FILE: Final = _always(
    id=_TEXT,
    object=_word("file"),
    bytes=_COUNT,
    created_at=_COUNT,
    expires_at=_COUNT,
    filename=_TEXT,
    purpose=_word("batch", "batch_output"),
    status=_word("processed"),
)
_BATCH: Final = _always(
    id=_TEXT,
    object=_word("batch"),
    endpoint=_TEXT,
    errors=_OBJECT_OR_NULL,
    input_file_id=_TEXT,
    completion_window=_word("24h"),
    status={"enum": list(get_args(Status))},
    output_file_id=_TEXT_OR_NULL,
    error_file_id=_TEXT_OR_NULL,
    created_at=_COUNT,
    expires_at=_COUNT,
    request_counts=_always(total=_COUNT, completed=_COUNT, failed=_COUNT),
    metadata=_OBJECT_OR_NULL,
)
UPLOAD: Final[Schema] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": _word("batch"),
        "expires_after[anchor]": _word("created_at"),
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_KEPT_S, "maximum": MOST_KEPT_S},
    },
}
"""The form that is uploaded to /v1/files."""

_ENDINGS: Final = ("stop", "length", "tool_calls", None)

SCHEMAS: Final[Mapping[str, Schema]] = {
    "Error": _always(
        error=_always(
            message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code={"type": ["string", "integer", "null"]}
        )
    ),
    "MessagesError": _always(type=_word("error"), error=_always(type=_TEXT, message=_TEXT), request_id=_TEXT),
    "Usage": _always(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_always(cached_tokens=_COUNT),
        completion_tokens_details=_always(
            reasoning_tokens=_COUNT, accepted_prediction_tokens=_COUNT, rejected_prediction_tokens=_COUNT
        ),
    ),
    "Model": _always(
        id=_TEXT,
        object=_word("model"),
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len=_COUNT,
        input_modalities=_list_of(_word("text", "image")),
    )
    | {"description": "An adapter also has `parent`, the model that it changes."},
    "ModelList": _always(object=_word("list"), data=_list_of(_of("Model"))),
    "AnthropicModel": _always(
        id=_TEXT,
        type=_word("model"),
        display_name=_TEXT,
        created_at=_TEXT,
        lifecycle=_word("active"),
        max_input_tokens=_COUNT,
        max_tokens=_COUNT,
    ),
    "ModelPage": _always(
        data=_list_of(_of("AnthropicModel")),
        first_id=_TEXT_OR_NULL,
        last_id=_TEXT_OR_NULL,
        has_more=_word(False),
    ),
    "Models": {"anyOf": [_of("ModelList"), _of("ModelPage")]},
    "OneModel": {"anyOf": [_of("Model"), _of("AnthropicModel")]},
    "AnyError": {"anyOf": [_of("Error"), _of("MessagesError")]},
    "ToolCall": {
        "anyOf": [
            _always(id=_TEXT, type=_word("function"), function=_always(name=_TEXT, arguments=_TEXT)),
            _always(id=_TEXT, type=_word("custom"), custom=_always(name=_TEXT, input=_TEXT)),
        ]
    },
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
        store=_word(True, False),
    ),
    "ResponseEvent": _always(type=_TEXT, sequence_number=_COUNT),
    "Message": _always(
        id=_TEXT,
        type=_word("message"),
        role=_word("assistant"),
        model=_TEXT,
        content=_list_of(_always(type=_word("thinking", "text", "tool_use"))),
        stop_reason=_word(
            "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
        ),
        stop_sequence=_TEXT_OR_NULL,
        usage=_always(
            input_tokens=_COUNT,
            cache_creation_input_tokens=_COUNT,
            cache_read_input_tokens=_COUNT,
            output_tokens=_COUNT,
            output_tokens_details=_always(thinking_tokens=_COUNT),
        ),
    ),
    "MessageEvent": _always(
        type=_word(
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        )
    ),
    "TokenCount": _always(input_tokens=_COUNT),
    "ResponseDeleted": _always(id=_TEXT, object=_word("response"), deleted=_word(True)),
    "InputTokens": _always(object=_word("response.input_tokens"), input_tokens=_COUNT),
    "InputItems": _always(
        object=_word("list"),
        data=_list_of(_always(id=_TEXT, type=_TEXT)),
        first_id=_TEXT_OR_NULL,
        last_id=_TEXT_OR_NULL,
        has_more=_word(True, False),
    ),
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
    "Ranking": _always(
        id=_TEXT,
        model=_TEXT,
        results=_list_of(_always(index=_COUNT, relevance_score={"type": "number"})),
        usage=_always(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Scores": _always(
        id=_TEXT,
        object=_word("list"),
        created=_COUNT,
        model=_TEXT,
        data=_list_of(_always(index=_COUNT, object=_word("score"), score={"type": "number"})),
        usage=_always(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Classes": _always(
        id=_TEXT,
        object=_word("list"),
        created=_COUNT,
        model=_TEXT,
        data=_list_of(
            _always(
                index=_COUNT,
                label={"type": ["string", "null"]},
                probs={"type": "array", "items": {"type": "number"}},
                num_classes=_COUNT,
            )
        ),
        usage=_always(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "File": _FILE,
    "FileList": _page(_of("File")),
    "DeletedFile": _always(id=_TEXT, object=_word("file"), deleted=_word(True)),
    "Batch": _BATCH,
    "BatchList": _page(_of("Batch")),
    "Tokens": _always(count=_COUNT, max_model_len=_COUNT, tokens=_IDS),
    "Text": _always(prompt=_TEXT),
    "Tokenizer": _always(tokenizer_class=_TEXT, chat_template={"type": ["string", "null"]}),
    "Health": _always(status=_word("ok", "draining", "unavailable")),
}
"""The schemas by name."""

ANSWERS: Final[Mapping[str, tuple[str, str | None]]] = {
    "/v1/models": ("Models", None),
    "/v1/models/{model:path}": ("OneModel", None),
    "/v1/chat/completions": ("ChatCompletion", "ChatCompletionChunk"),
    "/v1/completions": ("Completion", "CompletionChunk"),
    "/v1/responses": ("Response", "ResponseEvent"),
    "/v1/messages": ("Message", "MessageEvent"),
    "/v1/messages/count_tokens": ("TokenCount", None),
    "/v1/responses/input_tokens": ("InputTokens", None),
    "/v1/responses/{response_id}": ("Response", None),
    "DELETE /v1/responses/{response_id}": ("ResponseDeleted", None),
    "/v1/responses/{response_id}/input_items": ("InputItems", None),
    "/v1/embeddings": ("Embeddings", None),
    "/classify": ("Classes", None),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), ("Ranking", None)),
    **dict.fromkeys(("/v1/score", "/score"), ("Scores", None)),
    "POST /v1/files": ("File", None),
    "GET /v1/files": ("FileList", None),
    "GET /v1/files/{file_id}": ("File", None),
    "DELETE /v1/files/{file_id}": ("DeletedFile", None),
    "POST /v1/batches": ("Batch", None),
    "GET /v1/batches": ("BatchList", None),
    "/v1/batches/{batch_id}": ("Batch", None),
    "/v1/batches/{batch_id}/cancel": ("Batch", None),
    "/tokenize": ("Tokens", None),
    "/detokenize": ("Text", None),
    "/tokenizer_info": ("Tokenizer", None),
    "/health": ("Health", None),
}
"""By path, or by method and path where they differ, the schema of the answer, and that of each event where
the request may ask for a stream.
"""
CONTENT: Final = "/v1/files/{file_id}/content"
"""The path whose answer is what a caller has stored."""


def answer_of(endpoint: Endpoint) -> tuple[str, str | None] | None:
    """Return the row of `ANSWERS` of an endpoint; None for pages for people, and for contents."""
    return ANSWERS.get(f"{endpoint.method} {endpoint.path}", ANSWERS.get(endpoint.path))


_BY_THE_FRONT: Final = (400, 404, 408, 413, 415, 500, 503)
"""The statuses of the front's own errors."""
_MEANINGS: Final = {
    400: "A field is missing, wrong or not supported; `param` names it.",
    401: "The key is missing, unknown or has expired.",
    403: "The key does not allow this.",
    404: "There is no such model or path.",
    408: "The request arrived too slowly.",
    409: "The state of the server, or another request, does not allow this.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests; retry-after says when to come back.",
    500: "The server has failed.",
    501: "This server cannot do this.",
    503: "The server does not take requests now; retry-after says when to come back.",
    504: "The request took longer than it may.",
}
ERRORS: Final = sorted({*_BY_THE_FRONT, *(row.status for row in TABLE.values())})
_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


def document(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """Write the OpenAPI document of these endpoints. Pages for people are not in it."""
    told = [
        endpoint
        for endpoint in endpoints
        if answer_of(endpoint) is not None or endpoint.body is not None or endpoint.path == CONTENT
    ]
    bodies = {endpoint.body for endpoint in told if endpoint.body is not None}
    _, models = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    schemas = {**models.get("$defs", {}), **SCHEMAS}
    for body in bodies:
        _add_ignored(schemas[body.__name__], body)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in told:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock's OpenAI front",
            "version": version,
            "description": "OpenAI's HTTP API for a server of penstock.v1, as docs/openai.md explains it, "
            "and Anthropic's Messages API, as docs/anthropic.md does.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def _add_ignored(schema: dict[str, Any], body: type[Body]) -> None:
    """Name the fields that are taken and ignored."""
    properties = schema.setdefault("properties", {})
    for name in sorted(body.ignored):
        properties.setdefault(name, {"description": "Taken and ignored, of which x-penstock-ignored tells."})


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    words = re.sub(r"[^a-z0-9]+", "_", _PARAMETER.sub("one", endpoint.path))
    made: dict[str, Any] = {
        "operationId": f"{endpoint.method.lower()}{words}",
        "summary": endpoint.summary,
        "responses": {"200": _answer(endpoint), **_errors(endpoint)},
    }
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in endpoint.query.items()]
    if endpoint.path.startswith("/v1/models"):
        parameters.append({"name": "anthropic-version", "in": "header", "schema": _TEXT})
    if parameters:
        made["parameters"] = parameters
    if endpoint.body is not None:
        made["requestBody"] = {"required": True, "content": _json(endpoint.body.__name__)}
    if (endpoint.method, endpoint.path) == ("POST", "/v1/files"):
        made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}
    return made


def _answer(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.path == CONTENT:
        data = {"application/octet-stream": {"schema": {"type": "string"}}}
        return {"description": "The content.", "content": data}
    answer = answer_of(endpoint)
    if answer is None:
        return {"description": "The answer."}
    whole, event = answer
    content = _json(whole)
    if event is not None:
        content |= {"text/event-stream": {"schema": _event(event, _error(endpoint.path))}}
    return {"description": "The answer.", "content": content}


def _error(path: str) -> str:
    """Return the schema of the errors of this path."""
    if path.startswith("/v1/models"):
        return "AnyError"
    return "MessagesError" if path.startswith("/v1/messages") else "Error"


def _event(name: str, error: str) -> dict[str, Any]:
    """Describe an event of a stream. OpenAPI 3.1 does not say what a schema of a stream describes; programs
    that look into streams take it for that of one event, as OpenAPI 3.2 does.
    """
    told = [{"$ref": f"#/components/schemas/{kind}"} for kind in (name, error)]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": told}}
    return {
        "type": "object",
        "description": f"With `stream`: server-sent events, whose data are objects of {name}.",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _errors(endpoint: Endpoint) -> dict[str, Any]:
    if not endpoint.is_api:
        return {"503": {"description": _MEANINGS[503], "content": _json(ANSWERS[endpoint.path][0])}}
    content = _json(_error(endpoint.path))
    return {str(status): {"description": _MEANINGS[status], "content": content} for status in ERRORS}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


async def openapi(request: Request) -> Response:
    """Serve GET /openapi.json. It needs no key. It is made when it is first asked for."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        version = importlib.metadata.version("penstock")
        state.openapi = json_bytes(document(state.endpoints, version))
    return Response(state.openapi, media_type="application/json")
