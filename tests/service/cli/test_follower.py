"""The process of a follower, up to where it would meet its leader."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.following.interface import GroupOptions
from penstock.server_cli.processes.follower import Follower
from penstock.server_cli.serving.group_flags import GroupFlags
from penstock.service.options import ServerOptions

TWO = GroupOptions(processes=2, process_id=1, coordinator="127.0.0.1:1")
FOLLOWER = Follower("demo", EngineConfig(), TWO, ServerOptions(), GroupFlags())


class Made(Exception):
    """In place of what comes after the channel."""


def test_a_follower_takes_calls_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4096 tokens an image's patches are 100 MB, and clients receive 64 MiB at most."""
    found: list[dict[str, Any]] = []

    def channel(target: str, options: Any) -> None:
        found.append(dict(options))
        raise Made

    monkeypatch.setattr(grpc, "insecure_channel", channel)
    with pytest.raises(Made):
        FOLLOWER.run()
    assert found[0]["grpc.max_receive_message_length"] == -1
