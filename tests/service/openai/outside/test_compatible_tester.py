"""openai-compatible-tester, a Go program, says of each answer whether it is usable, and of OpenAI's shape.

It asks for exact words ("Reply with exactly OK"), which are beyond the demo model. So some checks run with
a grammar that leaves the model nothing else to say.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # ships no hints

from tests.service.openai.outside.demo_front import Endpoint, finish
from tests.service.openai.outside.outcomes import judge, read
from tests.support.toolchains import require

pytestmark = pytest.mark.sweep
MODULE = "github.com/avelrl/openai-compatible-tester"
VARIABLE = "PENSTOCK_OPENAI_COMPATIBLE_TESTER"
"""The folder of a checkout of the tester, where Go's module proxy does not have it."""
FORCED = {
    "chat.basic": "OK",
    "chat.stream": "HELLO",
    "chat.memory": "999",
    "responses.basic": "OK",
    "responses.stream": "HELLO",
    "responses.store_get": "OK",
    "responses.memory.prev_id": "123",
}
"""Check -> the only words that the model may answer with."""
FREE = (
    "sanity.models",
    "chat.tool_call",
    "chat.tool_call.required",
    "chat.error_shape",
    "chat.structured.json_schema",
    "chat.structured.json_object",
    "responses.structured.json_schema",
    "responses.structured.json_object",
    "responses.tool_call",
    "responses.tool_call.required",
    "responses.custom_tool",
    "responses.custom_tool.grammar",
    "responses.error_shape",
    "responses.conversations",
)


def sources(version: str) -> Path:
    """Return the folder of the tester's sources. The test is skipped where there are none.

    This is no failure where toolchains are required: the module is in no package registry, and not every
    proxy for Go's modules has it.
    """
    if given := os.environ.get(VARIABLE):
        return Path(given)
    done = subprocess.run(
        ["go", "mod", "download", "-json", f"{MODULE}@{version}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{MODULE}@{version} could not be downloaded; {VARIABLE} may name a checkout of it")
    return Path(json.loads(done.stdout)["Dir"])


def profile(endpoint: Endpoint, name: str, extra: dict[str, Any]) -> dict[str, Any]:
    """How the tester calls the front: with these fields in the body of each request."""
    return {"name": name, "chat_model": endpoint.model, "responses_model": endpoint.model, "extra": extra}


def verdict(line: dict[str, Any]) -> str | None:
    """Return what the tester has against an answer, or None."""
    if line["compat_status"] != "pass":
        return f"{line['compat_status']}: {line.get('compat_error_message', '')}"
    if line["spec_status"] != "pass":
        return f"not OpenAI's shape: {line.get('spec_error_message', '')}"
    return None


def test_all_checks(endpoint: Endpoint, tmp_path: Path) -> None:
    require("go")
    folder = sources(read("compatible-tester").version)
    program = tmp_path / "tester"
    built = subprocess.run(
        ["go", "build", "-o", program, "."], capture_output=True, text=True, cwd=folder, check=False
    )
    assert built.returncode == 0, built.stderr
    runs = {f"forced.{check}": (check,) for check in FORCED} | {"free": FREE}
    longer = {"max_tokens": 600, "max_output_tokens": 600}  # 48 by default: the demo model writes more
    free = profile(endpoint, "free", {}) | {
        "tests": {check: longer for check in FREE if ".structured." in check}
    }
    profiles = [free] + [
        profile(endpoint, f"forced.{check}", {"structured_outputs": {"choice": [words]}})
        for check, words in FORCED.items()
    ]
    models = tmp_path / "models.yaml"
    models.write_text(yaml.safe_dump({"profiles": profiles}))
    outcomes: dict[str, str | None] = {}
    for name, checks in runs.items():
        options: dict[str, str | Path] = {
            "--out-dir": tmp_path / name,
            "--base-url": endpoint.url,
            "--models": models,
            "--profile": name,
            "--tests": ",".join(checks),
        }
        done = finish(
            [program, "--no-tui", *(word for option in options.items() for word in option)],
            folder,
            {"OPENAI_API_KEY": endpoint.key},
        )
        (log,) = tmp_path.glob(f"{name}_*/full_log.jsonl")  # it adds the time to the folder's name
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert {line["test_id"] for line in lines} == set(checks), f"{done.stdout}\n{done.stderr}"
        outcomes |= {line["test_id"]: verdict(line) for line in lines}
    judge("compatible-tester", outcomes)
