"""Both forms of a group on several hosts: the processes find each other, and nobody else does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # ships no hints

from penstock.server_cli.serving.group_flags import COORDINATOR_PORT, check_server, group_options
from penstock.server_cli.serving.serve_flags import engine_config, server_options
from tests.deploy.manifests import FOLDER, Manifests
from tests.deploy.programs import run_program
from tests.docs.test_data_blocks import serve_arguments

FORMS = ("statefulset", "leaderworkerset")
COORDINATORS = {
    "statefulset": f"penstock-0.penstock-group:{COORDINATOR_PORT}",
    "leaderworkerset": f"penstock-0.penstock.default:{COORDINATOR_PORT}",
}


@cache
def found(form: str) -> Manifests:
    """Return the base with one form, as a user puts them together."""
    folder = FOLDER / "components" / "multihost" / form
    mine = Path(__file__).parent / "multihost" / form
    assert [folder.resolve()] == [
        (mine / path).resolve()
        for path in yaml.safe_load((mine / "kustomization.yaml").read_text())["components"]
    ]
    done = run_program("kubectl", "kustomize", mine)
    assert done.returncode == 0, done.stderr
    return Manifests(list(yaml.safe_load_all(done.stdout)))


def pods(form: str) -> list[tuple[Any, Mapping[str, str]]]:
    """Return the template of each pod of a group, with the variables that the cluster gives it."""
    if form == "statefulset":
        (made,) = found(form).of_kind("StatefulSet")
        (variable,) = (one for one in container(made["spec"]["template"])["env"] if "valueFrom" in one)
        label = variable["valueFrom"]["fieldRef"]["fieldPath"]
        assert label == "metadata.labels['apps.kubernetes.io/pod-index']"
        return [
            (made["spec"]["template"], {variable["name"]: str(number)})
            for number in range(made["spec"]["replicas"])
        ]
    (made,) = found(form).of_kind("LeaderWorkerSet")
    parts = made["spec"]["leaderWorkerTemplate"]
    templates = [parts["leaderTemplate"], *[parts["workerTemplate"]] * (parts["size"] - 1)]
    shared = {"LWS_GROUP_SIZE": str(parts["size"]), "LWS_LEADER_ADDRESS": "penstock-0.penstock.default"}
    return [(pod, {**shared, "LWS_WORKER_INDEX": str(number)}) for number, pod in enumerate(templates)]


def container(template: Any) -> Any:
    (one,) = template["spec"]["containers"]
    return one


@pytest.mark.parametrize("form", FORMS)
def test_the_processes_of_all_pods_are_one_group(form: str) -> None:
    made, everything_else = [], []
    for template, variables in pods(form):
        args = [
            arg.replace("$(POD_INDEX)", variables.get("POD_INDEX", "")) for arg in container(template)["args"]
        ]
        parsed = serve_arguments(args)
        made.append(group_options(parsed, variables))
        check_server(server_options(parsed), made[-1])
        everything_else.append([arg for arg in args if not arg.startswith("--process-id")])
        assert (engine_config(parsed).tensor_parallel_size or 0) % made[-1].processes == 0
    assert all(args == everything_else[0] for args in everything_else)
    assert [one.process_id for one in made] == list(range(made[0].processes))
    assert {one.coordinator for one in made} == {COORDINATORS[form]}


@pytest.mark.parametrize("form", FORMS)
def test_names_are_there_before_pods_are_ready_and_clients_reach_the_leader_alone(form: str) -> None:
    services = {service["metadata"]["name"]: service["spec"] for service in found(form).of_kind("Service")}
    for name in ("penstock", "penstock-balanced"):
        (chosen,) = set(services[name]["selector"].items()) - {("app", "penstock")}
        assert chosen[1] == "0"
        assert chosen[0].endswith(("/pod-index", "/worker-index"))
    if form == "statefulset":
        (made,) = found(form).of_kind("StatefulSet")
        group = services[made["spec"]["serviceName"]]
        assert (group["clusterIP"], group["publishNotReadyAddresses"]) == ("None", True)
        assert group["selector"] == made["spec"]["selector"]["matchLabels"]
        assert made["spec"]["podManagementPolicy"] == "Parallel"


@pytest.mark.parametrize("form", FORMS)
def test_only_pods_of_the_group_reach_its_ports(form: str) -> None:
    (rule,) = (
        policy["spec"]
        for policy in found(form).of_kind("NetworkPolicy")
        if policy["metadata"]["name"] == "penstock-group"
    )
    own = {"podSelector": {"matchLabels": {"app": "penstock"}}}
    assert {"podSelector": rule["podSelector"]} == own
    assert rule["ingress"] == [{"from": [own]}]
    assert rule["egress"] == [{"to": [own]}]
    for template, _ in pods(form):
        assert template["metadata"]["labels"] == {"app": "penstock"}


@pytest.mark.parametrize("form", FORMS)
def test_pods_keep_the_programs_and_have_no_rights_that_they_do_not_need(form: str) -> None:
    assert not found(form).of_kind("Deployment")
    assert not found(form).of_kind("PodDisruptionBudget")
    for template, _ in pods(form):
        pod, one = template["spec"], container(template)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        args = server_options(serve_arguments([arg.replace("$(POD_INDEX)", "1") for arg in one["args"]]))
        assert pod["terminationGracePeriodSeconds"] >= args.drain_delay_s + args.grace_s + 8
