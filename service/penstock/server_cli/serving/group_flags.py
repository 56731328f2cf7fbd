"""The flags of a group of processes, and what Kubernetes and Slurm say of a process's place in one."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.errors import ConfigError
from penstock.runtime.following.interface import DEFAULT_TIMEOUT_S, GroupOptions
from penstock.server_cli.serving.flags import AddFlag, count_or_auto
from penstock.service.options import ServerOptions

COORDINATOR_PORT = 50061
"""The coordinator's port where the environment says only its host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFlags:
    """What the command line says of a group."""

    processes: int | None = 1
    """None: the environment says it, and the number of this process, and where the leader is."""
    process_id: int | None = None
    coordinator: str | None = None
    leader: str | None = None
    """The address of the leader's server, as HOST:PORT; None: the coordinator's host, and our own port, or
    our control port."""
    group_ca: Path | None = None
    """Authorities of the leader's certificate in PEM form."""
    group_timeout_s: float = DEFAULT_TIMEOUT_S


def add_group(flag: AddFlag) -> None:
    """Add the flags."""
    flag(
        "processes",
        "how many processes, perhaps on several hosts, have the devices of --tensor-parallel-size together, "
        "or one stage of --pipeline-parallel-size each; "
        "auto: what LeaderWorkerSet (LWS_...) or Slurm (SLURM_...) has set, with the other two; default: "
        "%(default)s",
        "N|auto",
        type=count_or_auto,
    )
    flag(
        "process_id",
        "the number of this process; 0 leads and speaks gRPC, the others follow it",
        "N",
        type=int,
    )
    flag(
        "coordinator", "where the processes find each other: the leader's host, and a free port", "HOST:PORT"
    )
    flag(
        "leader",
        "the address of the leader's server, for followers; default: the host of --coordinator with --port "
        "or, if it is given, --control-port. They send the key in $PENSTOCK_TOKEN, which needs the role "
        "control",
        "HOST:PORT",
    )
    flag(
        "group_ca",
        "authorities of the leader's certificate in PEM form, for followers; they use TLS if this or "
        "--tls-cert is given, and show --tls-cert if --client-ca is; default: the well-known authorities",
        "FILE",
    )
    flag("group_timeout_s", "within this time all processes end if one of them is lost or hangs")


def group_options(args: argparse.Namespace, environ: Mapping[str, str]) -> GroupOptions:
    """Make the options that flags and environment describe. Raises ConfigError."""
    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(GroupOptions)
        if getattr(args, field.name) is not None
    }
    found = place_in(environ) if args.processes is None else {}
    return GroupOptions(**{**found, **given})


def place_in(environ: Mapping[str, str]) -> dict[str, int | str]:
    """Read what LeaderWorkerSet or Slurm says, by the names of GroupOptions. Raises ConfigError if neither is
    there, or if what it says cannot be read.
    """
    if "LWS_GROUP_SIZE" in environ:
        names = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
        host = environ.get("LWS_LEADER_ADDRESS", "")
    elif "SLURM_PROCID" in environ:
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
        host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    else:
        raise ConfigError("processes: auto needs the variables of LeaderWorkerSet or Slurm, and none is set")
    try:
        processes, process_id = (int(environ.get(name, "")) for name in names)
    except ValueError:
        raise ConfigError(f"processes: {' and '.join(names)} must be numbers for auto") from None
    if processes > 1 and not host:
        raise ConfigError("processes: the environment does not say where the leader is; give coordinator")
    place: dict[str, int | str] = {"processes": processes, "process_id": process_id}
    return {**place, "coordinator": f"{host}:{COORDINATOR_PORT}"} if processes > 1 else place


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: a[03-05,9],b is a03, a04, a05, a9 and b."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""


def check_server(options: ServerOptions, group: GroupOptions) -> None:
    """Raise ConfigError if the server's options cannot stand beside a group's."""
    if not group.is_group:
        return
    if options.front_processes:
        raise ConfigError("front_processes: cannot stand beside processes")
    if options.connections.max_connection_age_grace_s:
        raise ConfigError(
            "max_connection_age_grace_s: cannot stand beside processes, because it would end the group"
        )


def leader_address(flags: GroupFlags, group: GroupOptions, options: ServerOptions) -> str:
    """Tell where a follower finds the leader's server. Raises ConfigError if that cannot be known."""
    if flags.leader is not None:
        return flags.leader
    apart = options.listen.control_port
    name, port = ("port", options.port) if apart is None else ("control_port", apart)
    if not port:
        raise ConfigError(f"leader: must be given, because {name} does not say the leader's port")
    assert group.coordinator is not None, "checked when the options were made"
    return f"{group.coordinator.rpartition(':')[0]}:{port}"
