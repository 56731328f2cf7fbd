"""/openapi.json: a document that is valid, tells of every endpoint, and whose schemas are those of real
requests and answers.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.openai.app import ENDPOINTS
from penstock.openai.describing import ANSWERS, SCHEMAS, document
from tests.deploy.environments import environment
from tests.service.openai.rig import front_rig

VALIDATOR = "openapi-spec-validator==0.9.0"


@pytest.fixture
def made() -> Any:
    """Return the document, as programs read it."""
    return json.loads(json.dumps(document(ENDPOINTS, "1.2.3")))


def against(made: Any, name: str, value: Any) -> None:
    """Check a value by one of the document's schemas."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": made["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_it_tells_of_every_endpoint(made: Any) -> None:
    told = {(method.upper(), path) for path, found in made["paths"].items() for method in found}
    api = {(row.method, re.sub(r":\w+}", "}", row.path)) for row in ENDPOINTS if row.is_api}
    assert told == api | {("GET", "/health")}


def test_its_schemas_are_schemas_and_all_references_lead_somewhere(made: Any) -> None:
    schemas = made["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(made)))
    assert named <= schemas.keys()
    assert SCHEMAS.keys() <= schemas.keys()


def test_bodies_are_told_as_they_are_read(made: Any) -> None:
    for row in ENDPOINTS:
        if row.body is not None:
            schema = made["components"]["schemas"][row.body.__name__]
            assert schema["additionalProperties"] is False
            names = {field.alias or name for name, field in row.body.model_fields.items()}
            assert schema["properties"].keys() == names | row.body.ignored


async def test_the_front_serves_it_and_answers_as_it_says() -> None:
    async with front_rig() as rig:
        reply = await rig.http.get("/openapi.json")
        made = reply.json()
        assert made["openapi"] == "3.1.0"
        for path in ("/v1/models", "/health", "/tokenizer_info"):
            against(made, ANSWERS[path][0], (await rig.http.get(path)).json())
        for path, name in {"/v1/models": "ModelPage", "/v1/models/fake": "AnthropicModel"}.items():
            found = await rig.http.get(path, headers={"anthropic-version": "2023-06-01"})
            against(made, name, found.json())
        prompts: dict[str, Any] = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
            "/v1/completions": {"prompt": "hi"},
        }
        for path, prompt in prompts.items():
            body = {"model": "fake", **prompt}
            whole, part = ANSWERS[path]
            assert part is not None
            against(made, whole, (await rig.http.post(path, json=body)).json())
            events = (await rig.http.post(path, json=body | {"stream": True})).text.split("\n\n")[:-2]
            for event in events:
                against(made, part, json.loads(event.removeprefix("data: ")))
        for path, asked in (
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ):
            against(made, ANSWERS[path][0], (await rig.http.post(path, json=asked)).json())
        refused = await rig.http.get("/v1/models/other")
        assert str(refused.status_code) in made["paths"]["/v1/models/{model}"]["get"]["responses"]
        against(made, "Error", refused.json())


async def test_answers_about_files_and_batches_are_as_it_says(tmp_path: Path) -> None:
    async with front_rig(settings={"files": tmp_path}) as rig:
        made = (await rig.http.get("/openapi.json")).json()
        form = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
        file = (await rig.http.post("/v1/files", **form)).json()  # type: ignore[arg-type]  # a table of both
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await rig.http.post("/v1/batches", json=body)).json()
        against(made, "File", file)
        against(made, "Batch", batch)
        while batch["status"] == "validating":
            batch = (await rig.http.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["errors"]["data"]
        against(made, "Batch", batch)
        against(made, "FileList", (await rig.http.get("/v1/files")).json())
        against(made, "BatchList", (await rig.http.get("/v1/batches")).json())
        against(made, "DeletedFile", (await rig.http.delete(f"/v1/files/{file['id']}")).json())


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30},
}
"""A request to each endpoint that answers with a stream if it is asked to."""


async def test_answers_and_the_events_of_streams_are_as_it_says() -> None:
    async with front_rig() as rig:
        made = (await rig.http.get("/openapi.json")).json()
        assert ASKED.keys() == {path for path, (_, event) in ANSWERS.items() if event is not None}
        for path, body in ASKED.items():
            whole, event = ANSWERS[path]
            asked = body | {"model": "fake"}
            against(made, whole, (await rig.http.post(path, json=asked)).json())
            stream = (await rig.http.post(path, json=asked | {"stream": True})).text
            events = re.findall(r"^data: (\{.*)$", stream, re.M)
            assert len(events) > 1
            for sent in events:
                against(made, str(event), json.loads(sent))


@pytest.mark.sweep
def test_a_validator_of_others_takes_it(made: Any, tmp_path: Path) -> None:
    program = environment(VALIDATOR) / "bin" / "openapi-spec-validator"
    file = tmp_path / "openapi.json"

    def is_valid() -> bool:
        file.write_text(json.dumps(made))
        return subprocess.run([program, file], timeout=120, check=False).returncode == 0

    assert is_valid()
    del made["paths"]["/v1/models"]["get"]["responses"]["200"]["description"]
    assert not is_valid()
