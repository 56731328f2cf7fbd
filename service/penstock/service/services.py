"""The services of one server: stand-ins from its start, and what answers once there is an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import grpc
from grpc_health.v1 import health_pb2_grpc

from penstock.service.gateways import vllm_service
from penstock.service.group.leader import GroupLeader, add_group_service
from penstock.service.identity import version
from penstock.service.lifecycle import health
from penstock.service.lifecycle.underway import LateServicer
from penstock.service.requests.generate import Features
from penstock.service.servicers.adapters import Adapters
from penstock.service.servicers.control import ControlServicer, Profiles
from penstock.service.servicers.inference import InferenceServicer
from penstock.service.servicers.reflection import enable_reflection
from penstock.service.servicers.serving import Serving
from penstock.service.servicers.weights import WeightUpdates
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
SERVICES = (_INFERENCE.full_name, _CONTROL.full_name)


class Services:
    """The contract's services, health, reflection, and what gateways ask for."""

    def __init__(
        self, health_servicer: health.Health, features: Features, group: GroupLeader | None = None
    ) -> None:
        """`group`: whom followers call; None: the server leads no group."""
        self._health, self._group = health_servicer, group
        self._inference, self._control = LateServicer(_INFERENCE), LateServicer(_CONTROL)
        self._vllm = LateServicer(vllm_service.SERVICE) if features.vllm_service else None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register all methods. Those that need an engine are refused as NOT_READY until `bind`."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            cast("inference_pb2_grpc.InferenceServiceServicer", self._inference), server
        )
        control_pb2_grpc.add_ControlServiceServicer_to_server(
            cast("control_pb2_grpc.ControlServiceServicer", self._control), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._vllm is not None:
            vllm_service.add_vllm_service(self._vllm, server)
        if self._group is not None:
            add_group_service(self._group, server)
        enable_reflection([*self._names(), health.SERVICE_NAME], server)

    def bind(self, serving: Serving, updates: WeightUpdates, profiles: Profiles, *, instance_id: str) -> None:
        """Answer with this engine from now on."""
        adapters = Adapters(serving, max_chunk_bytes=updates.max_chunk_bytes)
        inference, number = InferenceServicer(serving, updates), version()
        self._inference.bind(inference)
        self._control.bind(
            ControlServicer(serving, updates, profiles, adapters, version=number, instance_id=instance_id)
        )
        if self._vllm is not None:
            self._vllm.bind(vllm_service.VllmServicer(serving, inference, version=number))

    def _names(self) -> Sequence[str]:
        return SERVICES if self._vllm is None else (*SERVICES, vllm_service.SERVICE.full_name)
