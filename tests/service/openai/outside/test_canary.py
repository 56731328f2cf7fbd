"""CompatCanary probes what clients of OpenAI's API rely on most."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.service.openai.outside.demo_front import Endpoint, finish
from tests.service.openai.outside.npm import node_packages
from tests.service.openai.outside.outcomes import judge, read

pytestmark = pytest.mark.sweep


def test_all_probes(endpoint: Endpoint, tmp_path: Path) -> None:
    folder = node_packages(tmp_path, f"compatcanary@{read('compatcanary').version}")
    program = folder / "node_modules" / ".bin" / "compatcanary"
    where = ["--base-url", endpoint.api, "--model", endpoint.model]
    done = finish(
        [program, "scan", *where, "--profile", "modern", "--format", "json", "--timeout", "120"],
        tmp_path,
        {"OPENAI_API_KEY": endpoint.key},
    )
    assert done.stdout.startswith("{"), done.stderr
    results = json.loads(done.stdout)["results"]
    judge(
        "compatcanary",
        {one["id"]: None if one["status"] == "pass" else one["summary"] for one in results},
    )
