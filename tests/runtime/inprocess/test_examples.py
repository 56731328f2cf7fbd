"""The programs in examples/ run with the demo model, each as its docstring says."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
START_S = 280


def run(name: str, *arguments: str, typed: str = "") -> str:
    """Run the program, and return what it printed."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=START_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    """tests/examples has the tests of examples that are packages."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"chat.py", "batch.py", "web.py"}


def test_chat() -> None:
    printed = run("chat.py", "--max-tokens", "40", typed="Tell me a story.\nWhat time is it?\n\n")
    assert len(re.findall(r"\(\d+ tokens, \d+ a second\)", printed)) == 2


def test_batch_goes_on_where_it_ended(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    items = [{"id": f"p{i}", "prompt": f"Once upon a time there were {i}"} for i in range(6)]
    items[2]["prompt"] = "x " * 100_000
    prompts.write_text("\n".join(map(json.dumps, items)))
    answers.write_text(json.dumps({"id": "p0", "text": "of an earlier run", "finish": "eos"}) + "\n")
    run("batch.py", str(prompts), str(answers), "--at-once", "3", "--max-tokens", "8")
    found = {item["id"]: item for item in map(json.loads, answers.read_text().splitlines())}
    assert sorted(found) == [f"p{i}" for i in range(6)]
    assert found["p0"]["text"] == "of an earlier run"
    assert "tokens" in found["p2"]["error"]
    for number in (1, 3, 4, 5):
        assert found[f"p{number}"]["text"]
        assert found[f"p{number}"]["finish"] in ("eos", "max_tokens")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Yield the port on which examples/web.py serves."""
    command = [sys.executable, "-u", str(EXAMPLES / "web.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ) as server:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
        assert found, "the server did not start"
        yield int(found[1])
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


@contextlib.contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def post(connection: http.client.HTTPConnection, fields: object) -> http.client.HTTPResponse:
    connection.request("POST", "/generate", json.dumps(fields))
    return connection.getresponse()


def test_web_streams_events(port: int) -> None:
    with connected(port) as connection:
        asked = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        answer = post(connection, asked)
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
        events = [json.loads(line[6:]) for line in answer.read().splitlines() if line]
    assert "".join(event.get("text", "") for event in events)
    assert events[-1] == {"finish": "max_tokens"}


@pytest.mark.parametrize("fields", [{}, [], {"prompt": 7}, {"prompt": "x", "heat": 1}, {"prompt": ""}])
def test_web_refuses_what_is_no_request(port: int, fields: object) -> None:
    with connected(port) as connection:
        answer = post(connection, fields)
        assert answer.status == 400
        assert json.loads(answer.read())["error"]


def test_web_ends_a_request_whose_reader_is_gone(port: int) -> None:
    with connected(port) as connection:
        answer = post(connection, {"prompt": "Once", "max_tokens": 2000, "temperature": 1})
        answer.read(10)
    for _ in range(2000):
        with connected(port) as connection:
            connection.request("GET", "/load")
            load = json.loads(connection.getresponse().read())
        if load == {"running": 0, "waiting": 0}:
            return
    raise AssertionError(load)
