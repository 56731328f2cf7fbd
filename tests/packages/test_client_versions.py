"""penstock-client with the oldest versions of what it needs, and with the newest, without the engine.

The tests of the client run there, against their own handwritten server, with all warnings as errors: also
those that protobuf and grpcio give for generated code that is older or newer than themselves.
"""

from __future__ import annotations

import ast
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.packages.environments import environment, install, variables, versions
from tools.wheels import ROOT, build_client

pytestmark = pytest.mark.timeout(600)
# What tests/clients imports, in the versions that are in use here.
TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "numpy", "safetensors", "ml-dtypes")
NEEDED = (
    "google-crc32c",
    "googleapis-common-protos",
    "grpcio",
    "grpcio-health-checking",
    "protobuf",
    "rich",
    "tqdm",
)
NOT_THERE = ("jax", "flax", "penstock.runtime", "penstock.server_cli", "penstock.service", "safetensors.flax")
SERVERS = ("tests.service", "tests.support", "tests.runtime")
SERVER_COMMANDS = "test_cli_usage.py"
"""The file that also tries the commands that come with the engine."""
RUN_S = 500


def imported_by(file: Path) -> set[str]:
    """Return the modules that the file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def of_the_client_alone() -> list[str]:
    """Return the files of tests/clients that need neither the engine nor a real server."""
    absent = (*NOT_THERE, *SERVERS)
    return [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests" / "clients").rglob("test_*.py"))
        if file.name != SERVER_COMMANDS
        and not any(f"{name}.".startswith(f"{part}.") for name in imported_by(file) for part in absent)
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_client(tmp_path_factory.mktemp("dist"))


@pytest.mark.sweep  # each has an environment of its own, so they are drawn one by one
@pytest.mark.parametrize(
    ("arguments", "protobuf"),
    [
        (["--resolution", "lowest"], "5.26.1"),
        (["protobuf==6.30.0", "grpcio-health-checking==1.72.2"], "6.30.0"),
        (["--resolution", "highest"], "7."),
    ],
    ids=["oldest", "strictest", "newest"],
)
def test_the_client_passes_its_tests(
    arguments: list[str], protobuf: str, wheel: Path, tmp_path: Path
) -> None:
    """protobuf 6.30.0 is the strictest about code that another major version has generated."""
    programs = environment(tmp_path / "venv", *arguments, wheel)
    before = versions(programs)
    assert before["protobuf"].startswith(protobuf)
    assert before.keys().isdisjoint({"jax", "jaxlib", "numpy", "penstock"})
    install(programs, *(f"{tool}=={metadata.version(tool)}" for tool in TOOLS))
    after = versions(programs)
    assert {name: after[name] for name in NEEDED} == {name: before[name] for name in NEEDED}

    files = of_the_client_alone()
    assert len(files) > 20
    done = subprocess.run(
        [
            programs / "python",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not (ci or sweep)",
            *files,
        ],
        cwd=ROOT,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 500
