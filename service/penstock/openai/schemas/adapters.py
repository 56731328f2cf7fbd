"""The bodies of requests to /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes."""

from __future__ import annotations

from penstock.openai.schemas.base import RequestBody


class LoadAdapterBody(RequestBody):
    """An adapter that the server is to read from its own disk."""

    lora_name: str
    """What requests name as their model, to ask for it."""
    lora_path: str
    """The path of its directory as the server sees it, below the server's --adapter-dir."""
    load_inplace: bool | None = None
    """Whether it may take the place of another one of this name."""


class UnloadAdapterBody(RequestBody):
    """An adapter that is to leave."""

    lora_name: str
    lora_int_id: int | None = None
    """vLLM's own number of the adapter, which is not looked at."""
