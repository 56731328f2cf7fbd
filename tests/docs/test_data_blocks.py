"""Blocks that are data for other programs: they parse, and the server accepts what they tell it."""

from __future__ import annotations

import argparse
import configparser
import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence

import pytest
import yaml  # type: ignore[import-untyped]  # ships no hints
from google.protobuf import json_format

from penstock.cli.__main__ import Parser
from penstock.v1 import inference_pb2
from tests.docs.pages import Block, blocks

CHECKED = {"sh", "python", "lark", "gbnf", "js", "java", "xml"}
"""Languages whose blocks tests/docs/test_blocks.py runs, or tests/deploy/envoy, or tests/clients/java."""
SHOWN = {"text", "diff", "proto"}
"""Languages of printed output, or of parts of files, where there is nothing to run."""
PARSED = {"json", "yaml", "ini", "go"}


def blocks_in(language: str) -> list[object]:
    return [pytest.param(block, id=block.name) for block in blocks() if block.language == language]


def test_every_block_has_a_language_that_is_checked() -> None:
    unknown = [b.name for b in blocks() if b.language not in CHECKED | SHOWN | PARSED]
    assert unknown == []


def serve_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments as `penstock serve` does; a wrong one fails the test."""
    serve = pytest.importorskip("penstock.server_cli.commands.serve")
    parser = Parser(prog="penstock")
    serve.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["serve", *arguments])


def test_the_arguments_are_really_read() -> None:
    with pytest.raises(SystemExit):
        serve_arguments(["demo", "--graze", "5"])


@pytest.mark.parametrize("block", blocks_in("json"))
def test_json_parses(block: Block) -> None:
    value = json.loads(block.source)
    if isinstance(value, list):  # the messages of a stream
        for message in value:
            json_format.ParseDict(message, inference_pb2.StreamResponse())


@pytest.mark.parametrize("block", blocks_in("yaml"))
def test_yaml_parses(block: Block) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(block.source))


@pytest.mark.parametrize("block", blocks_in("ini"))
def test_units_start_servers_and_give_them_time_to_end(block: Block) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names have capitals
    unit.read_string(block.source)
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/penstock")
    assert command == "serve"
    args = serve_arguments(arguments)
    assert float(unit["Service"]["TimeoutStopSec"]) >= args.drain_delay_s + args.grace_s + 8


@pytest.mark.parametrize("block", blocks_in("go"))
def test_go_programs_parse(block: Block) -> None:
    """They are only parsed: compiling them needs generated code, and packages from the network."""
    gofmt = shutil.which("gofmt")
    if gofmt is None:
        assert block.source.startswith("package main\n")
        pytest.skip("no gofmt here")
    done = subprocess.run(
        [gofmt, "-l"], input=block.source, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
