"""The real Envoy with the configuration of deploy/envoy/, in front of servers of a test."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import yaml  # type: ignore[import-untyped]  # ships no hints

from tests.deploy.files import ROOT, yaml_of
from tests.deploy.programs import program
from tests.support.prometheus import free_port

FOLDER = ROOT / "deploy" / "envoy"
CONFIG = FOLDER / "envoy.yaml"
DESCRIPTORS = FOLDER / "penstock.binpb"
IN_CONTAINER = "/etc/envoy/penstock.binpb"
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """Two ways to one server."""

    address: str
    """Envoy's."""
    server: str
    """The server's own."""
    key: str

    @property
    def authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


def configured(port: int, servers: list[str]) -> Any:
    """Return the configuration as it stands, but for the addresses: Envoy's own and its servers'."""
    config = yaml_of(CONFIG)
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    (cluster,) = config["static_resources"]["clusters"]
    (group,) = cluster["load_assignment"]["endpoints"]
    group["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(number)}}}}
        for host, _, number in (server.rpartition(":") for server in servers)
    ]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (transcoder,) = (one for one in manager["http_filters"] if one["name"].endswith("grpc_json_transcoder"))
    assert transcoder["typed_config"]["proto_descriptor"] == IN_CONTAINER
    transcoder["typed_config"]["proto_descriptor"] = str(DESCRIPTORS)
    return config


def write_config(folder: Path, port: int, servers: list[str]) -> Path:
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(configured(port, servers)))
    return file


@contextlib.contextmanager
def envoy(folder: Path, *servers: str) -> Iterator[str]:
    """Run Envoy in front of servers. Gives its address once it answers."""
    port = free_port()
    command = [str(program("envoy")), "-c", str(write_config(folder, port, list(servers)))]
    log = folder / "envoy.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            address = f"127.0.0.1:{port}"
            wait_until(lambda: health_of(address) is not None or process.poll() is not None, log.read_text)
            assert process.poll() is None, log.read_text()
            yield address
        finally:
            process.terminate()
            process.wait(60)


def health_of(address: str) -> int | None:
    """Return the HTTP status of Envoy's page of health; None while it does not answer."""
    try:
        with urlopen(f"http://{address}/healthz", timeout=10) as reply:
            return int(reply.status)
    except HTTPError as error:
        return error.code
    except (URLError, ConnectionError):
        return None


def wait_until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Wait for it. `what` says, at the end of patience, what there is instead."""
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, what()
        time.sleep(0.1)
