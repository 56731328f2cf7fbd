"""Prometheus itself reads the page: its parser of OpenMetrics is the witness, exemplars included."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.service.telemetry.metrics.endpoint import Endpoint, Pages
from penstock.service.telemetry.metrics.families import VllmLabels, families, vllm_families
from tests.service.telemetry.metrics.sample_metrics import SPAN_ID, TRACE_ID, sample_registry

WAIT_S = 60.0
LABELS = VllmLabels(model_name="demo", page_size=16, num_pages=1024, has_prefix_cache=True)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    registry = sample_registry(exemplar_at_s=time.time())

    def shown():
        metrics = registry.snapshot().metrics
        yield from families(metrics)
        yield from vllm_families(metrics, LABELS)

    made = Endpoint("127.0.0.1", 0, Pages(shown))
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def prometheus(endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a Prometheus that scrapes the endpoint every second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed")
    folder: Path = tmp_path_factory.mktemp("prometheus")
    scrape = {"job_name": "penstock", "static_configs": [{"targets": [endpoint.address]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        program,
        f"--config.file={folder / 'prometheus.json'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
        "--log.level=error",
    ]
    process = subprocess.Popen(command, cwd=folder)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(WAIT_S)


def asked(prometheus: str, path: str, **question: str) -> list[Any]:
    """Return what Prometheus answers, once it is more than nothing."""
    url = f"http://{prometheus}/api/v1/{path}?{urllib.parse.urlencode(question)}"
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
                data = json.load(reply)["data"]
            found: list[Any] = data["result"] if isinstance(data, dict) else data
            if found:
                return found
        time.sleep(0.2)
    raise AssertionError(f"Prometheus has nothing for {question}")


@pytest.mark.sweep
def test_the_page_can_be_read(prometheus: str) -> None:
    (up,) = asked(prometheus, "query", query='up{job="penstock"} == 1')
    assert up["value"][1] == "1"
    (running,) = asked(prometheus, "query", query="penstock_outputs_running")
    assert running["value"][1] == "3"
    (median,) = asked(
        prometheus,
        "query",
        query="histogram_quantile(0.5, sum by (le) (gen_ai_server_time_to_first_token_seconds_bucket))",
    )
    assert 0.02 < float(median["value"][1]) <= 0.04
    (success,) = asked(prometheus, "query", query='vllm:request_success_total{finished_reason="stop"}')
    assert success["value"][1] == "5"


@pytest.mark.sweep
def test_exemplars_are_kept(prometheus: str) -> None:
    now = time.time()
    (series,) = asked(
        prometheus,
        "query_exemplars",
        query="gen_ai_server_time_to_first_token_seconds_bucket",
        start=str(now - 600),
        end=str(now + 600),
    )
    (exemplar,) = series["exemplars"]
    assert exemplar["labels"] == {"trace_id": TRACE_ID, "span_id": SPAN_ID}
    assert (series["seriesLabels"]["le"], exemplar["value"]) == ("0.04", "0.03")
