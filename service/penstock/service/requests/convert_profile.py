"""Converts what Profile asks for."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.profiling.profile import DEFAULT_STEPS, DEFAULT_TIMEOUT_S, ProfileOptions
from penstock.service.requests.convert_params import Violations, seconds
from penstock.service.requests.support import check_supported
from penstock.v1 import telemetry_pb2


@dataclass(frozen=True, slots=True)
class AskedProfile:
    """What a caller wants to have recorded."""

    options: ProfileOptions
    include_data: bool
    """Whether the files are to be sent, too."""


def to_profile(message: telemetry_pb2.ProfileRequest) -> AskedProfile:
    """Check and convert the message. Raises InvalidRequest."""
    check_supported(message)
    bad = Violations()
    steps = message.steps if message.HasField("steps") else DEFAULT_STEPS
    timeout_s = seconds("timeout", message.timeout, bad) if message.HasField("timeout") else DEFAULT_TIMEOUT_S
    bad.raise_if_any()
    assert timeout_s is not None
    return AskedProfile(ProfileOptions(steps=steps, timeout_s=timeout_s), message.include_data)
