"""`penstock info`: shows what a server serves, its limits, and how busy it is."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from penstock.cli.calling.changes import version
from penstock.cli.calling.common import add_addr, print_json, visible, with_client
from penstock.client import Client, ImageLimits, Load, ModelInfo, ServerInfo
from penstock.client.values.sampling_values import NEUTRAL

if TYPE_CHECKING:
    from penstock.cli.calling.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "info",
        help="show a server's model, limits and load",
        description="Show a server's model, its limits and its load.",
    )
    add_addr(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    return with_client(args, lambda client: _show(client, args.json))


def _show(client: Client, as_json: bool) -> int:
    model, server, load = client.model_info(), client.server_info(), client.load()
    ready = client.is_ready()
    if as_json:
        print_json({"model": model, "server": server, "load": load, "ready": ready})
    else:
        print(table(model, server, load, ready))
    return 0


def _since(model: ModelInfo) -> str:
    """Tell when the weights went live, in the local time zone."""
    since = model.weights_since
    return "not stated" if since is None else since.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _value(value: object) -> str:
    """Format a sampling value; for a long list only its length."""
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if len(value) > 4:
        return f"({len(value)} of them)"
    return " ".join(f"{v[0]}={v[1]:g}" if isinstance(v, tuple) else repr(v) for v in value)


def _embeddings(model: ModelInfo) -> str:
    return f"{model.hidden_size} numbers, {model.default_pooling}" if model.hidden_size else "none"


def _adapters(server: ServerInfo) -> str:
    if not server.max_adapters:
        return "none"
    return (
        f"{server.max_adapters} on the device, {server.max_cached_adapters} in memory, rank "
        f"{server.max_adapter_rank} at most{', also of experts' if server.adapter_experts else ''}"
    )


def _images(limits: ImageLimits | None) -> str:
    if limits is None:
        return "none are taken"
    return (
        f"{limits.max_images} per request, each of {limits.max_image_bytes / 2**20:.3g} MiB and "
        f"{limits.max_image_pixels / 1e6:.3g} million pixels at most"
    )


def _speculation(server: ServerInfo) -> str:
    if not server.proposer:
        return "off"
    return f"{server.proposer}, up to {server.max_proposed_tokens} tokens in a step"


def table(model: ModelInfo, server: ServerInfo, load: Load, ready: bool) -> str:
    """Format three groups of names and values."""
    # Values without an effect are left out.
    defaults = dataclasses.asdict(model.default_sampling)
    sampling = {k: v for k, v in defaults.items() if v not in (None, (), NEUTRAL.get(k))}
    groups = {
        "model": {
            "name": model.model,
            "architecture": model.architecture,
            "vocabulary": f"{model.vocab_size} tokens",
            "context": f"{model.max_context_tokens} tokens",
            "end tokens": ", ".join(map(str, model.eos_token_ids)) or "none",
            "sampling": ", ".join(f"{k} {_value(v)}" for k, v in sampling.items()) or "not stated",
            "weights": version(model.weights),
            "in use since": _since(model),
            "digest": model.weights_digest.hex() or "none; they are the weights of the start",
            "staged update": model.staged_update_id or "none",
            "features": ", ".join(model.features) or "none",
            "template reads": ", ".join(model.template_variables) or "none",
            "images": _images(model.image_limits),
            "embeddings": _embeddings(model),
        },
        "server": {
            "version": server.server_version,
            "instance": server.instance_id,
            "devices": ", ".join(server.devices),
            "requests": f"{server.max_running_requests} running, {server.max_queued_requests} queued at most",
            "KV cache": f"{server.kv_pages_total} pages of {server.kv_page_tokens} tokens",
            "log-probabilities": f"{server.max_logprobs} at most",
            "speculation": _speculation(server),
            "request": f"{server.max_request_bytes / 2**20:.3g} MiB at most",
            "adapters": _adapters(server),
        },
        "load": {
            "requests": f"{load.running_requests} running, {load.queued_requests} queued",
            "queued prompts": f"{load.queued_prompt_tokens} tokens",
            "KV cache": f"{load.kv_pages_used} of {load.kv_pages_total} pages used",
            "adapters": f"{load.loaded_adapters} on the device",
            "state": "paused" if load.paused else "serving" if ready else "not ready",
        },
    }
    width = max(len(name) for group in groups.values() for name in group)
    lines = [
        "\n".join([title, *(f"  {name:<{width}}  {visible(value)}" for name, value in group.items())])
        for title, group in groups.items()
    ]
    return "\n\n".join(lines)
