"""The probes of the manifests, asked of a server that runs with the flags of the manifests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.client import Client, Tls
from tests.deploy.files import ROOT
from tests.deploy.manifests import manifests
from tests.support.demo_server import served_demo

CERTS = ROOT / "tests" / "service" / "certs"
ONLY_IN_A_POD = ("--host=", "--compilation-cache=", "--metrics-")

pytestmark = pytest.mark.sweep


@dataclass(frozen=True, slots=True)
class Pod:
    """A server with the flags of the variant `complete`, and folders in place of its volumes."""

    address: str
    key: str
    folder: Path

    def asked(self, probe: str) -> subprocess.CompletedProcess[str]:
        """Run the command of a probe, as the kubelet would."""
        _, *arguments = manifests("complete").container[probe]["exec"]["command"]
        return penstock(*in_folder(arguments, self.folder))


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


def in_folder(arguments: list[str], folder: Path) -> list[str]:
    """Return the arguments, with paths in the folder in place of those in a pod."""
    paths = {"/etc/penstock/": f"{folder}/", "/run/penstock/": f"{folder}/"}
    for inside, here in paths.items():
        arguments = [argument.replace(inside, here) for argument in arguments]
    return arguments


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    with tempfile.TemporaryDirectory(prefix="pod") as name:  # a Unix socket's path may have 107 characters
        yield from pod_in(Path(name))


def pod_in(folder: Path) -> Iterator[Pod]:
    """Yield a server that is started as the manifests of the variant `complete` say, with its files in this
    folder.
    """
    (folder / "tls").mkdir()
    (folder / "keys").mkdir()
    shutil.copy(CERTS / "server.pem", folder / "tls" / "tls.crt")
    shutil.copy(CERTS / "server.key", folder / "tls" / "tls.key")
    made = penstock("keys", "add", "alice", "--file", str(folder / "keys" / "keys.json"))
    assert made.returncode == 0, made.stderr
    _, *flags = manifests("complete").container["args"]
    flags = [flag for flag in flags if not flag.startswith(ONLY_IN_A_POD)]
    with served_demo(*in_folder(flags, folder), "--drain-delay", "0") as address:
        yield Pod(address, made.stdout.strip(), folder)


def test_the_commands_of_the_probes_find_the_server_well(pod: Pod) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = pod.asked(probe)
        assert (asked.returncode, asked.stdout) == (0, "SERVING\n"), asked


def test_callers_need_tls_and_a_key(pod: Pod) -> None:
    with Client(pod.address, tls=Tls(ca=CERTS / "ca.pem", name="localhost"), token=pod.key) as client:
        assert client.generate("Once upon a time", max_tokens=4).text
    for wrong in ([], ["--ca", str(CERTS / "ca.pem"), "--tls-name", "localhost"]):
        asked = penstock("info", "--addr", pod.address, *wrong)
        assert asked.returncode != 0


def test_a_probe_of_a_server_that_is_gone_fails(pod: Pod) -> None:
    command = manifests("complete").container["livenessProbe"]["exec"]["command"]
    assert penstock(*in_folder(command[1:], pod.folder / "elsewhere")).returncode == 3
