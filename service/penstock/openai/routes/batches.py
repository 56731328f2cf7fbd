"""/v1/batches: makes batches, and tells what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from penstock.openai.batches.runner import BatchRunner
from penstock.openai.batches.storing import (
    MOST_UNFINISHED,
    UNFINISHED,
    FolderFull,
    StoredBatch,
    TooManyBatches,
)
from penstock.openai.calls import call_of
from penstock.openai.failures import ApiError, invalid_value
from penstock.openai.reading import read_body
from penstock.openai.replying import json_response
from penstock.openai.routes.files import files_of, full, no_such, page_of, read_limit, read_query
from penstock.openai.schemas.batches import BatchBody

MOST_LISTED = 100
LISTED = 20
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

QUERY_OF_BATCHES: Final[Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED},
    "after": {"type": "string"},
}
"""The parameters of the query of a list of batches."""


async def _batches_of(request: Request) -> tuple[BatchRunner, str]:
    """Do the same as `files_of`. Batches of this caller, if they wait for its key, go on."""
    batches, caller = await files_of(request)
    batches.remember(caller, call_of(request).key)
    return batches, caller


def _told(batch: StoredBatch) -> dict[str, Any]:
    has_ended = batch.status not in UNFINISHED
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": (batch.output_file or None) if has_ended else None,
        "error_file_id": (batch.error_file or None) if has_ended else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{name}_at": batch.times.get(f"{name}_at") for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


async def create_batch(request: Request) -> Response:
    """Serve POST /v1/batches."""
    batches, caller = await files_of(request)
    body, key = await read_body(request, BatchBody), call_of(request).key
    file = await asyncio.to_thread(batches.folder.file, caller, body.input_file_id)
    if file is None:
        raise invalid_value("input_file_id", "there is no such file.")
    if file.purpose != "batch":
        raise invalid_value("input_file_id", f"its purpose is {file.purpose!r}, not 'batch'.")
    expires = body.output_expires_after
    try:
        made = await asyncio.to_thread(
            batches.folder.begin_batch,
            caller,
            bool(key),
            body.endpoint,
            file.id,
            body.metadata,
            None if expires is None else expires.seconds,
        )
    except FolderFull:
        raise full(batches.folder) from None
    except TooManyBatches:
        message = (
            f"at most {MOST_UNFINISHED} batches of a caller may wait or run; try again when one has ended"
        )
        raise ApiError(
            429, message, "rate_limit_error", code="too_many_batches", retry_after=60.0, may_retry=False
        ) from None
    batches.remember(caller, key)
    batches.wake()
    return json_response(_told(made))


async def list_batches(request: Request) -> Response:
    """Serve GET /v1/batches."""
    batches, caller = await _batches_of(request)
    query = read_query(request)
    limit = read_limit(query, LISTED, MOST_LISTED)
    try:
        found, has_more = await asyncio.to_thread(batches.folder.batches, caller, query.get("after"), limit)
    except KeyError:
        raise invalid_value("after", "there is no such batch.") from None
    return json_response(page_of([_told(batch) for batch in found], has_more))


async def show_batch(request: Request) -> Response:
    """Serve GET /v1/batches/{batch_id}."""
    _, batch = await _batch_of(request)
    return json_response(_told(batch))


async def _batch_of(request: Request) -> tuple[BatchRunner, StoredBatch]:
    batches, caller = await _batches_of(request)
    batch = await asyncio.to_thread(batches.folder.batch, request.path_params["batch_id"], caller)
    if batch is None:
        raise no_such("batch_id", "batch")
    return batches, batch


async def cancel_batch(request: Request) -> Response:
    """Serve POST /v1/batches/{batch_id}/cancel."""
    batches, batch = await _batch_of(request)
    folder = batches.folder
    is_moved = await asyncio.to_thread(folder.move, batch.id, "cancelling", of=("validating", "in_progress"))
    found = await asyncio.to_thread(folder.batch, batch.id)
    assert found is not None, "it has not ended long ago"
    if not is_moved and found.status not in ("cancelling", "cancelled"):
        message = f"a batch of the status {found.status!r} cannot be cancelled"
        raise ApiError(409, message, param="batch_id", code="batch_has_ended", may_retry=False)
    batches.wake()
    return json_response(_told(found))
