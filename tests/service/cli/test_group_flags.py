"""Flags of a group, and what Kubernetes and Slurm say in their place."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.following import joining
from penstock.runtime.following.interface import GroupOptions
from penstock.runtime.following.joining import check_options, shares
from penstock.server_cli.serving.flags import options_of
from penstock.server_cli.serving.group_flags import (
    GroupFlags,
    check_server,
    first_host,
    group_options,
    leader_address,
)
from penstock.server_cli.serving.serve_flags import add_parser, server_options
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions

LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "pen-0.pen.models"}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[03-04],cpu1"}
TWO = GroupOptions(processes=2, process_id=1, coordinator="a:50061")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", "demo", *flags])


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ([], {}, GroupOptions()),
        ([], LWS, GroupOptions()),  # nobody has asked for it
        (
            ["--processes=auto"],
            LWS,
            GroupOptions(processes=4, process_id=2, coordinator="pen-0.pen.models:50061"),
        ),
        (["--processes=auto"], SLURM, GroupOptions(processes=2, process_id=1, coordinator="gpu03:50061")),
        (
            ["--processes=auto"],
            LWS | SLURM,
            GroupOptions(processes=4, process_id=2, coordinator="pen-0.pen.models:50061"),
        ),
        (
            ["--processes=auto"],
            SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            GroupOptions(process_id=0),
        ),
        (
            ["--processes=auto", "--coordinator=[::1]:7", "--group-timeout=9"],
            LWS,
            GroupOptions(processes=4, process_id=2, coordinator="[::1]:7", group_timeout_s=9.0),
        ),
        (["--processes=2", "--process-id=1", "--coordinator=a:50061"], SLURM, TWO),
    ],
)
def test_flags_win_over_the_environment(
    flags: list[str], environ: dict[str, str], expected: GroupOptions
) -> None:
    assert group_options(parse(*flags), environ) == expected


@pytest.mark.parametrize(
    ("flags", "environ", "problem"),
    [
        (["--processes=auto"], {}, "processes: auto needs the variables of LeaderWorkerSet or Slurm"),
        (
            ["--processes=auto"],
            LWS | {"LWS_GROUP_SIZE": "x"},
            "LWS_GROUP_SIZE and LWS_WORKER_INDEX must be numbers",
        ),
        (["--processes=auto"], SLURM | {"SLURM_STEP_NODELIST": ""}, "does not say where the leader is"),
        (["--processes=2"], {}, "coordinator: must be given, .*; process_id: must be given"),
        (
            ["--processes=2", "--process-id=2", "--coordinator=a:1"],
            {},
            "process_id: must be from 0 to 1, not 2",
        ),
        (["--processes=2", "--process-id=0", "--coordinator=a"], {}, "coordinator: must be HOST:PORT"),
        (["--coordinator=a:1"], {}, "coordinator: needs processes"),
        (["--processes=0"], {}, "processes: must be from 1"),
        (["--group-timeout=0.5"], {}, "group_timeout_s: must be from 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(flags: list[str], environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        group_options(parse(*flags), environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("rack1-gpu[3].local,b", "rack1-gpu3.local"),
        ("rack[1-2]n[03,05],b", "rack1n03"),
        ("", ""),
    ],
)
def test_the_first_host_of_slurm_s_lists(nodes: str, first: str) -> None:
    """As `scontrol show hostnames` expands them."""
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--front-processes=1"], "front_processes: cannot stand beside processes"),
        (["--max-connection-age-grace=3"], "max_connection_age_grace_s: cannot stand beside processes"),
    ],
)
def test_a_server_s_options_that_a_group_cannot_have(flags: list[str], problem: str) -> None:
    options = server_options(parse(*flags))
    check_server(options, GroupOptions())
    with pytest.raises(ConfigError, match=problem):
        check_server(options, TWO)


@pytest.mark.parametrize("size", [None, 3, 1])
def test_devices_that_processes_cannot_share(size: int | None) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: must be a multiple of processes, 2"):
        check_options(EngineConfig(tensor_parallel_size=size), TWO)


def test_each_process_has_one_stage_and_the_leader_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: .* 2, not 3: each process has one stage"):
        check_options(options, TWO)
    devices = [SimpleNamespace(process_index=number // 2, platform="cpu") for number in range(6)]
    monkeypatch.setattr(joining, "process_facts", lambda model, config, processes: {})
    monkeypatch.setattr(joining, "_join", lambda options: None)
    monkeypatch.setattr(joining, "start_backends", lambda threads, count: devices if count == 2 else None)
    group = GroupOptions(processes=3, process_id=0, coordinator="a:1")
    found: list[Any] = joining.joined("model", options, group, lambda facts: None)
    assert [device.process_index for device in found] == [1, 1, 2, 2, 0, 0]


def test_each_process_gives_its_share_in_the_order_of_the_processes() -> None:
    """A host may have more devices than its share."""

    class Device:
        def __init__(self, process_index: int, number: int) -> None:
            self.process_index, self.number = process_index, number

    devices: list[Any] = [Device(process, number) for number in range(3) for process in (1, 0)]
    assert [(device.process_index, device.number) for device in shares(devices, 2, 2)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    with pytest.raises(ConfigError, match="4 devices are needed of each process, and process 0 has 3"):
        shares(devices, 4, 2)


def test_followers_find_the_leader_s_server() -> None:
    flags, options = options_of(GroupFlags, parse("--leader=b:7")), ServerOptions(port=50051)
    assert leader_address(flags, TWO, options) == "b:7"
    assert leader_address(GroupFlags(), TWO, options) == "a:50051"
    with pytest.raises(ConfigError, match="leader: must be given"):
        leader_address(GroupFlags(), TWO, ServerOptions(port=0))


def test_followers_find_the_leader_s_control_port() -> None:
    """The main address has no control then."""
    apart = ServerOptions(port=50051, listen=ListenOptions(control_port=50052))
    assert leader_address(GroupFlags(), TWO, apart) == "a:50052"
    with pytest.raises(ConfigError, match="leader: must be given, because control_port does not"):
        leader_address(GroupFlags(), TWO, ServerOptions(listen=ListenOptions(control_port=0)))
