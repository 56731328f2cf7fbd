"""Runs the shell blocks of a page as one script, and lists the commands that are not run, with reasons.

All blocks of a page run one after the other in one bash, as for a reader who follows the page. Servers and
grpcurl are those of tests/docs/programs.py; all other programs are the real ones.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT, Block

_FLAG = re.compile(r"(--[a-z][a-z0-9-]*)")


def _module_exists(words: Sequence[str]) -> None:
    """Check `python -m MODULE --flags`: the module exists, and a file of its package, or of
    the package around that, knows each flag.
    """
    name = words[words.index("-m") + 1]
    path = name.replace(".", "/")
    roots = [ROOT / root for root in ("", "protos", "service", "runtime", "clients/python")]
    files = [root / f"{path}{end}" for root in roots for end in (".py", "/__main__.py")]
    found = [file for file in files if file.is_file()]
    assert found, f"no module {name}"
    package = found[0].parent
    nearby = _source_of(package if package.parent in roots else package.parent)
    for flag in _flags(words):
        # Some programs write the dashes in one place, before the names in a table.
        assert f'"{flag}"' in nearby or f'"{flag[2:]}"' in nearby, f"{name} has no {flag}"


@cache
def _source_of(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.rglob("*.py"))


def _target_exists(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in words[1:]:
        name, is_variable, _ = target.partition("=")
        there = rf"\b{name}\b" if is_variable else rf"^{name}:"
        assert re.search(there, makefile, re.M), f"the Makefile has no {name}"


def _tests_exist(words: Sequence[str]) -> None:
    """Check pytest's arguments: the files exist, and the names occur in them."""
    files = [ROOT / word.partition("::")[0] for word in words if word.startswith("tests/")]
    assert all(file.exists() for file in files), words
    if "-k" in words:
        name = words[words.index("-k") + 1]
        assert any(name in file.read_text() for file in files), f"nothing is called {name}"


def _quantize_has(words: Sequence[str]) -> None:
    """Check that the command has each flag."""
    source = (ROOT / "service/penstock/server_cli/commands/quantize.py").read_text()
    for flag in _flags(words):
        assert f'"{flag}"' in source, f"penstock quantize has no {flag}"


def _nothing(words: Sequence[str]) -> None:
    """Check nothing but the shell's grammar, which `bash -n` has checked."""


@dataclass(frozen=True, slots=True)
class NotRun:
    """Commands that no test can run."""

    pattern: str
    """What such a command begins with."""
    why: str
    check: Callable[[Sequence[str]], None]
    """What is checked instead of running it."""


NOT_RUN = (
    NotRun(r"make ", "it installs, or runs for minutes; the target must exist", _target_exists),
    NotRun(r"source \.venv/bin/activate", "the tests run in an environment of their own", _nothing),
    NotRun(r"export PATH=", "the tests have a PATH of their own", _nothing),
    NotRun(r"python -m venv ", "only a command that downloads packages needs it", _nothing),
    NotRun(r"pip install |\S*/pip install ", "it downloads packages", _nothing),
    NotRun(r"docker ", "it needs a Docker daemon, and images from a registry", _nothing),
    NotRun(r"kubectl ", "it needs a cluster", _nothing),
    NotRun(r"perf |uvx py-spy |grep penstock-engine ", "they look into a process of the reader's", _nothing),
    NotRun(
        r"gateway/bin/python |curl -s 127\.0\.0\.1:30000",
        "tests/deploy/test_gateway.py does the same with the real gateway",
        _nothing,
    ),
    NotRun(r"curl [^\n]*127\.0\.0\.1:8080", "it needs Envoy; tests/deploy/envoy runs them", _nothing),
    NotRun(r"git restore ", "it changes the reader's checkout", _nothing),
    NotRun(r"numactl ", "it needs a machine with several NUMA nodes", _nothing),
    NotRun(r"go install |protoc ", "it needs Go's plugins, from the network", _nothing),
    NotRun(
        r"(\w+=\S+ )*python -m bench\.",
        "it measures for minutes; module and flags must exist",
        _module_exists,
    ),
    NotRun(
        r"python -m examples\.",
        "it trains for minutes, and tests/examples does a few steps; module and flags must exist",
        _module_exists,
    ),
    NotRun(
        r"penstock quantize ",
        "it computes texts for half a minute, and tests/runtime/quantising does so with a smaller model",
        _quantize_has,
    ),
    NotRun(r"python -m penstock\.\S*native\.build", "it compiles C++ for a minute", _module_exists),
    NotRun(r"(\w+=\S+ )*python -m pytest ", "the suite runs them; files and names must exist", _tests_exist),
    NotRun(
        r"\S*python -m tools\.",
        "it trains a model for hours, or needs torch; the module must exist",
        _module_exists,
    ),
)


def commands(source: str) -> Iterator[str]:
    """Yield the logical lines of a shell block, joined where a backslash or an open quote continues them.
    Lines that are comments are left out.
    """
    waiting = ""
    for line in source.splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line
        if waiting.endswith("\\") or not _is_whole(waiting):
            continue
        if waiting.strip() and not waiting.lstrip().startswith("#"):
            yield waiting
        waiting = ""
    assert not waiting, f"a block ends within {waiting!r}"


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "), comments=True)


def rule_of(command: str) -> NotRun | None:
    """Why the command is not run; None if it is."""
    return next((rule for rule in NOT_RUN if re.match(rule.pattern, command)), None)


def script_of(found: Sequence[Block]) -> str:
    """Make one script of a page's blocks. It prints where each block stands before it runs it."""
    parts = ["set -euo pipefail"]
    for block in found:
        parts.append(f"echo; echo '== {block.name}'")
        parts += [command for command in commands(block.source) if rule_of(command) is None]
    return "\n".join(parts) + "\n"


def _flags(words: Sequence[str]) -> list[str]:
    return [found[0] for word in words if (found := _FLAG.match(word))]
