"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.client import AdapterExists, UnknownAdapter
from penstock.openai.calls import call_of
from penstock.openai.failures import ApiError, invalid_value
from penstock.openai.front import front_of
from penstock.openai.reading import read_body
from penstock.openai.replying import answered
from penstock.openai.schemas.adapters import LoadAdapterBody, UnloadAdapterBody

PARAMS: Final = {"name": "lora_name", "uri": "lora_path", "replace": "load_inplace"}
"""From the contract's paths to the fields of both."""


async def load_adapter(request: Request) -> Response:
    """Have the server read an adapter from its own disk."""
    call, body = call_of(request), await read_body(request, LoadAdapterBody)
    path = PurePosixPath(body.lora_path)
    if not path.is_absolute():
        raise invalid_value("lora_path", "it must be an absolute path, as the server sees it.")
    asked = front_of(request).backend.client.load_adapter(
        body.lora_name,
        uri=path.as_uri(),
        replace=bool(body.load_inplace),
        timeout=call.timeout,
        metadata=call.metadata,
    )
    try:
        await answered(request, asked)
    except AdapterExists as error:
        message = (
            f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True."
        )
        raise ApiError(400, message, param="lora_name", code="adapter_exists") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Have the server drop an adapter."""
    call, body = call_of(request), await read_body(request, UnloadAdapterBody)
    asked = front_of(request).backend.client.unload_adapter(
        body.lora_name, timeout=call.timeout, metadata=call.metadata
    )
    try:
        await answered(request, asked)
    except UnknownAdapter as error:
        message = f"The lora adapter '{body.lora_name}' cannot be found."
        raise ApiError(404, message, param="lora_name", code="model_not_found") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
