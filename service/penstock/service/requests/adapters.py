"""Converts what callers ask of adapters to validated frozen values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.adapters.interface import check_name
from penstock.runtime.errors import InvalidRequest, UnsupportedFeature, Violation
from penstock.runtime.file_uris import path_of
from penstock.runtime.sent_tensors import SentTensor
from penstock.service.access.callers import Caller
from penstock.service.access.roles import check_adapter
from penstock.service.requests.control import out_of_order, to_tensors
from penstock.service.requests.generate import Violations
from penstock.service.requests.support import check_supported
from penstock.v1 import adapters_pb2

MAX_CONFIG_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAdapter:
    """An adapter that a caller wants to have loaded."""

    name: str
    replace: bool
    """Whether it may take the place of another one of this name."""
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOnDisk(AskedAdapter):
    """An adapter that the server is to read."""

    directory: Path
    """Where it is: in the server's directory of adapters, by its name, or below that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAdapter(AskedAdapter):
    """An adapter whose tensors follow on the stream."""

    config: Mapping[str, Any]
    """What PEFT's adapter_config.json holds."""
    manifest: Sequence[SentTensor]


def to_load(message: adapters_pb2.LoadAdapterRequest, root: Path | None, caller: Caller) -> AdapterOnDisk:
    """Check and convert the message. `root`: where adapters may lie; None: nowhere. Looks at the disk. Raises
    UnsupportedFeature and InvalidRequest, and Forbidden for the folder of an adapter that the caller may not
    use.
    """
    check_supported(message)
    bad = Violations()
    _check_name("name", message.name, bad)
    bad.raise_if_any()
    if root is None:
        raise UnsupportedFeature(["LoadAdapter"], "the server was started without --adapter-dir")
    directory = _below(root, message.uri) if message.uri else root / message.name
    # What lies elsewhere is refused alike, whether it exists or not.
    if message.uri and directory is not None:
        check_adapter(caller, directory.relative_to(os.path.realpath(root)).parts[0])
    if directory is None or not os.path.isdir(directory):  # no error for a name that is too long for a file
        named = "uri" if message.uri else "name"
        raise InvalidRequest([Violation(named, "names no directory below the server's --adapter-dir")])
    return AdapterOnDisk(
        name=message.name, replace=message.replace, pinned=message.pinned, directory=directory
    )


def _below(root: Path, uri: str) -> Path | None:
    """Return the path that a URI names, without symbolic links; None if it does not lie below `root`. What is
    named by a name alone is not looked at so, because only the operator can put a link into `root`.
    """
    real = Path(os.path.realpath(path_of(uri, "uri")))
    return real if Path(os.path.realpath(root)) in real.parents else None


def to_push(message: adapters_pb2.PushAdapterRequest) -> SentAdapter:
    """Check and convert the first message of a push. Raises UnsupportedFeature and InvalidRequest."""
    check_supported(message)
    if message.WhichOneof("step") != "begin":
        raise out_of_order("begin must be the first message")
    begin, bad = message.begin, Violations()
    _check_name("begin.name", begin.name, bad)
    config = _config(begin.config_json, bad)
    manifest = to_tensors(begin.manifest, bad)
    if not begin.manifest.tensors:
        bad.add("begin.manifest.tensors", "at least one is required")
    bad.raise_if_any()
    return SentAdapter(
        name=begin.name, replace=begin.replace, pinned=begin.pinned, config=config, manifest=manifest
    )


def named_adapter(message: adapters_pb2.UnloadAdapterRequest | adapters_pb2.PinAdapterRequest) -> str:
    """Check the message, and return the name of the adapter that it is about. Raises InvalidRequest."""
    check_supported(message)
    bad = Violations()
    _check_name("name", message.name, bad)
    bad.raise_if_any()
    return message.name


def is_name(name: str) -> bool:
    """Say whether an adapter can have this name."""
    try:
        check_name(name)
    except InvalidRequest:
        return False
    return True


def _check_name(field: str, name: str, bad: Violations) -> None:
    try:
        check_name(name)
    except InvalidRequest as error:
        for violation in error.violations:
            bad.add(field, violation.description)


def _config(text: str, bad: Violations) -> Mapping[str, Any]:
    field = "begin.config_json"
    if not text:
        bad.add(field, "must not be empty")
        return {}
    if len(text.encode()) > MAX_CONFIG_BYTES:
        bad.add(field, f"must have at most {MAX_CONFIG_BYTES} bytes")
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        bad.add(field, f"is not JSON: {error}")
        return {}
    if not isinstance(config, dict):
        bad.add(field, "must be a JSON object")
        return {}
    return config
