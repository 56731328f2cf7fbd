"""A weight update as it will be sent: what begins it, its tensors and what commits it.

Each tensor is read twice: for its checksum, and when it is its turn to be sent. So no more than a chunk is in
memory. An update has an id, so sending it again is safe.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Required, TypedDict, TypeVar, get_args

from penstock.client.generation.checks import Violations, checked, named, one_of
from penstock.client.generation.requests import given_of
from penstock.client.values.results import WeightsVersion
from penstock.client.weights.tensors import Tensor, Tensors, digest_of, manifest_of, tensors_in, tensors_of
from penstock.v1 import control_pb2, weights_pb2

InFlightPolicy = Literal["wait", "abort", "keep", "recompute"]
"""What happens to the requests that run when weights are swapped or the server pauses: they finish first,
they end with what they have, they go on with the KV that they have, or they go on after it was computed
again.
"""
Staging = Literal["host", "device", "in_place"]
"""Where new weights wait until they are complete: in the server's host memory, on its device (the shortest
pause, and twice the memory there), or nowhere: each tensor replaces the old one as it comes. "in_place" needs
no memory, but nothing runs meanwhile, and an update that fails leaves the server not ready until another one
succeeds.
"""
Progress = Callable[[int, int], None]
"""Is called with the bytes that were sent and those that there are."""


class UpdateOptions(TypedDict, total=False):
    """Keyword arguments of `update_weights`. What is left out, or None, takes the server's default."""

    label: Required[str]
    """The label of the new version, such as "step-17"."""
    policy: InFlightPolicy | None
    """What happens to the requests that run when the weights are swapped (default "wait")."""
    drain_timeout_s: float | None
    """With "wait", the longest time to wait for running requests, in seconds; after it the update fails with
    DrainTimeout and changes nothing. By default there is no limit.
    """
    partial: bool | None
    """Tensors that are not given keep their value. Otherwise every tensor is required."""
    staging: Staging | None
    """Where the new weights wait until they are complete (default "host")."""
    expected_generation: int | WeightsVersion | None
    """Update only if these are the weights in use; otherwise the update fails with GenerationChanged."""
    stage_only: bool | None
    """Send and check everything, but leave the swap to `commit_weights`."""
    validate_only: bool | None
    """Check names, dtypes and shapes only, and send no tensor."""
    refuse_non_finite: bool | None
    """Refuse tensors that hold NaN or infinity."""
    update_id: str | None
    """An id of the update, to ask for its outcome with; by default one is made, which the result and errors
    tell. Sending an update again under its id never applies it twice.
    """
    progress: bool | Progress | None
    """Whether to show a bar on stderr (default true, and only on a terminal), or a function that is called
    with the bytes that were sent and those that there are, from another thread.
    """


_FIELDS: Mapping[str, str] = {
    "label": "version_label",
    "policy": "in_flight",
    "drain_timeout_s": "drain_timeout",
    **{name: name for name in ("update_id", "partial", "staging", "expected_generation")},
    **{name: name for name in ("stage_only", "validate_only", "refuse_non_finite")},
}
"""From an option to its field, for all options but `progress`. The other requests have some of them, too."""


def begin_message(options: UpdateOptions) -> weights_pb2.UpdateWeightsBegin:
    """Build the message that begins an update, without its source. Raises TypeError for an unknown option or
    a value of a wrong type, and InvalidRequest, with every bad field, for values that the wire cannot carry.
    """
    given = given_of(options, (*_FIELDS, "progress"))
    if "label" not in given:
        raise TypeError("give a label for the new weights: label='step-17'")
    begin = weights_pb2.UpdateWeightsBegin()
    _fill(begin, "begin.", {name: value for name, value in given.items() if name in _FIELDS})
    return begin


def commit_request(
    update_id: str, policy: InFlightPolicy | None, drain_timeout_s: float | None
) -> control_pb2.CommitWeightsRequest:
    request = control_pb2.CommitWeightsRequest()
    _fill(request, "", {"update_id": update_id, "policy": policy, "drain_timeout_s": drain_timeout_s})
    return request


def discard_request(update_id: str) -> control_pb2.DiscardWeightsRequest:
    request = control_pb2.DiscardWeightsRequest()
    _fill(request, "", {"update_id": update_id})
    return request


def pause_request(
    policy: InFlightPolicy | None, drain_timeout_s: float | None, free_kv_cache: bool, offload_weights: bool
) -> control_pb2.PauseRequest:
    request = control_pb2.PauseRequest(free_kv_cache=free_kv_cache, offload_weights=offload_weights)
    _fill(request, "", {"policy": policy, "drain_timeout_s": drain_timeout_s})
    return request


def _fill(message: Any, prefix: str, options: Mapping[str, Any]) -> None:
    """Set the fields of the options that are not None. Raises InvalidRequest with every bad field."""
    violations = Violations()
    for option, value in options.items():
        with violations.of(f"{prefix}{_FIELDS[option]}"), named(option):
            if value is not None:
                _set(message, _FIELDS[option], value)
    violations.tell()


def _set(message: Any, name: str, value: Any) -> None:
    match name:
        case "in_flight":
            chosen = one_of(value, get_args(InFlightPolicy))
            message.in_flight = weights_pb2.InFlightPolicy.Value(f"IN_FLIGHT_POLICY_{chosen}")
        case "staging":
            message.staging = weights_pb2.StagingMode.Value(
                f"STAGING_MODE_{one_of(value, get_args(Staging))}"
            )
        case "drain_timeout":
            if not value >= 0:  # NaN too
                raise ValueError(f"must be at least 0 seconds, not {value}")
            message.drain_timeout.FromNanoseconds(round(value * 1e9))
        case "expected_generation":
            message.expected_generation = value.generation if isinstance(value, WeightsVersion) else value
        case _:
            setattr(message, name, value)


RequestT = TypeVar("RequestT", bound=Any)
"""A message of a stream that brings tensors."""
_MOST_CHUNK_BYTES: Final = 8 << 20
"""A server may take more, but that would only cost memory."""
_MOST_LISTED: Final = 4096
"""Chunks in one message, which is the most that a server takes."""
_MOST_LISTED_BYTES: Final = 1 << 20
"""Bytes of small chunks in one message: more of them gain nothing, and wait for each other."""
_BESIDE_DATA: Final = 32
"""The most bytes that a chunk in a list has beside its data."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update, which may be sent several times."""

    begin: weights_pb2.UpdateWeightsBegin
    """With its source; `described` adds the manifest."""
    tensors: tuple[Tensor, ...]
    """Empty for an update by URI, whose files the server reads itself."""
    progress: bool | Progress

    @property
    def update_id(self) -> str:
        return self.begin.update_id

    @property
    def title(self) -> str:
        return "Sending weights"

    @property
    def num_bytes(self) -> int:
        """Of all tensors that will be sent."""
        return 0 if self.begin.validate_only else sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def needs_chunks(self) -> bool:
        return self.num_bytes > 0

    def steps(self, chunk_bytes: int) -> Iterator[tuple[weights_pb2.UpdateWeightsRequest, int]]:
        """Yield the messages of the stream, in order, once the update has its manifest, each with how many
        bytes of tensors are in it.
        """
        yield weights_pb2.UpdateWeightsRequest(begin=self.begin), 0
        tensors = self.tensors if self.needs_chunks else ()
        yield from steps_of(tensors, chunk_bytes, weights_pb2.UpdateWeightsRequest)
        commit = weights_pb2.UpdateWeightsCommit(total_bytes=self.num_bytes)
        yield weights_pb2.UpdateWeightsRequest(commit=commit), 0


def update_of(tensors: Tensors | None, uri: str | None, options: UpdateOptions) -> Update:
    """Make an update of the arguments of `update_weights`. Reads no tensor's bytes.

    Raises TypeError unless there is exactly one source, and what `begin_message`, `tensors_of` and
    `tensors_in` raise.
    """
    if (tensors is None) == (uri is None):
        raise TypeError("give either tensors (arrays or a path) or uri")
    begin = begin_message(options)
    begin.update_id = begin.update_id or uuid.uuid4().hex
    if uri is not None:
        with checked("begin.uri"):
            begin.uri = uri
    progress = options.get("progress")
    return Update(
        begin, () if tensors is None else _read(tensors), progress=True if progress is None else progress
    )


def _read(tensors: Tensors) -> tuple[Tensor, ...]:
    if isinstance(tensors, Mapping):
        return tensors_of(tensors)
    if isinstance(tensors, str | os.PathLike):
        return tensors_in(tensors)
    raise TypeError(f"tensors are a mapping of names to arrays or a path, not {type(tensors).__name__}")


def described(update: Update) -> Update:
    """Return the update with its manifest, which needs the checksums of all tensors: it reads all of their
    bytes, unless the update only asks whether they would be taken.
    """
    if update.begin.HasField("uri"):
        return update
    begin = weights_pb2.UpdateWeightsBegin()
    begin.CopyFrom(update.begin)
    begin.manifest.CopyFrom(manifest_of(update.tensors, checksums=not begin.validate_only))
    return replace(update, begin=begin)


def steps_of(
    tensors: Iterable[Tensor], chunk_bytes: int, make: Callable[[], RequestT]
) -> Iterator[tuple[RequestT, int]]:
    """Yield the messages that bring the tensors, in order, each with how many bytes of tensors it has. `make`
    makes an empty one. Tensors are read when it is their turn, so no more than a message is in memory.

    A message costs as much as many kilobytes do, and an adapter has hundreds of small tensors, so small
    chunks share messages.
    """
    most = min(chunk_bytes, _MOST_LISTED_BYTES)
    held: list[tuple[int, int, bytes]] = []  # the tensor's index, offset and bytes of each chunk
    num_bytes = 0

    def step() -> tuple[RequestT, int]:
        message = make()
        # Filled in place: a message that is given to another one is copied, with all of its bytes.
        add = message.chunks.chunks.add if len(held) > 1 else None
        for index, offset, data in held:
            chunk = message.chunk if add is None else add()
            chunk.tensor_index, chunk.offset, chunk.data = index, offset, data
        return message, sum(len(data) for _, _, data in held)

    for index, tensor in enumerate(tensors):
        offset = 0
        for data in tensor.pieces(chunk_bytes):
            added = len(data) + _BESIDE_DATA
            if held and (num_bytes + added > most or len(held) == _MOST_LISTED):
                yield step()
                held, num_bytes = [], 0
            held.append((index, offset, data))
            num_bytes += added
            offset += len(data)
    if held:
        yield step()


def chunk_bytes_of(max_chunk_bytes: int) -> int:
    """Tell how many bytes of a tensor to send at once, to a server whose most is this. It is 0 for a server
    that takes no updates, which says so itself when one begins.
    """
    return min(max_chunk_bytes or _MOST_CHUNK_BYTES, _MOST_CHUNK_BYTES)


def weights_digest(tensors: Tensors) -> bytes:
    """Compute the SHA-256 that `WeightsUpdate.digest` and `ModelInfo.weights_digest` have after an update
    with these tensors. It reads all of their bytes.

    A trainer compares it to know that the server has exactly its weights. Raises as `update_weights` does for
    tensors that cannot be sent.
    """
    return digest_of(_read(tensors))
