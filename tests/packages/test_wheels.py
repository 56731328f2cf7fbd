"""Both wheels, in empty environments: what is in them, and that they call and serve without a compiler."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packages.environments import environment, output_of, variables, versions
from tests.support.models.compilation_cache import TEST_CACHE
from tools.wheels import ROOT, build_client, build_engine

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]
START_S = 280.0
LIBRARY = re.compile(r"penstock/runtime/ops/native/shipped/penstock-[0-9a-f]{16}\.so")


@dataclass(frozen=True)
class Wheels:
    client: Path
    engine: Path


def files_in(wheel: Path) -> set[str]:
    """Return the paths of the files in a wheel, but for its metadata."""
    names = ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name and not name.endswith("/")}


def metadata_of(wheel: Path, name: str) -> str:
    with ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def tracked(*roots: str) -> set[str]:
    """Return the files of these source roots that git knows, as paths below the root."""
    listed = subprocess.check_output(["git", "ls-files", "-z", *roots], cwd=ROOT, text=True).split("\0")
    return {file[file.index("penstock/") :] for file in listed if "/penstock/" in file}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    out = tmp_path_factory.mktemp("dist")
    return Wheels(build_client(out), build_engine(out))


@pytest.fixture(scope="module")
def client(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the client alone."""
    return environment(tmp_path_factory.mktemp("client") / "venv", wheels.client)


@pytest.fixture(scope="module")
def engine(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with both."""
    pins = ROOT / "constraints.txt"
    where = tmp_path_factory.mktemp("engine") / "venv"
    return environment(where, "--constraint", pins, wheels.client, wheels.engine)


def test_each_file_is_in_one_wheel(wheels: Wheels) -> None:
    of_client, of_engine = files_in(wheels.client), files_in(wheels.engine)
    assert of_client == tracked("protos", "clients/python")
    (library,) = of_engine - tracked("service", "runtime")
    assert LIBRARY.fullmatch(library)
    assert tracked("service", "runtime") <= of_engine
    assert not of_client & of_engine
    for wheel in (wheels.client, wheels.engine):
        assert "Apache License" in metadata_of(wheel, "licenses/LICENSE")


def test_their_tags_say_where_they_run(wheels: Wheels) -> None:
    """auditwheel has looked which glibc the library needs; it is for no version of Python."""
    assert wheels.client.name.endswith("-py3-none-any.whl")
    assert re.search(r"-py3-none-manylinux_2_\d\d_x86_64\.whl$", wheels.engine.name)
    tag = wheels.engine.stem[wheels.engine.stem.index("py3-none") :]
    assert f"Tag: {tag}\n" in metadata_of(wheels.engine, "WHEEL")


def test_the_sdists_have_what_the_wheels_are_built_of(wheels: Wheels) -> None:
    for wheel, name, roots in (
        (wheels.client, "penstock_client", ("protos", "clients/python")),
        (wheels.engine, "penstock", ("service", "runtime")),
    ):
        (sdist,) = wheel.parent.glob(f"{name}-*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = archive.getnames()
        inside = {path[path.index("/penstock/") + 1 :] for path in names if "/penstock/" in path}
        assert tracked(*roots) <= inside


def test_the_client_brings_no_engine_and_says_what_is_missing(client: Path) -> None:
    assert versions(client).keys().isdisjoint({"jax", "jaxlib", "flax", "numpy", "penstock"})
    command = [str(client / "penstock"), "serve", "demo"]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("penstock serve: it needs the engine, which is not installed here. ")
    assert "Traceback" not in done.stderr
    assert "serve a model over gRPC" in output_of(client / "penstock", "--help")


@pytest.fixture(scope="module")
def server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the address of `penstock serve demo`, and what it logged, without a compiler or a home with
    caches.
    """
    flags = [
        "--port",
        "0",
        "--openai-port",
        "0",
        "--native",
        "require",
        "--grace",
        "0",
        "--compilation-cache",
        str(TEST_CACHE),
    ]
    with subprocess.Popen(
        [str(engine / "penstock"), "serve", "demo", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path_factory.mktemp("cwd"),
        env={"PATH": str(engine), "HOME": str(tmp_path_factory.mktemp("home")), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        slow = threading.Timer(START_S, process.kill)
        slow.start()
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"ready on (\S+)", line):
                break
        else:
            raise AssertionError(f"the demo server did not start:\n{''.join(said)}")
        slow.cancel()
        rest = threading.Thread(target=process.stdout.read, daemon=True)  # otherwise its pipe would fill
        rest.start()
        try:
            yield found[1], "".join(said)
        finally:
            process.terminate()
            process.wait(60)
            rest.join(60)


def test_the_demo_is_served_by_the_library_of_the_wheel(server: tuple[str, str], client: Path) -> None:
    """The server would refuse to start without the library, because there is no compiler on its PATH."""
    addr, log = server
    assert re.search(r"native kernels: (AVX2|AVX512|AVX512_BF16|AMX)$", log, re.MULTILINE)
    assert "compiling the native kernels" not in log
    request = ["Once upon a time", "--addr", addr, "--max-tokens", "20", "--temperature", "0", "--json"]
    shown = output_of(client / "penstock", "generate", *request)
    assert json.loads(shown)["usage"]["completion_tokens"] == 20


ASK = """
import sys
from penstock.client import Client
with Client(sys.argv[1]) as client:
    options = {"max_tokens": 20, "temperature": 0.0}
    whole = client.generate("Once upon a time", **options).text
    events = client.stream("Once upon a time", **options)
    assert whole == "".join(event.delta for event in events if hasattr(event, "delta"))
    print(whole)
"""


def test_the_wheel_has_the_page_and_the_front_that_serves_it(server: tuple[str, str]) -> None:
    found = re.search(r"openai on (\S+)", server[1])
    assert found, server[1]
    with urllib.request.urlopen(f"{found[1]}/", timeout=60) as reply:
        page = reply.read().decode()
    for path in re.findall(r'(?:src|href)="(page/[^"]+)"', page):
        with urllib.request.urlopen(f"{found[1]}/{path}", timeout=60) as reply:
            assert reply.read(), path


def test_both_environments_call_it_from_python(server: tuple[str, str], client: Path, engine: Path) -> None:
    answers = {
        output_of(programs / "python", "-W", "error", "-c", ASK, server[0]) for programs in (client, engine)
    }
    (answer,) = answers
    assert len(answer.split()) > 5
