"""A server of the demo model with keys, and Envoy in front of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.deploy.envoy.running import Gateway, envoy, health_of, wait_until
from tests.deploy.files import ROOT
from tests.deploy.programs import program
from tests.support.demo_server import served_demo
from tests.support.prometheus import free_port


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    program("envoy")  # before a server starts for nothing
    folder = tmp_path_factory.mktemp("envoy")
    keys = folder / "keys.json"
    command = [sys.executable, "-m", "penstock.cli", "keys", "add", "alice", "--file", str(keys)]
    command += ["--role", "infer", "--role", "control"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    flags = ("--keys", str(keys), "--control-port", str(free_port()))
    with served_demo(*flags) as server, envoy(folder, server) as address:
        wait_until(lambda: health_of(address) == 200, lambda: health_of(address))
        yield Gateway(address, server, made.stdout.strip())
