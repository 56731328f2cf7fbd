"""Every code block of the README, docs/, CONTRIBUTING and the other pages is run, or else checked.

Python programs and shell commands run against `penstock serve demo`, a real server that this file starts.
Commands that no test can run are listed in tests/docs/shell.py, each with its reason and with what is checked
instead.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from penstock.client import Client, Ebnf, JsonSchema
from tests.docs import programs
from tests.docs.pages import ROOT, Block, blocks
from tests.docs.readmes import READMES
from tests.docs.shell import NOT_RUN, commands, rule_of, script_of, words_of
from tests.support.demo_server import served_demo
from tests.support.toolchains import go_program

pytestmark = pytest.mark.ci

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_HTTP = "127.0.0.1:8000"
IN_THE_ROOT = ("CONTRIBUTING.md", "adding-a-model.md")
"""Pages for those who change Penstock, whose programs run in the repository's root."""
FIRST_PAGES = ("README.md", "docs/start/quickstart.md")


def blocks_in(*languages: str) -> list[Block]:
    return [block for block in blocks() if block.language in languages]


def params(found: list[Block]) -> list[object]:
    return [pytest.param(block, id=block.name) for block in found]


@pytest.fixture(scope="module")
def http_port() -> str:
    """Return the port of that server's OpenAI front."""
    return free_port()


@pytest.fixture(scope="module")
def demo(http_port: str) -> Iterator[str]:
    """Yield the address of a server of the demo model."""
    with served_demo("--openai-port", http_port) as address:
        yield address


def free_port() -> str:
    """Find a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# -- Python --


def at(source: str, addr: str, http_port: str) -> str:
    """Return the program with the addresses of a server and its OpenAI front in place of the default ones."""
    source = source.replace(DEFAULT_ADDRESS, addr).replace(DEFAULT_HTTP, f"127.0.0.1:{http_port}")
    source = re.sub(r"\b(Client)\(\)", rf'\1("{addr}")', source)
    return re.sub(r"\b(Client)\((?=\w+=)", rf'\1("{addr}", ', source)


def run(source: str) -> None:
    exec(compile(source, "example", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", params(blocks_in("python")))
def test_programs_run_and_print(
    demo: str,
    http_port: str,
    block: Block,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if block.page.name not in IN_THE_ROOT:
        monkeypatch.chdir(tmp_path)  # some leave files where they run
    run(at(block.source, demo, http_port))
    assert capsys.readouterr().out.strip()


def test_programs_ask_the_server_of_this_file() -> None:
    asking = [block for block in blocks_in("python") if "Client(" in block.source]
    assert asking
    for block in asking:
        assert block.source.count("Client(") == at(block.source, "here:1", "2").count('Client("here:1"'), (
            block.name
        )


def test_the_loop_of_tools_ends_with_an_answer_that_has_the_result(
    demo: str, http_port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [
        block for block in blocks_in("python") if "call.result" in block.source and "Client(" in block.source
    ]
    run(at(block.source, demo, http_port))
    shown = capsys.readouterr().out
    assert "Paris" in shown
    assert "21" in shown


# -- the shell --


def shell_pages() -> Iterator[object]:
    """Yield the pages with commands, and whether the real grpcurl runs. CI always has those that a newcomer
    runs first; the sweep has the others, and with the real grpcurl all pages that call it. The READMEs of
    clients in other languages need toolchains: tests/clients runs them.
    """
    here = [block for block in blocks_in("sh") if block.page.parent not in READMES]
    for page, group in groupby(here, lambda block: block.page):
        name, found = str(page.relative_to(ROOT)), list(group)
        if name in FIRST_PAGES:
            yield pytest.param(found, False, id=name)
        elif not calls_grpcurl(found):
            yield pytest.param(found, False, id=name, marks=pytest.mark.sweep)
        if calls_grpcurl(found):
            yield pytest.param(found, True, id=f"{name}-grpcurl", marks=pytest.mark.sweep("grpcurl"))


def calls_grpcurl(found: list[Block]) -> bool:
    return any(command.startswith("grpcurl ") for block in found for command in commands(block.source))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a working folder with a short name: the path of a Unix socket may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="docs") as name:
        yield Path(name)
        programs.stop_server(Path(name))


def install_programs(folder: Path, real_grpcurl: bool) -> None:
    """Put `penstock`, `python` and `grpcurl` into folder/bin, the latter real or what stands in for it."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    if real_grpcurl:
        (bin_folder / "grpcurl").symlink_to(go_program("grpcurl"))
    for name in ["penstock"] if real_grpcurl else ["penstock", "grpcurl"]:
        (bin_folder / name).write_text(
            f'#!/bin/sh\nexec {sys.executable} -m tests.docs.programs {name} "$@"\n'
        )
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for file in bin_folder.iterdir():
        if not file.is_symlink():
            file.chmod(0o755)


def needs_a_server(found: list[Block]) -> bool:
    """Say whether the page starts a server with options. Without options the server of this file is as
    good.
    """
    served = [words_of(c) for b in found for c in commands(b.source) if c.startswith("penstock serve ")]
    return any(len(words) > 3 for words in served)


@pytest.mark.parametrize(("found", "real_grpcurl"), list(shell_pages()))
def test_commands_run_in_the_order_of_the_page(
    demo: str, http_port: str, found: list[Block], real_grpcurl: bool, folder: Path
) -> None:
    install_programs(folder, real_grpcurl)
    has_own = needs_a_server(found)
    port = free_port() if has_own else demo.rpartition(":")[2]
    script = (
        script_of(found)
        .replace("50051", port)
        .replace("50052", free_port())
        .replace("9464", free_port())
        .replace("8000", free_port() if has_own else http_port)
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        env={
            **os.environ,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "PENSTOCK_ADDR": f"127.0.0.1:{port}",
            "PAGE_PORT": port if has_own else "",
        },
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for block in found:
        assert_shown(block, done.stdout)


def assert_shown(block: Block, output: str) -> None:
    """Check that the output of a block contains what the page shows in a `text` block right after it."""
    after = [b for b in blocks() if b.page == block.page and b.line > block.line]
    if not after or after[0].language != "text":
        return
    between = block.page.read_text().splitlines()[block.line + block.source.count("\n") : after[0].line - 2]
    if any(line.strip() for line in between):
        return  # it shows something else
    shown = output.partition(f"== {block.name}\n")[2].partition("\n== ")[0]
    for line in after[0].source.splitlines():
        assert line in shown, f"{after[0].name}: {line!r} was not printed:\n{shown}"


COMMANDS = [(block, command) for block in blocks_in("sh") for command in commands(block.source)]


@pytest.mark.parametrize("block", params(blocks_in("sh")))
def test_what_is_not_run_is_checked(block: Block) -> None:
    subprocess.run(["bash", "-n", "-c", block.source], check=True, timeout=60)
    for command in commands(block.source):
        rule = rule_of(command)
        if rule is not None:
            rule.check(words_of(command))


def test_no_reason_for_not_running_is_left_over() -> None:
    for rule in NOT_RUN:
        assert any(rule_of(command) is rule for _, command in COMMANDS), rule.pattern


def test_most_commands_are_run() -> None:
    ran = [command for _, command in COMMANDS if rule_of(command) is None]
    assert len([command for command in ran if command.startswith(("penstock ", "grpcurl "))]) > 30


# -- grammars --


@pytest.mark.parametrize("block", params(blocks_in("lark", "gbnf")))
def test_grammars_are_taken(demo: str, block: Block) -> None:
    with Client(demo) as client:
        assert client.generate("A list: ", constraint=Ebnf(block.source), max_tokens=100).text


def test_the_schema_of_the_reference_is_taken(demo: str) -> None:
    (block,) = [b for b in blocks_in("json") if b.page.name == "grammars.md"]
    with Client(demo) as client:
        assert client.generate("A girl: ", constraint=JsonSchema(block.source), max_tokens=100).text
