"""The compose file and what its services read fit together."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.server_cli.serving.serve_flags import server_options
from tests.deploy.files import PARTS, ROOT, dashboard, yaml_of
from tests.docs.test_data_blocks import serve_arguments

COMPOSE = PARTS / "compose.yml"


@pytest.fixture(scope="module")
def services() -> Any:
    return yaml_of(COMPOSE)["services"]


def container_path(services: Any, service: str, path: Path) -> str:
    """Where a file of the repository is within a service, by the service's volumes."""
    for volume in services[service]["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("./"):
            here = (PARTS / source).resolve()
            assert here.exists(), volume
            if path.is_relative_to(here):
                return str(Path(target) / path.relative_to(here)) if path != here else target
    raise AssertionError(f"{path} is not in {service}")


def test_penstock_takes_its_flags_and_stops_in_time(services: Any) -> None:
    service = services["penstock"]
    args = serve_arguments([re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]])
    assert args.model == "demo"
    assert server_options(args).metrics.is_exposed  # it raises ConfigError where options do not go together
    assert int(service["stop_grace_period"].rstrip("s")) >= args.drain_delay_s + args.grace_s + 8
    cache = [volume.split(":")[1] for volume in service["volumes"]]
    assert str(args.compilation_cache).startswith(cache[0])


def test_prometheus_scrapes_the_ports_that_the_others_open(services: Any) -> None:
    config = yaml_of(PARTS / "prometheus" / "prometheus.yml")
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    (port,) = re.findall(r"--metrics-port=(\d+)", " ".join(services["penstock"]["command"]))
    assert jobs["penstock"] == [f"penstock:{port}"]
    collector = yaml_of(PARTS / "otelcol" / "config.yml")["service"]["telemetry"]["metrics"]["readers"][0]
    exporter = collector["pull"]["exporter"]["prometheus"]
    assert jobs["otel-collector"] == [f"otel-collector:{exporter['port']}"]
    assert set(jobs) <= set(services)


def test_prometheus_finds_its_files(services: Any) -> None:
    said = dict(re.findall(r"--([\w.-]+)=(\S+)", " ".join(services["prometheus"]["command"])))
    folder = PARTS / "prometheus"
    config = container_path(services, "prometheus", folder / "prometheus.yml")
    assert said["config.file"] == config
    (pattern,) = yaml_of(folder / "prometheus.yml")["rule_files"]
    rules = Path(container_path(services, "prometheus", folder / "rules" / "penstock.yml"))
    assert rules.match(pattern)
    assert rules.parents[1] == Path(config).parent
    assert said["enable-feature"] == "exemplar-storage"


def test_spans_go_from_penstock_to_the_collector_and_from_there_to_jaeger(services: Any) -> None:
    config = yaml_of(PARTS / "otelcol" / "config.yml")
    (endpoint,) = re.findall(r"--otlp-endpoint=(\S+)", " ".join(services["penstock"]["command"]))
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert endpoint == f"http://otel-collector:{port}"
    host, _, jaeger_port = config["exporters"]["otlp"]["endpoint"].partition(":")
    assert (host in services, jaeger_port) == (True, "4317")
    used = config["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(used[kind]) == set(config[kind])
    assert container_path(services, "otel-collector", PARTS / "otelcol" / "config.yml") in " ".join(
        services["otel-collector"]["command"]
    )


def test_grafana_finds_its_sources_and_its_dashboard(services: Any) -> None:
    provisioning = PARTS / "grafana" / "provisioning"
    assert container_path(services, "grafana", provisioning) == "/etc/grafana/provisioning"
    sources = yaml_of(provisioning / "datasources" / "penstock.yml")["datasources"]
    by_uid = {source["uid"]: source for source in sources}
    for source in sources:
        host = re.fullmatch(r"http://([\w-]+):\d+", source["url"])
        assert host
        assert host[1] in services
    (exemplars,) = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert by_uid[exemplars["datasourceUid"]]["type"] == "jaeger"
    assert exemplars["name"] == "trace_id"
    (provider,) = yaml_of(provisioning / "dashboards" / "penstock.yml")["providers"]
    file = container_path(services, "grafana", PARTS / "grafana" / "dashboards" / "penstock.json")
    assert str(Path(file).parent) == provider["options"]["path"]
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == file
    assert dashboard()["uid"] == "penstock"


def test_nothing_is_open_to_other_machines_and_images_have_versions(services: Any) -> None:
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        if name != "penstock":
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_docker_takes_the_file() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no docker compose here")
    done = subprocess.run(
        [docker, "compose", "-f", str(COMPOSE), "config", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
