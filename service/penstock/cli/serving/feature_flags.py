"""Flags of `penstock serve` for what callers may use."""

from __future__ import annotations

import argparse

from penstock.service.requests.features import Features


def add_feature_flags(requests: argparse._ArgumentGroup) -> None:
    """The switches, which stand in the group of requests."""
    requests.add_argument(
        "--no-constraints",
        dest="constraints",
        action="store_false",
        help="refuse grammars of any kind, and tool_choice where it requires a call",
    )
    requests.add_argument(
        "--allow-request-templates",
        dest="request_templates",
        action="store_true",
        help="take chat templates that come with a request: programs of a caller's, run in a process of "
        "their own without files or network, but see docs/explanation/security.md",
    )


def features(args: argparse.Namespace) -> Features:
    """What a command line says of them."""
    return Features(constraints=args.constraints, request_templates=args.request_templates)
