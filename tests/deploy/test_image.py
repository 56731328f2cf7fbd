"""The Dockerfile makes an image that serves, and in which the compose file finds what it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deploy.files import PARTS, ROOT, yaml_of
from tests.deploy.manifests import health_arguments
from tests.deploy.programs import run_program
from tests.docs.test_data_blocks import serve_arguments

FILE = ROOT / "Dockerfile"


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, as their names and the rest."""
    text = FILE.read_text(encoding="utf-8").replace("\\\n", "")
    found = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in found]


@pytest.mark.sweep
def test_hadolint_finds_nothing() -> None:
    done = run_program("hadolint", "--no-color", FILE)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_it_starts_a_server(lines: list[tuple[str, str]]) -> None:
    last = dict(lines)
    assert json.loads(last["ENTRYPOINT"]) == ["penstock", "serve"]
    arguments = serve_arguments(json.loads(last["CMD"]))
    assert arguments.model == "demo"
    assert int(last["EXPOSE"]) == arguments.port


def test_it_asks_the_server_how_it_is(lines: list[tuple[str, str]]) -> None:
    options, _, command = dict(lines)["HEALTHCHECK"].partition(" CMD ")
    timeout_s, start_s = re.findall(r"--timeout=(\d+)s .*--start-period=(\d+)m", options)[0]
    asked = health_arguments(json.loads(command))
    assert asked.service == ""
    assert asked.timeout < int(timeout_s)
    assert int(start_s) >= 10  # minutes, for compiling


def test_its_user_is_not_root(lines: list[tuple[str, str]]) -> None:
    last_stage = lines[max(at for at, (name, _) in enumerate(lines) if name == "FROM") :]
    user = dict(last_stage)["USER"]
    assert int(user) > 0
    assert f"useradd --create-home --uid {user} " in " ".join(
        rest for name, rest in last_stage if name == "RUN"
    )


@pytest.mark.sweep
def test_what_docker_is_given_is_enough_to_build_from(tmp_path: Path) -> None:
    """Both wheels can be built from it; here without the kernels, which take a minute to compile."""
    first, *names = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    assert (first, names.pop()) == ("*", "**/__pycache__")
    context = tmp_path / "context"
    for name in names:
        source, target = ROOT / name.removeprefix("!"), context / name.removeprefix("!")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for project in (context / "clients" / "python", context):
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        done = subprocess.run(
            [*command, "--outdir", str(tmp_path), str(project)],
            env={**os.environ, "PATH": ""},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    files = {name for wheel in tmp_path.glob("*.whl") for name in zipfile.ZipFile(wheel).namelist()}
    wanted = {"penstock/v1/inference_pb2.py", "penstock/client/client.py", "penstock/service/server.py"}
    assert wanted <= files
    assert any(name.startswith("penstock/runtime/ops/native/src/") for name in files)


def test_its_commands_are_commands_of_a_shell(lines: list[tuple[str, str]]) -> None:
    for name, rest in lines:
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True, timeout=60)


def test_the_compose_file_uses_the_folders_that_it_has(lines: list[tuple[str, str]]) -> None:
    commands = " ".join(rest for name, rest in lines if name == "RUN")
    service = yaml_of(PARTS / "compose.yml")["services"]["penstock"]
    said = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(service["command"])))
    assert said["compilation-cache"].startswith(dict(lines)["VOLUME"] + "/")
    assert [volume.split(":")[1] for volume in service["volumes"]] == [dict(lines)["VOLUME"]]
    assert f"install -d -o penstock {dict(lines)['VOLUME']}" in commands
