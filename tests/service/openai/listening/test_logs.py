"""The log of the front, seen from whoever reads its stderr, or does not."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging
from penstock.openai.serving.logs import open_logs
open_logs({log_format!r})
log = logging.getLogger("test")
for number in range({count}):
    log.info("line %d %s", number, "x" * {length}, extra={{"fields": {{"number": number}}}})
"""
LIMIT_S = 60


def program(log_format: str, count: int, length: int = 1) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(log_format=log_format, count=count, length=length)]


def test_all_lines_are_written_before_the_process_ends() -> None:
    done = subprocess.run(program("json", 2000), stderr=subprocess.PIPE, timeout=LIMIT_S, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["number"] for line in lines] == list(range(2000))
    assert lines[0]["message"] == "line 0 x"


def test_nothing_in_a_message_looks_like_another_line() -> None:
    found = program("text", 1)
    found[-1] = found[-1].replace('"line %d %s"', '"a\\nb\\x1b[2J %d %s"')
    done = subprocess.run(found, stderr=subprocess.PIPE, timeout=LIMIT_S, check=True, text=True)
    assert len(done.stderr.splitlines()) == 1
    assert r"a\x0ab\x1b[2J 0 x" in done.stderr


def test_a_stderr_that_nobody_reads_holds_up_neither_the_process_nor_its_end() -> None:
    with subprocess.Popen(program("text", 20_000, length=100), stderr=subprocess.PIPE) as process:
        assert process.wait(LIMIT_S) == 0
