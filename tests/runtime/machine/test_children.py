"""The processes that work on what callers write. They end with the server, and files in its working directory
do not run in them. Tested with real processes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.runtime.machine.children import import_path
from penstock.server_cli.commands.demo import server_command

GENEROUS_S = 60.0
SPIN = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"

TEMPLATES = f"""
import threading, time
from penstock.runtime.chat.template_sandbox import TemplateSandbox
sandbox = TemplateSandbox(cpu_limit_s=600)
say = {{"messages": [], "chat_template": "x"}}
assert sandbox.render(say) == "x"
print(sandbox.worker_pid, flush=True)
sandbox.render({{"messages": [], "chat_template": {SPIN!r}}})
"""
HOSTILE = "start: A\nA: " + " & ".join(f"/(?s:.*){i * 7919:x}(?s:.*)/" for i in range(2000))
GRAMMARS = f"""
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.grammar.vocabulary import Vocabulary
vocabulary = Vocabulary((b"a", b"b", b"</s>"), frozenset({{2}}), (2,))
compiler = GrammarCompiler(vocabulary, CompilerConfig(time_limit_s=600.0, memory_bytes=2**34))
compiler.compile(Grammar.regex("a"))
print(compiler._sandbox._idle[0].pid, flush=True)
compiler.compile(Grammar.ebnf({HOSTILE!r}))
"""


@pytest.fixture(params=[TEMPLATES, GRAMMARS], ids=["templates", "grammars"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has started a child and given it work without end."""
    code = tmp_path / "server.py"
    code.write_text(request.param)
    with subprocess.Popen([sys.executable, "-P", str(code)], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_after_kill_9_of_the_server_no_child_is_left(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    child = int(server.stdout.readline())
    wait_until(lambda: any(is_busy(pid) for pid in family(child)), "the child does no work")
    # The busy process may hold the interpreter's lock or be in llguidance's code, so it runs none of our code
    # then.
    everybody = family(child)
    server.send_signal(signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(map(is_alive, everybody)), "a child has outlived the server")


def family(pid: int) -> list[int]:
    """Return the process, and those that it has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return [pid]
    return [pid, *map(int, children.split())]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_busy(pid: int) -> bool:
    """Say whether the process uses processor time now."""

    def used() -> int:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return 0
        return int(fields[11])

    before = used()
    time.sleep(0.1)
    return used() > before


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


MODULES = ("llguidance", "numpy", "tokenizers", "random", "transformers", "jinja2", "json", "grpc", "jax")


@pytest.fixture
def littered(tmp_path: Path) -> Path:
    """Make a directory with files that have the names of modules that we import. Each leaves a mark if it
    runs.
    """
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'marks')!r}, 'a').write({name!r} + '\\n')\nraise ImportError({name!r})\n"
        )
    return tmp_path


def marks(directory: Path) -> str:
    path = directory / "marks"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("what", [TEMPLATES, GRAMMARS], ids=["templates", "grammars"])
def test_nothing_of_the_working_directory_runs_in_a_child(what: str, littered: Path) -> None:
    """The server itself is started as a command is, without its working directory on the import path."""
    harmless = "\n".join(what.strip().splitlines()[:-1])  # leaves out the work that never ends
    done = subprocess.run(
        [sys.executable, "-P", "-c", harmless],
        cwd=littered,
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        check=False,
    )
    assert (marks(littered), done.returncode) == ("", 0), done.stderr


@pytest.mark.ci
def test_nothing_of_the_working_directory_runs_in_the_demos_server(littered: Path) -> None:
    """The server cannot listen at this address. It finds that out after all imports and before it loads a
    model.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            server_command("127.0.0.1", taken.getsockname()[1], openai_port=0, insecure=False),
            cwd=littered,
            capture_output=True,
            text=True,
            timeout=3 * GENEROUS_S,
            check=False,
        )
    assert (marks(littered), done.returncode) == ("", 1), done.stderr
    assert "cannot listen" in done.stderr


def test_import_path() -> None:
    here, there, sources = Path("/a/here"), "/a/there", Path("/a/sources")
    assert import_path(["", "/a/here", there, "/a/b/../here", "/a/sources"], here, sources) == [
        there,
        "/a/sources",
    ]
    assert import_path([there, "/a/sources"], sources, sources) == [there, "/a/sources"]
    assert os.getcwd() not in import_path(["", os.getcwd()], Path.cwd())
