"""The base of both clients: a channel, the stubs over it, and the values that apply to every call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from penstock.client.connection.address import Access, Endpoint, check_existing, endpoint
from penstock.client.connection.channel import Attempts, ChannelOptions, Metadata, Retry, Timeouts, Tls, pairs
from penstock.v1 import control_pb2_grpc, inference_pb2_grpc

ChannelT = TypeVar("ChannelT", grpc.Channel, grpc.aio.Channel)


class BaseClient(ABC, Generic[ChannelT]):
    """The constructor of `Client` and `AsyncClient`. Their docstrings explain its arguments."""

    def __init__(
        self,
        addr: str | None = None,
        *,
        tls: Tls | bool = False,
        token: str | None = None,
        insecure: bool = False,
        timeout: float | None = None,
        retries: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        channel: ChannelT | None = None,
        metadata: Metadata | None = None,
        options: ChannelOptions = (),
    ) -> None:
        access = Access(
            tls=tls,
            token=token,
            insecure=insecure,
            credentials=credentials,
            metadata=metadata,
            options=options,
        )
        self._timeouts = Timeouts(timeout)
        self._retries = retries
        self._owns_channel = channel is None
        self._balanced = False
        if channel is None:
            found = endpoint(addr, access)
            self.metadata = found.metadata
            self._balanced = found.balanced
            channel = self._open(found)
        else:
            check_existing(addr, access)
            self.metadata = pairs(metadata)
        self.channel: ChannelT = channel
        # the generated stubs work on both kinds of channel; the subclasses declare which kind they have
        either: Any = channel
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(either)
        self.control: Any = control_pb2_grpc.ControlServiceStub(either)
        health: Any = health_pb2_grpc.HealthStub(either)  # its type stub lacks the methods
        self._check_health = health.Check

    def _attempts(self, timeout: float | None, otherwise: float | None = None) -> Attempts:
        """Return the attempts at a call whose caller gave this timeout; `otherwise` counts if nobody gave
        one.
        """
        return Attempts(self._retries, self._timeouts.of(timeout, otherwise))

    def _sent(self, metadata: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata that a call sends: the client's, and then its own."""
        return pairs(self.metadata, metadata)

    def _check_one_server(self) -> None:
        """Raise ValueError if calls go to several servers in turn, for a call that changes the one that it
        reaches: the next call would find another one, and they would no longer serve the same.
        """
        if self._balanced:
            raise ValueError(
                "this client calls several servers in turn; to change them, make a client for each address"
            )

    @staticmethod
    @abstractmethod
    def _open(found: Endpoint) -> ChannelT:
        """Open a channel to the endpoint."""
