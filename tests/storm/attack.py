"""What the faults of a storm share: where the server is, keys to it, and requests at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from penstock.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from tests.storm.honest import kind_of


@dataclass
class Attack:
    """What faults share."""

    address: str
    secrets: Mapping[str, str]
    rng: random.Random
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def bearer(self, key: str = "attacker") -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.secrets[key]}"),)

    def raw_bearer(self, key: str = "attacker") -> list[tuple[str, bytes]]:
        return [(name, value.encode()) for name, value in self.bearer(key)]

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.rng.choice(self.channels))

    @property
    def control(self) -> Any:
        return control_pb2_grpc.ControlServiceStub(self.rng.choice(self.channels))

    def words(self, most: int = 40) -> str:
        return " ".join(
            self.rng.choices(("the", "cat", "sat", "on", "a", "mat"), k=self.rng.randint(1, most))
        )

    def stream(self, **more: Any) -> inference_pb2.StreamRequest:
        rng = self.rng
        return inference_pb2.StreamRequest(
            prompt=self.words(),
            sampling=types_pb2.SamplingParams(temperature=rng.choice((0.0, 1.0)), n=rng.choice((1, 1, 4))),
            stopping=types_pb2.StoppingParams(max_tokens=rng.randint(1, 150), ignore_eos=True),
            **more,
        )


async def ended(call: Any) -> str:
    """How a call ends; a stream is read to its end."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return kind_of(error)[0]
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # within a task
            raise
        return "cancelled by us"
    return "OK"
