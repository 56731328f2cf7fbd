"""What is told of adapters, and what is handed over to load one. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import InvalidRequest, Violation

MAX_ADAPTER_NAME_CHARS = 128
AdapterState = Literal["loading", "cached", "loaded"]
"""Where its weights are: they are read now; on the host; on the device, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """What is known of one adapter at one moment."""

    name: str
    digest: str
    """SHA-256, in hexadecimal, of the SHA-256s of each 16 KiB of its numbers as they go to the device: those
    with equal digests answer alike. Empty while it loads.
    """
    rank: int
    """The largest rank of its matrices."""
    scaling: float
    """By what the product of its matrices is multiplied; where patterns differ, the largest."""
    targets: tuple[str, ...]
    """The last parts of the names of the layers that it changes, such as "q_proj", sorted."""
    num_bytes: int
    """Bytes of its weights on the host, as they go to the device."""
    state: AdapterState
    is_pinned: bool
    """Whether it stays in memory while no output uses it."""
    last_used_s: float
    """When a request last named it, or when it was loaded, in seconds since the epoch."""
    num_running: int
    """Outputs that run with its content."""
    source: str
    """The folder from which it was read, or "pushed"."""


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """An adapter that was sent: what PEFT writes to a folder, without the folder."""

    config: Mapping[str, Any]
    """What adapter_config.json holds."""
    tensors: Iterable[tuple[str, NDArray[np.generic]]]
    """(name, array) as adapter_model.safetensors has them. It is walked over once. An array may have
    ml_dtypes' bfloat16."""


def check_name(name: str) -> None:
    """Raise InvalidRequest unless `name` can be the name of an adapter. A name is never a path."""
    is_allowed = name and len(name) <= MAX_ADAPTER_NAME_CHARS and name[0] != "."
    if not is_allowed or not all(c.isprintable() and c not in '/\\:"' for c in name):
        described = (
            f"must have 1 to {MAX_ADAPTER_NAME_CHARS} printable characters, none of them / \\ : or a quote, "
            "and must not begin with a dot"
        )
        raise InvalidRequest([Violation("adapter", described)])
