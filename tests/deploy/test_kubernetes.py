"""The manifests are what Kubernetes takes, and fit the server that they start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]  # ships no hints

from penstock.runtime.errors import ConfigError
from penstock.server_cli.processes.openai_front import front_settings
from penstock.server_cli.serving.serve_flags import server_options
from tests.deploy.files import ROOT
from tests.deploy.manifests import FOLDER, VARIANTS, Manifests, health_arguments, manifests, text_of_manifests
from tests.deploy.programs import run_program
from tests.docs.pages import blocks
from tests.docs.test_data_blocks import serve_arguments

KUBERNETES = ("1.28", "1.32", "1.37")
"""Versions whose schemas the manifests must match: the oldest that has all their fields, and newer ones."""
POD_MONITOR = json.loads((Path(__file__).parent / "schemas" / "podmonitor.json").read_text())
START_S = 600
"""The shortest time that a server must have to load and compile."""


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def found(variant: str) -> Manifests:
    return manifests(variant)


# -- schemas --


def validated(folder: Path, *texts: str) -> list[str]:
    """Return what kubernetes-validate prints of manifests, for each version a line for each document. A line
    begins with INFO where all is well.
    """
    files = [folder / f"{number}.yaml" for number, _ in enumerate(texts)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    versions = [word for version in KUBERNETES for word in ("-k", version)]
    return run_program("kubernetes-validate", "--strict", *versions, *files).stdout.splitlines()


@pytest.mark.sweep
def test_kubernetes_takes_them(tmp_path: Path) -> None:
    said = validated(tmp_path, *map(text_of_manifests, VARIANTS))
    others = [line for line in said if not line.startswith("INFO")]
    assert all("schema for kind PodMonitor" in line for line in others), others
    assert len(said) == len(KUBERNETES) * sum(len(manifests(variant).documents) for variant in VARIANTS)


@pytest.mark.sweep
def test_kubernetes_refuses_what_is_wrong(tmp_path: Path) -> None:
    right = text_of_manifests("base")
    misspelt, no_number = right.replace("minAvailable:", "minAvailible:"), right.replace(": 2\n", ": two\n")
    assert right not in (misspelt, no_number)
    refused = [line for line in validated(tmp_path, misspelt, no_number) if line.startswith("ERROR")]
    assert len(refused) == 2 * len(KUBERNETES)


def test_the_prometheus_operator_takes_the_pod_monitor() -> None:
    (monitor,) = manifests("complete").of_kind("PodMonitor")
    jsonschema.validate(monitor, POD_MONITOR)
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(monitor, POD_MONITOR)


def test_every_folder_is_part_of_a_variant_that_is_tested() -> None:
    used = set(text_of_manifests("complete").split("\n"))
    for file in FOLDER.rglob("*.yaml"):
        if "multihost" in file.parts:  # test_multihost.py
            continue
        if file.name not in ("kustomization.yaml", "deployment.yaml"):
            names = [line for line in file.read_text().splitlines() if line.startswith("  name: ")]
            assert set(names) <= used, file


# -- the server in the pod --


def test_the_server_takes_its_flags_and_has_time_to_end(found: Manifests) -> None:
    args = found.serve
    assert server_options(args).hosts
    assert found.pod["terminationGracePeriodSeconds"] >= args.drain_delay_s + args.grace_s + 8
    assert args.drain_delay_s > 0
    (port,) = (port for port in found.container["ports"] if port["name"] == "grpc")
    assert port["containerPort"] == args.port


def test_a_server_has_time_to_compile_before_it_is_given_up(found: Manifests) -> None:
    probe = found.container["startupProbe"]
    start_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert start_s >= START_S
    assert found.deployment["spec"]["progressDeadlineSeconds"] > start_s


def probed(probe: Any, args: Any) -> str:
    """Return the health service that a probe asks for, once it is sure that the probe reaches the server."""
    if "grpc" in probe:
        assert args.tls_cert is None  # these probes speak no TLS
        assert probe["grpc"]["port"] == args.port
        return str(probe["grpc"].get("service", ""))
    asked = health_arguments(probe["exec"]["command"])
    assert asked.addr == f"unix:{args.unix_socket}"
    assert probe["timeoutSeconds"] >= 10  # a Python that starts beside a busy server
    return str(asked.service)


def test_probes_ask_for_the_right_health(found: Manifests) -> None:
    """Readiness says whether requests are taken. Liveness must not, or a draining server would be killed."""
    asked = {name: probed(found.container[f"{name}Probe"], found.serve) for name in ("startup", "readiness")}
    assert asked == {"startup": "", "readiness": ""}
    assert probed(found.container["livenessProbe"], found.serve) == "liveness"


def test_the_pod_has_no_rights_that_it_does_not_need(found: Manifests) -> None:
    assert found.pod["securityContext"]["runAsNonRoot"] is True
    assert found.pod["automountServiceAccountToken"] is False
    allowed = found.container["securityContext"]
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    assert (allowed["allowPrivilegeEscalation"], allowed["readOnlyRootFilesystem"]) == (False, True)


def test_what_the_server_writes_and_reads_is_in_a_volume(found: Manifests) -> None:
    args = found.serve
    volumes = {volume["name"]: volume for volume in found.pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in found.container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    written = [str(args.compilation_cache), *(v["value"] for v in found.container["env"]), "/tmp/x"]
    read = [str(path) for path in (args.tls_cert, args.tls_key, args.keys) if path]
    if args.unix_socket:
        written.append(str(args.unix_socket))
    for path in written:
        (mount,) = (mount for at, mount in mounts.items() if path.startswith(f"{at}/"))
        assert "emptyDir" in volumes[mount["name"]]
    for path in read:
        (mount,) = (mount for at, mount in mounts.items() if path.startswith(f"{at}/"))
        assert mount["readOnly"]
        assert volumes[mount["name"]]["secret"]["defaultMode"] & 0o007 == 0  # others may read no key


def test_the_image_has_the_user_and_the_folders(found: Manifests) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"\nUSER {found.pod['securityContext']['runAsUser']}\n" in dockerfile
    (volume,) = re.findall(r"^VOLUME (\S+)$", dockerfile, re.M)
    assert volume in {mount["mountPath"] for mount in found.container["volumeMounts"]}
    assert found.container["image"].startswith("penstock:")


def test_the_secured_server_needs_no_permission_to_be_insecure() -> None:
    args = manifests("complete").container["args"]
    assert "--insecure" not in args
    assert server_options(serve_arguments(args)).lacking == []
    with pytest.raises(ConfigError, match="TLS"):
        server_options(serve_arguments([arg for arg in args if not arg.startswith("--tls")]))
    assert server_options(manifests("base").serve).lacking != []


# -- what is around it --


def test_services_budget_and_rules_choose_the_pods_and_their_ports(found: Manifests) -> None:
    labels = found.deployment["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in found.container["ports"]}
    chosen = [found.deployment["spec"]["selector"]["matchLabels"]]
    chosen += [service["spec"]["selector"] for service in found.of_kind("Service")]
    chosen += [budget["spec"]["selector"]["matchLabels"] for budget in found.of_kind("PodDisruptionBudget")]
    chosen += [policy["spec"]["podSelector"]["matchLabels"] for policy in found.of_kind("NetworkPolicy")]
    assert all(one == labels for one in chosen)
    for service in found.of_kind("Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    let_in = [
        port["port"]
        for policy in found.of_kind("NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    ]
    assert set(let_in) == ports
    assert all(
        rule["from"] for policy in found.of_kind("NetworkPolicy") for rule in policy["spec"]["ingress"]
    )


def test_one_service_names_every_pod_and_others_have_an_address(found: Manifests) -> None:
    headless = {s["metadata"]["name"]: s["spec"].get("clusterIP") for s in found.of_kind("Service")}
    of_http = {} if found.serve.openai_port is None else {"penstock-openai": None}
    assert headless == {"penstock": "None", "penstock-balanced": None} | of_http


def test_openais_api_is_had_at_the_port_that_the_service_names() -> None:
    found = manifests("complete")
    (port,) = (port for port in found.container["ports"] if port["name"] == "openai")
    assert port["containerPort"] == found.serve.openai_port
    (service,) = (s for s in found.of_kind("Service") if s["metadata"]["name"] == "penstock-openai")
    assert [at["targetPort"] for at in service["spec"]["ports"]] == ["openai"]
    settings = front_settings(found.serve, server_options(found.serve))
    assert settings is not None
    assert settings.tls_cert is not None
    assert manifests("base").serve.openai_port is None


def test_a_drained_node_leaves_a_server(found: Manifests) -> None:
    (budget,) = found.of_kind("PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] < found.deployment["spec"]["replicas"]
    assert found.deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_prometheus_scrapes_the_pods_under_the_name_that_alerts_know() -> None:
    found = manifests("complete")
    (monitor,) = found.of_kind("PodMonitor")
    labels = found.deployment["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["spec"]["jobLabel"]] == "penstock"
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (port,) = (port for port in found.container["ports"] if port["name"] == endpoint["port"])
    assert port["containerPort"] == server_options(found.serve).metrics.metrics_port


# -- the page --


def test_the_kustomization_of_the_page_is_one(tmp_path: Path) -> None:
    (block,) = [block for block in blocks() if "kind: Kustomization" in block.source]
    (tmp_path / "penstock").symlink_to(ROOT)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(block.source)
    done = run_program("kubectl", "kustomize", mine)
    assert done.returncode == 0, done.stderr
    found = Manifests(list(yaml.safe_load_all(done.stdout)))
    assert found.serve.model == "Qwen/Qwen3-4B"
    assert found.container["image"] == "images.example.com/penstock:0.1.0"
    assert found.container["resources"]["limits"]["memory"] == "16Gi"
    assert "--insecure" not in found.container["args"]
