"""llm-comply compares answers and events with the schemas of OpenAI's chat and of Open Responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.deploy.environments import environment
from tests.service.openai.outside.demo_front import Endpoint, finish
from tests.service.openai.outside.outcomes import judge, read

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize(
    ("name", "form"), [("comply-chat", "openai-chat"), ("comply-responses", "open-responses")]
)
def test_answers_comply(name: str, form: str, endpoint: Endpoint, tmp_path: Path) -> None:
    program = environment(f"llm-comply=={read(name).version}") / "bin" / "llm-comply"
    where = ["--base-url", endpoint.api, "--api-key", endpoint.key, "--model", endpoint.model]
    done = finish([program, *where, "--format", form, "--json"], tmp_path)
    results = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    # A warning is advice, and is to be followed, too. What is skipped has its reason among the errors.
    outcomes = {
        result["id"]: "; ".join([*result.get("errors", []), *result.get("warnings", [])]) or None
        for result in results
    }
    judge(name, outcomes)
