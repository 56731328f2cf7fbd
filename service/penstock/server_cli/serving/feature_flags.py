"""The flags of `penstock serve` for what callers may use."""

from __future__ import annotations

import argparse


def add_feature_flags(requests: argparse._ArgumentGroup) -> None:
    """Add these flags to the group of requests."""
    requests.add_argument(
        "--no-constraints",
        dest="constraints",
        action="store_false",
        help="refuse constraints of any kind, and a tool_choice that requires a call",
    )
    requests.add_argument(
        "--allow-request-templates",
        dest="request_templates",
        action="store_true",
        help="accept chat templates that come with a request: they are programs of the caller's, and run in "
        "processes without files or network; read docs/explanation/security.md first",
    )
    requests.add_argument(
        "--vllm-service",
        action="store_true",
        help="answer vLLM's gRPC service, too, for gateways that speak to vLLM: vllm.grpc.engine.VllmEngine",
    )
