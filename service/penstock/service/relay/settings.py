"""What the engine's process tells a front process at its start: where to listen, and what the server has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.service.listening.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """The settings of one front process."""

    address: str
    """Host and port, as gRPC reads them. All front processes listen on the same one."""
    tls: TlsFiles | None
    methods: Mapping[str, bool]
    """Each method of the server, such as "/penstock.v1.InferenceService/Stream", with whether it answers with
    a stream.
    """
    options: Sequence[tuple[str, int]]
    """The options of gRPC's core, without the bound on connections."""
    max_connections: int
    """How many connections this process may have; 0 means any number."""
    max_calls: int
    """How many calls this process may carry. Further ones are refused without details, because the engine's
    process, which gives details, does not keep up then.
    """
    log_level: int
    """The least level of lines that are wanted for the log."""

    def packed(self) -> bytes:
        """Pack the payload of START."""
        tls = None if self.tls is None else [None if file is None else str(file) for file in _files(self.tls)]
        return json.dumps({**dataclasses.asdict(self), "tls": tls}).encode()

    @classmethod
    def of(cls, payload: bytes) -> FrontSettings:
        """Take the payload of START apart."""
        values: dict[str, Any] = json.loads(payload)
        if values["tls"] is not None:
            cert, key, client_ca = values["tls"]
            values["tls"] = TlsFiles(Path(cert), Path(key), None if client_ca is None else Path(client_ca))
        return cls(**{**values, "options": [(name, value) for name, value in values["options"]]})


def _files(tls: TlsFiles) -> Sequence[Path | None]:
    return tls.cert, tls.key, tls.client_ca
