"""The log of the front and of the server, seen from whoever reads its stderr, or does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging
{opened}
log = logging.getLogger("test")
for number in range({count}):
    log.info("line %d %s", number, "x" * {length})
"""
FRONT = "from penstock.openai.serving.logs import open_logs; open_logs({log_format!r})"
SERVER = "from penstock.service.telemetry.logs.writing import LogOptions, open_logs; open_logs(LogOptions())"
LIMIT_S = 60


def program(opened: str, count: int, length: int = 1) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(opened=opened, count=count, length=length)]


def test_all_lines_are_written_before_the_process_ends() -> None:
    done = subprocess.run(
        program(FRONT.format(log_format="json"), 2000), stderr=subprocess.PIPE, timeout=LIMIT_S, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["message"] for line in lines] == [f"line {number} x" for number in range(2000)]


def test_nothing_in_a_message_looks_like_another_line() -> None:
    found = program(FRONT.format(log_format="text"), 1)
    found[-1] = found[-1].replace('"line %d %s"', '"a\\nb\\x1b[2J %d %s"')
    done = subprocess.run(found, stderr=subprocess.PIPE, timeout=LIMIT_S, check=True, text=True)
    assert len(done.stderr.splitlines()) == 1
    assert r"a\nb\x1b[2J 0 x" in done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("opened", [FRONT.format(log_format="text"), SERVER], ids=["front", "server"])
def test_a_stderr_that_nobody_reads_holds_up_neither_the_process_nor_its_end(opened: str) -> None:
    with subprocess.Popen(program(opened, 20_000, length=100), stderr=subprocess.PIPE) as process:
        assert process.wait(LIMIT_S) == 0
