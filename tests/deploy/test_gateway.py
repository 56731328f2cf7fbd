"""A real inference gateway, smg, takes a server for one more vLLM, and serves OpenAI's API on it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from penstock.client import Client
from tests.deploy.environments import environment
from tests.support.demo_server import served_demo
from tests.support.prometheus import free_port

pytestmark = pytest.mark.sweep
START_S = 120.0
PROMPT = "Once upon a time"


class Gateway:
    """A gateway before one server."""

    def __init__(self, port: int, client: Client) -> None:
        self.port, self.client = port, client

    def send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{self.port}{path}", data, headers), timeout=60) as reply:
            found: bytes = reply.read()
            return found

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self.send(path, {"model": "demo", "temperature": 0, **body}))
        return reply


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    python = environment("smg==1.13.0") / "bin" / "python"
    folder: Path = tmp_path_factory.mktemp("gateway")
    port = free_port()
    with (
        served_demo("--vllm-service") as address,
        Client(address) as client,
        (folder / "log").open("w") as log,
    ):
        command = [
            *(str(python), "-m", "smg.launch_router"),
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
            *("--backend", "vllm", "--worker-urls", f"grpc://{address}"),
        ]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            made = Gateway(port, client)
            until_s = time.monotonic() + START_S
            while True:  # it finds the server, asks it for its model, and then for its tokenizer
                with contextlib.suppress(URLError, OSError):
                    made.ask("/v1/completions", prompt="a", max_tokens=1)
                    break
                ended = process.poll() is not None or time.monotonic() > until_s
                assert not ended, (folder / "log").read_text()
                time.sleep(0.5)
            yield made
        finally:
            process.kill()
            process.wait(60)


def test_the_model_is_listed(gateway: Gateway) -> None:
    listed = json.loads(gateway.send("/v1/models"))
    assert [model["id"] for model in listed["data"]] == ["demo"]


def test_a_completion_is_what_the_contract_s_own_client_gets(gateway: Gateway) -> None:
    direct = gateway.client.generate(PROMPT, max_tokens=20, temperature=0)
    reply = gateway.ask("/v1/completions", prompt=PROMPT, max_tokens=20)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (direct.text, "length")
    assert reply["usage"]["prompt_tokens"] == direct.usage.prompt_tokens
    assert reply["usage"]["completion_tokens"] == 20


def test_a_stream_has_the_same_text_and_counts(gateway: Gateway) -> None:
    direct = gateway.client.generate(PROMPT, max_tokens=20, temperature=0)
    options = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, **options}
    lines = gateway.send("/v1/completions", body).decode().splitlines()
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for index in (0, 1):
        parts = [one["text"] for event in events for one in event["choices"] if one["index"] == index]
        assert "".join(parts) == direct.text
    assert events[-1]["usage"]["completion_tokens"] == 40


def test_a_chat_is_rendered_by_the_gateway_with_the_server_s_template(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "what is 3 + 4?"}]
    direct = gateway.client.generate(messages=messages, max_tokens=20, temperature=0, logprobs=2)
    reply = gateway.ask(
        "/v1/chat/completions", messages=messages, max_tokens=20, logprobs=True, top_logprobs=2
    )
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (direct.text, "stop")
    assert direct.logprobs is not None
    told = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert told == pytest.approx(direct.logprobs.sampled[: len(told)], abs=1e-5)
    assert len(told) >= 5


def test_a_schema_is_obeyed(gateway: Gateway) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"ok": {"enum": ["yes", "no"]}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages = [{"role": "user", "content": "hello"}]
    reply = gateway.ask("/v1/chat/completions", messages=messages, max_tokens=40, response_format=form)
    assert json.loads(reply["choices"][0]["message"]["content"])["ok"] in ("yes", "no")
