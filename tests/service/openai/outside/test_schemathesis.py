"""Schemathesis makes up requests from the front's OpenAPI page, right ones and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.environments import environment
from tests.service.openai.outside.demo_front import DRIVERS, Endpoint, finish
from tests.service.openai.outside.outcomes import judge, read

pytestmark = pytest.mark.sweep
MADE_UP = "positive_data_acceptance"
"""A check left out: what is right by the page may still be too long for the model, or name no token of it."""
BY_CHANCE = ("/v1/files/", "/v1/batches")
"""Paths that want the id of something that was made before. By chance Schemathesis asks for nothing that is
there.
"""


def outcomes_of(report: dict[str, Any]) -> dict[str, str | None]:
    """Each operation of the page, with what was found there."""
    problems: dict[str, list[str]] = {operation: [] for operation in report["valid_rates"]}
    for operation, phases in report["valid_rates"].items():
        path = operation.partition(" ")[2]
        if not path.startswith(BY_CHANCE) and not any(counts["accepted"] for counts in phases.values()):
            problems[operation].append("no request was accepted")
    for failure in report["failures"]:
        for operation in failure["operations"]:  # also methods that the page does not have
            problems.setdefault(operation, []).append(f"{failure['code']}: {failure['title']}")
    return {operation: "; ".join(told) or None for operation, told in problems.items()}


def test_answers_are_as_the_page_says(endpoint: Endpoint, tmp_path: Path) -> None:
    program = environment(f"schemathesis=={read('schemathesis').version}") / "bin" / "st"
    report = tmp_path / "report.json"
    done = finish(
        [
            *(program, "run", f"{endpoint.url}/openapi.json", "--url", endpoint.url),
            *("--header", f"Authorization: Bearer {endpoint.key}"),
            *("--checks", "all", "--exclude-checks", MADE_UP),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--generation-deterministic"),
            *("--continue-on-failure", "--request-timeout", "600", "--no-color"),
            *("--report", "json", "--report-json-path", report),
        ],
        tmp_path,
        {
            "SCHEMATHESIS_HOOKS": str(DRIVERS / "schemathesis_hooks.py"),
            "FRONT_URL": endpoint.url,
            "FRONT_KEY": endpoint.key,
        },
    )
    assert report.exists(), f"{done.stdout}\n{done.stderr}"
    told = json.loads(report.read_text())
    assert told["errors"] == [], f"{told['errors']}\n{done.stdout}"
    judge("schemathesis", outcomes_of(told))
