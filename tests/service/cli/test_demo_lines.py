"""The commands that `penstock demo` prints, and the address where it calls its server."""

from __future__ import annotations

import json
import shlex
import socket
import sys

import pytest
from google.protobuf import json_format

from penstock.openai.schemas.chat import ChatBody
from penstock.server_cli.commands import demo
from penstock.v1 import inference_pb2, types_pb2


def test_a_server_that_listens_everywhere_is_asked_here():
    assert demo.addr_of("0.0.0.0", 5) == "127.0.0.1:5"
    assert demo.addr_of("::", 5) == "[::1]:5"
    assert demo.addr_of("192.0.2.1", 5) == "192.0.2.1:5"


@pytest.mark.parametrize(
    ("on_path", "folder", "script", "expected"),
    [
        (True, "", True, ("penstock", "python")),
        (False, "", True, ("venv/bin/penstock", "venv/bin/python")),
        (False, "", False, ("venv/bin/python -m penstock.cli", "venv/bin/python")),
        (False, "elsewhere", True, ("{root}/venv/bin/penstock", "{root}/venv/bin/python")),
    ],
)
def test_the_lines_to_paste_work_without_the_virtual_environment_on_path(
    tmp_path, monkeypatch, on_path, folder, script, expected
):
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    if script:
        (programs / "penstock").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(programs) if on_path else "")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.chdir(tmp_path / folder)
    assert demo.programs() == tuple(part.format(root=tmp_path) for part in expected)


def test_the_grpcurl_line_is_a_request_of_the_contract():
    line = demo.PASTE.format(prompt=demo.PROMPT, addr="a:1", url="", flag="", program="", python="")
    words = shlex.split(line[line.index("grpcurl") : line.index("/Stream")].replace("\\\n", ""))
    assert words[:3] == ["grpcurl", "-plaintext", "-d"]
    assert json_format.Parse(words[3], inference_pb2.StreamRequest()) == inference_pb2.StreamRequest(
        prompt="Once upon a time", stopping=types_pb2.StoppingParams(max_tokens=60)
    )
    assert words[4:] == ["a:1", "penstock.v1.InferenceService"]


def test_the_curl_line_is_a_request_of_openais_api():
    text = demo.PASTE.format(prompt="", addr="", url="http://a:1", flag="", program="", python="")
    words = shlex.split(text[text.index("curl http") : text.index("\n\nor from")].replace("\\\n", ""))
    assert words[:4] == ["curl", "http://a:1/v1/chat/completions", "-H", "content-type: application/json"]
    ChatBody.model_validate(json.loads(words[5]))


def test_a_taken_port_of_openais_api_is_passed_over(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr(demo, "OPENAI_PORT", taken)
        assert demo.free_openai_port("127.0.0.1", 5) not in (0, taken)
    assert demo.free_openai_port("127.0.0.1", taken) not in (0, taken)
    assert demo.free_openai_port("127.0.0.1", 5) == taken
