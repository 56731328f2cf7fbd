"""Sends batches over gRPC."""

from __future__ import annotations

import math
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.service.listening.listen_options import is_loopback
from penstock.service.telemetry.otlp.destination import Destination
from penstock.service.telemetry.otlp.transport import MOST_ANSWER_BYTES, Failed, Taken, quoted

_METHODS = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
_RETRYABLE = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""By OTLP's rules RESOURCE_EXHAUSTED is so only if the collector says when to come back."""
_OPTIONS = (
    ("grpc.max_receive_message_length", MOST_ANSWER_BYTES),
    # By default gRPC tries a lost collector again only after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


class GrpcTransport:
    """A channel to one collector."""

    def __init__(self, destination: Destination) -> None:
        """Make the channel, which connects at the first batch. Raises ConfigError for a bad certificate."""
        host = f"[{destination.host}]" if ":" in destination.host else destination.host
        target = f"{host}:{destination.port}"
        options = [*_OPTIONS, ("grpc.enable_http_proxy", int(not is_loopback(destination.host)))]
        gzip = grpc.Compression.Gzip if destination.is_compressed else grpc.Compression.NoCompression
        self._headers = destination.headers
        self._channel = (
            grpc.secure_channel(target, _credentials(destination), options=options, compression=gzip)
            if destination.is_tls
            else grpc.insecure_channel(target, options=options, compression=gzip)
        )
        self._export: Any = self._channel.unary_unary(_METHODS[destination.signal])

    def attempt(self, batch: bytes, timeout_s: float) -> Taken | Failed:
        """Send a batch once. Raises nothing."""
        try:
            return Taken(self._export(batch, timeout=timeout_s, metadata=self._headers))
        except grpc.RpcError as error:
            return _failed(error)
        except ValueError:  # the channel is closed
            return Failed("it is shut down")

    def close(self) -> None:
        """End for good. An attempt that is under way fails at once."""
        self._channel.close()


def _credentials(destination: Destination) -> grpc.ChannelCredentials:
    destination.tls_context()  # checks the files, which gRPC would only complain about in its log
    roots, chain, key = (
        None if path is None else path.read_bytes()
        for path in (
            destination.certificate,
            destination.client_certificate,
            destination.client_key or destination.client_certificate,
        )
    )
    return grpc.ssl_channel_credentials(roots, key, chain)


def _failed(error: Any) -> Failed:
    code = error.code()
    after_s = _retry_after_s(error.trailing_metadata() or ())
    told = quoted(error.details() or "")
    may_retry = code in _RETRYABLE or (code is grpc.StatusCode.RESOURCE_EXHAUSTED and after_s is not None)
    return Failed(f"{code.name} {told}".rstrip(), may_retry, after_s)


def _retry_after_s(trailers: Any) -> float | None:
    """The delay in a RetryInfo, whatever the collector has put there."""
    for name, value in trailers:
        if name != "grpc-status-details-bin":
            continue
        status, info = status_pb2.Status(), error_details_pb2.RetryInfo()
        try:
            status.ParseFromString(value)
            for detail in status.details:
                if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                    seconds = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
                    return max(0.0, seconds) if math.isfinite(seconds) else None
        except DecodeError:
            return None
    return None
