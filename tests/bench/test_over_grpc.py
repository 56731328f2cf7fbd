"""The processes of the server that bench drives over gRPC."""

from __future__ import annotations

import argparse

import pytest

from bench.drivers.over_grpc import server_flags, shares_of
from penstock.runtime.following.interface import GroupOptions
from penstock.server_cli.commands import serve
from penstock.server_cli.serving.group_flags import group_options


def groups(flags: list[list[str]]) -> list[GroupOptions]:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return [group_options(parser.parse_args(["serve", "model", *own]), {}) for own in flags]


def test_one_process_is_no_group_and_takes_any_port():
    assert server_flags({"max_num_seqs": 4}) == [["--port", "0", "--max-num-seqs", "4"]]


def test_processes_of_a_group_differ_in_their_numbers_alone():
    flags = server_flags({"processes": 2, "tensor_parallel_size": 2})
    leader, follower = groups(flags)
    assert (leader.process_id, follower.process_id) == (0, 1)
    assert (leader.processes, follower.processes) == (2, 2)
    assert leader.coordinator == follower.coordinator
    assert flags[0][:-1] == flags[1][:-1]


def test_each_process_has_its_share_of_the_processors():
    assert shares_of([0, 1], 1) == [[0, 1]]
    assert shares_of([2, 3, 5, 7, 8], 2) == [[2, 5, 8], [3, 7]]
    with pytest.raises(ValueError, match="1 processors for 2"):
        shares_of([0], 2)
