"""Puts the app together: the table of endpoints, and what is done with errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.client import PenstockClientError, UnknownAdapter, UnknownModel
from penstock.openai.batches.runner import BatchRunner
from penstock.openai.calls import call_of
from penstock.openai.describing import openapi
from penstock.openai.edge import Edge
from penstock.openai.endpoints import Endpoint, mark, params_of
from penstock.openai.failures import ApiError, ClientGone, defect, error_response, of_client_error
from penstock.openai.front import Front, front_of
from penstock.openai.routes.adapters import PARAMS as ADAPTER_PARAMS
from penstock.openai.routes.adapters import load_adapter, unload_adapter
from penstock.openai.routes.batches import (
    QUERY_OF_BATCHES,
    cancel_batch,
    create_batch,
    list_batches,
    show_batch,
)
from penstock.openai.routes.chat import chat
from penstock.openai.routes.classify import classify
from penstock.openai.routes.completions import completions
from penstock.openai.routes.embeddings import embed
from penstock.openai.routes.files import (
    QUERY_OF_FILES,
    delete_file,
    list_files,
    show_content,
    show_file,
    upload_file,
)
from penstock.openai.routes.health import health, metrics
from penstock.openai.routes.messages.messages import count_tokens, create_message
from penstock.openai.routes.models import list_models, show_model
from penstock.openai.routes.page import show_page, show_page_file
from penstock.openai.routes.rerank import PARAMS as RERANK_PARAMS
from penstock.openai.routes.rerank import rerank, score
from penstock.openai.routes.responses.responses import count_input_tokens, create_response
from penstock.openai.routes.responses.stored import (
    QUERY_OF_ITEMS,
    QUERY_OF_ONE,
    delete_response,
    list_input_items,
    show_response,
)
from penstock.openai.routes.tokens import PARAMS, detokenize, tokenize, tokenizer_info
from penstock.openai.schemas.adapters import LoadAdapterBody, UnloadAdapterBody
from penstock.openai.schemas.batches import BatchBody
from penstock.openai.schemas.chat import ChatBody
from penstock.openai.schemas.completions import ClassifyBody, CompletionBody, EmbeddingBody
from penstock.openai.schemas.messages import CountTokensBody, MessagesBody
from penstock.openai.schemas.rerank import RerankBody, ScoreBody
from penstock.openai.schemas.responses import InputTokensBody, ResponsesBody
from penstock.openai.schemas.tokens import DetokenizeBody, TokenizeBody

PAGE: Final = (
    Endpoint("GET", "/", show_page, "The web page.", is_api=False),
    Endpoint("GET", "/page/{name:path}", show_page_file, "A file of the web page.", is_api=False),
)
"""What is served only where the settings say so."""
ADAPTER_UPDATES: Final = (
    Endpoint(
        "POST", "/v1/load_lora_adapter", load_adapter, "Loads an adapter.", LoadAdapterBody, ADAPTER_PARAMS
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        "Unloads an adapter.",
        UnloadAdapterBody,
        ADAPTER_PARAMS,
    ),
)
"""What is served only where the settings say so."""
RESPONSE: Final = "/v1/responses/{response_id}"
_RESPONSES: Final = "resp_"
"""What the ids of responses begin with."""
log = logging.getLogger("penstock.openai")

ENDPOINTS: Final = (
    Endpoint("POST", "/v1/chat/completions", chat, "Continues a conversation.", ChatBody),
    Endpoint("POST", "/v1/completions", completions, "Continues texts.", CompletionBody),
    Endpoint("POST", "/v1/responses", create_response, "Answers a list of items.", ResponsesBody),
    Endpoint("POST", "/v1/messages", create_message, "Anthropic's: answers messages.", MessagesBody),
    Endpoint(
        "POST", "/v1/messages/count_tokens", count_tokens, "Anthropic's: counts tokens.", CountTokensBody
    ),
    Endpoint(
        "POST", "/v1/responses/input_tokens", count_input_tokens, "How long a prompt is.", InputTokensBody
    ),
    Endpoint("GET", RESPONSE, show_response, "A response that is kept.", query=QUERY_OF_ONE),
    Endpoint("DELETE", RESPONSE, delete_response, "Deletes a response that is kept."),
    Endpoint(
        "GET", f"{RESPONSE}/input_items", list_input_items, "What a response answers.", query=QUERY_OF_ITEMS
    ),
    Endpoint("POST", "/v1/embeddings", embed, "Makes vectors of texts.", EmbeddingBody),
    Endpoint("POST", "/classify", classify, "The classes of texts.", ClassifyBody),
    *(
        Endpoint("POST", path, rerank, "Sorts documents by relevance.", RerankBody, RERANK_PARAMS)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Endpoint("POST", path, score, "The relevance of pairs of texts.", ScoreBody, RERANK_PARAMS)
        for path in ("/v1/score", "/score")
    ),
    Endpoint("POST", "/tokenize", tokenize, "The tokens of a text or a conversation.", TokenizeBody, PARAMS),
    Endpoint("POST", "/detokenize", detokenize, "The text of tokens.", DetokenizeBody, PARAMS),
    Endpoint("GET", "/tokenizer_info", tokenizer_info, "The special tokens and the chat template."),
    Endpoint("GET", "/v1/models", list_models, "The models that are served."),
    Endpoint("GET", "/v1/models/{model:path}", show_model, "One model."),
    Endpoint("POST", "/v1/files", upload_file, "Takes a file of requests."),
    Endpoint("GET", "/v1/files", list_files, "The caller's files.", query=QUERY_OF_FILES),
    Endpoint("GET", "/v1/files/{file_id}", show_file, "A file."),
    Endpoint("DELETE", "/v1/files/{file_id}", delete_file, "Removes a file."),
    Endpoint("GET", "/v1/files/{file_id}/content", show_content, "What is in a file."),
    Endpoint("POST", "/v1/batches", create_batch, "Runs the requests in a file.", BatchBody),
    Endpoint("GET", "/v1/batches", list_batches, "The caller's batches.", query=QUERY_OF_BATCHES),
    Endpoint("GET", "/v1/batches/{batch_id}", show_batch, "A batch."),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "Ends a batch."),
    Endpoint("GET", "/health", health, "Whether the front and its server take requests.", is_api=False),
    Endpoint("GET", "/openapi.json", openapi, "This description.", is_api=False),
    Endpoint("GET", "/metrics", metrics, "What the front measures, for Prometheus.", is_api=False),
    *ADAPTER_UPDATES,
    *PAGE,
)
"""All endpoints, in the order in which their paths are compared."""


def create_app(
    front: Front, endpoints: Sequence[Endpoint] = ENDPOINTS, batches: BatchRunner | None = None
) -> ASGIApp:
    """Make the ASGI app of a front; without `batches` it keeps no files. It does not use ASGI's lifespan."""
    settings = front.settings
    left_out = (() if settings.page else PAGE) + (() if settings.adapter_updates else ADAPTER_UPDATES)
    endpoints = [row for row in endpoints if row not in left_out]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "request-id", "x-penstock-ignored", "retry-after", "retry-after-ms"),
    )
    app = Starlette(
        routes=_routes(endpoints),
        middleware=[cors] if settings.cors_origins else [],
        exception_handlers={
            ApiError: _tell_api_error,
            PenstockClientError: _tell_client_error,
            HTTPException: _tell_http_exception,
        },
    )
    app.state.front = front
    app.state.endpoints = endpoints
    app.state.batches = batches
    app.router.redirect_slashes = False
    return Edge(app, front)


def _routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """Make a route for each path, so that a method that it does not take is answered with all that it
    takes.
    """
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [_route(path, by_method) for path, by_method in by_path.items()]


def _route(path: str, by_method: Mapping[str, Endpoint]) -> Route:
    async def handle(request: Request) -> Response:
        endpoint = by_method["GET" if request.method == "HEAD" else request.method]
        mark(request.scope, endpoint)
        try:
            return await endpoint.handler(request)
        except (ApiError, ClientGone, HTTPException, PenstockClientError):
            raise
        except Exception:  # a defect; Starlette's own reply to it would have no envelope
            log.exception("request %r failed", call_of(request).request_id)
            return error_response(defect(), call_of(request))

    return Route(path, handle, methods=list(by_method))


async def _tell_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "as the table of handlers says"
    return error_response(error, call_of(request))


async def _tell_client_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockClientError), "as the table of handlers says"
    if isinstance(error, UnknownModel | UnknownAdapter):
        front_of(request).backend.forget()
    return error_response(of_client_error(error, params_of(request.scope)), call_of(request))


async def _tell_http_exception(request: Request, error: Exception) -> Response:
    """Answer an error of Starlette's own: no path matches, or its method is another one."""
    assert isinstance(error, HTTPException), "as the table of handlers says"
    status, detail, headers = error.status_code, error.detail, dict(error.headers or {})
    if status == 405 and not request.path_params.get("response_id", _RESPONSES).startswith(_RESPONSES):
        # It is no response but an endpoint of OpenAI's, such as /v1/responses/compact.
        status, detail, headers = 404, "Not Found", {}
    message = f"{request.method} {request.url.path[:200]}: {detail}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    response = error_response(ApiError(status, message, code=code), call_of(request))
    response.headers.update(headers)
    return response
