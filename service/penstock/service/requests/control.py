"""Converts what operators, routers and trainers ask to validated frozen values: watching the load, profiles,
pages of the vocabulary, weights and pauses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.profiling.profile import DEFAULT_STEPS, DEFAULT_TIMEOUT_S, ProfileOptions
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import Staging, UpdateOptions
from penstock.service.requests.generate import Violations, seconds
from penstock.service.requests.support import check_supported
from penstock.v1 import control_pb2, telemetry_pb2, weights_pb2

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


MOST_TOKENS = 32_768


def to_page(message: control_pb2.GetVocabularyRequest, vocab_size: int) -> range:
    """Check and convert the request to the ids of the tokens that the page may have, at least one. Raises
    UnsupportedFeature and InvalidRequest.
    """
    check_supported(message)
    bad = Violations()
    first = message.first_token_id
    if first >= vocab_size:
        bad.add("first_token_id", f"must be below the vocabulary size {vocab_size}, not {first}")
    most = message.max_tokens if message.HasField("max_tokens") else MOST_TOKENS
    if not 1 <= most <= MOST_TOKENS:
        bad.add("max_tokens", f"must be from 1 to {MOST_TOKENS}, not {most}")
    bad.raise_if_any()
    return range(first, min(first + most, vocab_size))


MAX_TENSORS = 20_000
"""How many tensors one update may have. They are counted before anything walks over them."""
MAX_ID_CHARS = 128
MAX_LABEL_CHARS = 256
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 8
SHA256_BYTES = 32
_POLICIES = {
    weights_pb2.IN_FLIGHT_POLICY_UNSPECIFIED: None,
    weights_pb2.IN_FLIGHT_POLICY_WAIT: InFlightPolicy.WAIT,
    weights_pb2.IN_FLIGHT_POLICY_ABORT: InFlightPolicy.ABORT,
    weights_pb2.IN_FLIGHT_POLICY_KEEP: InFlightPolicy.KEEP,
    weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE: InFlightPolicy.RECOMPUTE,
}
_STAGINGS = {
    weights_pb2.STAGING_MODE_UNSPECIFIED: Staging.HOST,
    weights_pb2.STAGING_MODE_HOST: Staging.HOST,
    weights_pb2.STAGING_MODE_DEVICE: Staging.DEVICE,
    weights_pb2.STAGING_MODE_IN_PLACE: Staging.IN_PLACE,
}
_DTYPES = {
    value: name.removeprefix("DATA_TYPE_")
    for name, value in weights_pb2.DataType.items()
    if value != weights_pb2.DATA_TYPE_UNSPECIFIED
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What an update wants, before its first byte."""

    options: UpdateOptions
    uri: str
    """Where the tensors are to be read; empty if they follow on the stream."""
    manifest: Sequence[SentTensor]
    """The tensors that follow on the stream; empty with a uri."""
    validate_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForRunning:
    """What becomes of the running requests."""

    policy: InFlightPolicy | None
    """None: the caller leaves it to the server."""
    drain_timeout_s: float | None
    """None: the caller gives no time."""


def to_begin(message: weights_pb2.UpdateWeightsRequest) -> Begin:
    """Check and convert the first message of an update. Raises UnsupportedFeature and
    InvalidRequest."""
    check_supported(message)
    if message.WhichOneof("step") != "begin":
        raise out_of_order("begin must be the first message")
    begin, bad = message.begin, Violations()
    _check_text("begin.update_id", begin.update_id, MAX_ID_CHARS, bad)
    _check_text("begin.version_label", begin.version_label, MAX_LABEL_CHARS, bad)
    running = _for_running(begin, "begin.", bad)
    staging = _STAGINGS.get(begin.staging)
    if staging is None:
        bad.add("begin.staging", f"{begin.staging} is no value of StagingMode")
    if begin.stage_only and begin.validate_only:
        bad.add("begin.stage_only", "not together with validate_only, which stages nothing")
    manifest: Sequence[SentTensor] = ()
    source = begin.WhichOneof("source")
    if source is None:
        bad.add("begin.source", "one of manifest and uri is required")
    elif source == "uri" and not begin.uri:
        bad.add("begin.uri", "must not be empty")
    elif source == "manifest":
        manifest = to_tensors(begin.manifest, bad)
    bad.raise_if_any()
    assert staging is not None
    options = UpdateOptions(
        update_id=begin.update_id,
        label=begin.version_label,
        partial=begin.partial,
        expected_generation=begin.expected_generation if begin.HasField("expected_generation") else None,
        in_flight=running.policy or InFlightPolicy.WAIT,
        drain_timeout_s=running.drain_timeout_s,
        staging=staging,
        stage_only=begin.stage_only,
        refuse_non_finite=begin.refuse_non_finite,
    )
    return Begin(options=options, uri=begin.uri, manifest=manifest, validate_only=begin.validate_only)


def to_pause(message: control_pb2.PauseRequest) -> ForRunning:
    """Check and convert what a pause does with the running requests. Raises InvalidRequest."""
    check_supported(message)
    bad = Violations()
    running = _for_running(message, "", bad)
    bad.raise_if_any()
    return running


def to_commit(message: control_pb2.CommitWeightsRequest) -> ForRunning:
    """Check the message, and convert what its commit does with the running requests. Raises
    InvalidRequest.
    """
    check_supported(message)
    bad = Violations()
    _check_text("update_id", message.update_id, MAX_ID_CHARS, bad)
    running = _for_running(message, "", bad)
    bad.raise_if_any()
    return running


def check_discard(message: control_pb2.DiscardWeightsRequest) -> None:
    """Check the message. Raises InvalidRequest."""
    check_supported(message)
    bad = Violations()
    _check_text("update_id", message.update_id, MAX_ID_CHARS, bad)
    bad.raise_if_any()


def out_of_order(why: str) -> InvalidRequest:
    """Make the error of an upload whose messages are not begin, chunks, commit."""
    return InvalidRequest([Violation("step", f"{why}; nothing has changed")])


def _check_text(field: str, text: str, most: int, bad: Violations) -> None:
    if not text:
        bad.add(field, "must not be empty")
    elif len(text) > most:
        bad.add(field, f"must have at most {most} characters, not {len(text)}")


def _for_running(
    message: weights_pb2.UpdateWeightsBegin | control_pb2.PauseRequest | control_pb2.CommitWeightsRequest,
    prefix: str,
    bad: Violations,
) -> ForRunning:
    policy = _POLICIES.get(message.in_flight)
    if message.in_flight not in _POLICIES:
        bad.add(f"{prefix}in_flight", f"{message.in_flight} is no value of InFlightPolicy")
    limit_s = None
    if message.HasField("drain_timeout"):
        limit_s = _positive_seconds(f"{prefix}drain_timeout", message.drain_timeout, bad)
        if policy not in (None, InFlightPolicy.WAIT):
            bad.add(
                f"{prefix}drain_timeout", "only with IN_FLIGHT_POLICY_WAIT: the other policies do not wait"
            )
    return ForRunning(policy=policy, drain_timeout_s=limit_s)


def _positive_seconds(field: str, duration: Duration, bad: Violations) -> float | None:
    value = seconds(field, duration, bad)
    if value is not None and value < 0:
        bad.add(field, f"must not be negative, as {value:g} s is")
    return value


def to_tensors(manifest: weights_pb2.TensorManifest, bad: Violations) -> Sequence[SentTensor]:
    """Check and convert the tensors of a message's `begin`. Adds what is wrong with them to `bad`."""
    field = "begin.manifest.tensors"
    if not bad.allows(field, len(manifest.tensors), MAX_TENSORS, "tensors"):
        return ()
    return [_tensor(f"{field}[{i}]", spec, bad) for i, spec in enumerate(manifest.tensors)]


def _tensor(field: str, spec: weights_pb2.TensorSpec, bad: Violations) -> SentTensor:
    dtype = _DTYPES.get(spec.dtype, "")
    if not dtype:
        bad.add(
            f"{field}.dtype", "is required" if spec.dtype == 0 else f"{spec.dtype} is no value of DataType"
        )
    if not 0 < len(spec.name) <= MAX_NAME_CHARS:
        bad.add(f"{field}.name", f"must have from 1 to {MAX_NAME_CHARS} characters, not {len(spec.name)}")
    if len(spec.sha256) not in (0, SHA256_BYTES):
        bad.add(f"{field}.sha256", f"must have {SHA256_BYTES} bytes or none, not {len(spec.sha256)}")
    shape: tuple[int, ...] = ()
    if bad.allows(f"{field}.shape", len(spec.shape), MAX_DIMENSIONS, "dimensions"):
        shape = tuple(spec.shape)
    return SentTensor(spec.name, dtype, shape, spec.crc32c, spec.sha256)
