"""A real Prometheus in a process of its own, for tests that ask it what it has seen."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml  # type: ignore[import-untyped]  # ships no hints

PROGRAM = shutil.which("prometheus")
WAIT_S = 150.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Answers questions over Prometheus' HTTP API."""

    address: str

    def ask(self, path: str, **parameters: Any) -> Any:
        """Return the `data` of an answer. AssertionError if Prometheus refuses the question."""
        url = f"http://{self.address}/api/v1/{path}?{urlencode(parameters, doseq=True)}"
        with urlopen(url, timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values_of(self, promql: str, since_s: float) -> list[float]:
        """All finite values of the expression, at every second since this time of the Unix epoch."""
        now = time.time()
        found = self.ask("query_range", query=promql, start=since_s, end=now, step="1")
        values = [float(value) for series in found["result"] for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]

    def wait_until(self, condition: Callable[[], bool], what: Callable[[], object]) -> None:
        """Wait for what Prometheus will know. `what` says, at the end of patience, what there is instead."""
        until_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until_s, what()
            time.sleep(0.5)


@contextlib.contextmanager
def prometheus(folder: Path, config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """Run Prometheus with this configuration; its data is in the folder. It remembers exemplars."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                str(PROGRAM),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            _wait_ready(address, process, folder / "prometheus.log")
            yield Prometheus(address)
        finally:
            process.terminate()
            process.wait(60)


def free_port() -> int:
    """Find a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + WAIT_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        with contextlib.suppress(URLError, ConnectionError), urlopen(f"http://{address}/-/ready", timeout=5):
            return
        time.sleep(0.1)
