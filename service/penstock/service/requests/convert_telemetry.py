"""Converts what a watcher of the load and a caller of Profile ask for."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.profiling.profile import DEFAULT_STEPS, DEFAULT_TIMEOUT_S, ProfileOptions
from penstock.service.requests.convert_params import Violations, seconds
from penstock.service.requests.support import check_supported
from penstock.v1 import telemetry_pb2

DEFAULT_INTERVAL_S = 1.0
LEAST_INTERVAL_S = 0.1
MOST_INTERVAL_S = 60.0
MOST_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Watch:
    """What a watcher wants."""

    interval_s: float
    """Seconds from one message to the next."""
    max_requests: int
    """How many requests a message lists at most."""


def to_watch(message: telemetry_pb2.WatchLoadRequest) -> Watch:
    """Check and convert the request. Raises UnsupportedFeature and InvalidRequest."""
    check_supported(message)
    bad = Violations()
    interval_s: float | None = DEFAULT_INTERVAL_S
    if message.HasField("interval"):
        interval_s = seconds("interval", message.interval, bad)
        if interval_s is not None and not LEAST_INTERVAL_S <= interval_s <= MOST_INTERVAL_S:
            allowed = f"from {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g} s"
            bad.add("interval", f"must be {allowed}, not {interval_s:g} s")
    if message.max_requests > MOST_REQUESTS:
        bad.add("max_requests", f"must be at most {MOST_REQUESTS}, not {message.max_requests}")
    bad.raise_if_any()
    assert interval_s is not None
    return Watch(interval_s, message.max_requests)


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
