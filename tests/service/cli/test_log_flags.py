"""The flags of the log, and what a server process writes where."""

from __future__ import annotations

import argparse
import json
import logging
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server_cli.commands import serve
from penstock.server_cli.serving import serve_flags
from penstock.server_cli.serving.serve_flags import log_options
from penstock.service.telemetry.logs.writing import LogOptions
from penstock.v1 import inference_pb2_grpc
from tests.service.cli.test_serve import fake_process
from tests.service.rig import generate


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_flags.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", "demo", *arguments])


def test_defaults_are_those_of_the_options() -> None:
    assert log_options(parse()) == LogOptions()
    assert serve_flags.server_options(parse()).access_log
    assert not serve_flags.server_options(parse("--no-access-log")).access_log


def test_every_flag_becomes_its_option(tmp_path: Path) -> None:
    file = ["--log-file", str(tmp_path / "log"), "--log-file-bytes", "2M", "--log-file-count", "7"]
    args = parse("--log-level", "debug", "--log-format", "json", *file)
    assert log_options(args) == LogOptions(
        log_level="debug",
        log_format="json",
        log_file=tmp_path / "log",
        log_file_bytes=2 * 2**20,
        log_file_count=7,
    )
    never = parse("--log-file", str(tmp_path / "log"), "--log-file-bytes", "none")
    assert log_options(never).log_file_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--log-file", "/none/of/these/log"], "--log-file: /none/of/these/log cannot be written: No such"),
        (["--log-file-count", "3"], "--log-file-count: needs --log-file"),
        (["--log-file", "log", "--log-file-bytes", "5"], "--log-file-bytes: must be 0 or at least 65536"),
    ],
)
def test_a_bad_value_is_one_clear_line(
    arguments: list[str], complaint: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    assert serve.run(parse("--port", "0", *arguments)) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"penstock serve: {complaint}")
    assert errors.count("\n") == 1


@pytest.mark.ci
def test_a_process_writes_json_into_its_file_and_only_addresses_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with fake_process("--port", "0", "--log-file", str(path), "--log-format", "json") as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        with grpc.insecure_channel(address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            stub.Generate(generate("a", request_id="mine", stopping={"max_tokens": 2}), timeout=60)
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        ours = [line for line in server.lines if not line.startswith("[transformers]")]  # at its import
        assert ours == [f"penstock: ready on {address}\n"]
    said = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.keys() >= {"ts", "level", "logger", "message"} for line in said)
    (call,) = (line for line in said if line["logger"] == "penstock.access")
    assert (call["request_id"], call["code"], call["generated_tokens"]) == ("mine", "OK", 2)
    assert said[-1]["message"] == "stopped", "the last line is written before the process ends"
