"""Envoy takes the configuration, and the compose file gives it what it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.server_cli.serving.serve_flags import server_options
from tests.deploy.envoy.running import CONFIG, DESCRIPTORS, FOLDER, IN_CONTAINER, write_config
from tests.deploy.files import yaml_of
from tests.deploy.programs import DOWNLOADED, run_program
from tests.docs.test_data_blocks import serve_arguments
from tools.descriptors import descriptors


@pytest.fixture(scope="module")
def services() -> Any:
    return yaml_of(FOLDER / "compose.yml")["services"]


def test_the_descriptors_are_those_of_the_contract() -> None:
    made = descriptors().SerializeToString(deterministic=True)
    assert DESCRIPTORS.read_bytes() == made, "run: python -m tools.descriptors"


def test_each_descriptor_comes_after_what_it_imports() -> None:
    seen: set[str] = set()
    for file in descriptors().file:
        assert set(file.dependency) <= seen, file.name
        seen.add(file.name)
    assert {"penstock/v1/inference.proto", "google/rpc/error_details.proto"} <= seen


@pytest.mark.sweep
def test_envoy_takes_the_configuration(tmp_path: Path) -> None:
    file = write_config(tmp_path, 8080, ["127.0.0.1:50051"])
    done = run_program("envoy", "--mode", "validate", "-c", file)
    assert done.returncode == 0, done.stderr
    file.write_text(file.read_text().replace("convert_grpc_status", "convert_grpc_statuses"))
    assert run_program("envoy", "--mode", "validate", "-c", file).returncode != 0


def test_the_transcoder_knows_every_service_of_the_contract() -> None:
    text = CONFIG.read_text()
    for file in descriptors().file:
        for service in file.service:
            assert f"- {file.package}.{service.name}\n" in text


def test_messages_have_the_room_that_the_server_gives_them() -> None:
    """An answer has 64 MiB at most, and its JSON may be twice as long as the message."""
    text = CONFIG.read_text()
    asked, answered = (
        int(re.findall(rf"max_{name}_body_size: (\d+)", text)[0]) for name in ("request", "response")
    )
    arguments = serve_arguments(["demo"])
    assert asked >= 2 * arguments.max_receive_bytes
    assert answered >= 2 * arguments.max_response_bytes
    rooms = [int(size) for size in re.findall(r"per_connection_buffer_limit_bytes: (\d+)", text)]
    assert rooms == [asked, answered]


def test_penstock_takes_its_flags_and_keeps_control_to_itself(services: Any) -> None:
    service = services["penstock"]
    args = serve_arguments([re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]])
    options = server_options(args)
    assert options.listen.control_host == "127.0.0.1"
    assert "ports" not in service
    assert int(service["stop_grace_period"].rstrip("s")) >= args.drain_delay_s + args.grace_s + 8
    (server,) = re.findall(r"socket_address: \{address: (\w+), port_value: (\d+)\}", CONFIG.read_text())
    assert server == ("penstock", str(args.port))


def test_envoy_finds_its_files_and_only_this_machine_reaches_it(services: Any) -> None:
    mounted = dict(volume.split(":")[:2] for volume in services["envoy"]["volumes"])
    assert {str((FOLDER / here).resolve()): there for here, there in mounted.items()} == {
        str(CONFIG): "/etc/envoy/envoy.yaml",
        str(DESCRIPTORS): IN_CONTAINER,
    }
    (port,) = re.findall(r"address: 0\.0\.0\.0, port_value: (\d+)", CONFIG.read_text())
    assert services["envoy"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_the_image_is_the_version_that_is_tested(services: Any) -> None:
    _, _, version = DOWNLOADED["envoy"].partition("==")
    assert services["envoy"]["image"] == f"envoyproxy/envoy:v{version}"
