"""The manifests of deploy/kubernetes/, put together by kubectl, as `kubectl apply --kustomize` does it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml  # type: ignore[import-untyped]  # ships no hints

from penstock.cli.__main__ import Parser
from penstock.cli.commands import health
from tests.deploy.files import ROOT
from tests.deploy.programs import run_program
from tests.docs.test_data_blocks import serve_arguments

FOLDER = ROOT / "deploy" / "kubernetes"
VARIANTS = ("base", "complete")


@cache
def text_of_manifests(variant: str) -> str:
    """All manifests of a folder, with its components, as one file of YAML."""
    done = run_program("kubectl", "kustomize", FOLDER / variant)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True, slots=True)
class Manifests:
    """What a cluster would be given."""

    documents: Sequence[Mapping[str, Any]]

    def of_kind(self, kind: str) -> list[Any]:
        return [document for document in self.documents if document["kind"] == kind]

    @property
    def deployment(self) -> Any:
        (found,) = self.of_kind("Deployment")
        return found

    @property
    def pod(self) -> Any:
        return self.deployment["spec"]["template"]["spec"]

    @property
    def container(self) -> Any:
        (found,) = self.pod["containers"]
        return found

    @property
    def serve(self) -> argparse.Namespace:
        """The arguments of `penstock serve`. A wrong one fails the test."""
        return serve_arguments(self.container["args"])


def manifests(variant: str) -> Manifests:
    return Manifests(list(yaml.safe_load_all(text_of_manifests(variant))))


def health_arguments(command: Sequence[str]) -> argparse.Namespace:
    """Parse the command of a probe as `penstock health` does; a wrong argument fails the test."""
    program, name, *arguments = command
    assert (program, name) == ("penstock", "health")
    parser = Parser(prog="penstock")
    subparsers: Any = parser.add_subparsers(dest="command")
    health.add_parser(subparsers)
    return parser.parse_args(["health", *arguments])
