"""The table of which RPC needs which role. A test fails for an RPC of the contract that is not in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.service.access.callers import Caller, Role
from penstock.service.access_errors import Forbidden

_INFERENCE = "penstock.v1.InferenceService"
_CONTROL = "penstock.v1.ControlService"
_VLLM = "vllm.grpc.engine.VllmEngine"


@dataclass(frozen=True, slots=True)
class Rule:
    """What an RPC demands of its caller."""

    role: Role
    """The role that the caller needs; CONTROL may call everything."""
    counts: bool = False
    """Whether the RPC counts against a key's rates. RPCs that cost next to nothing do not: a caller at its
    limit may still look at the load, and abort its requests.
    """


RULES: Mapping[str, Rule] = {
    f"{_INFERENCE}/Generate": Rule(Role.INFER, counts=True),
    f"{_INFERENCE}/Stream": Rule(Role.INFER, counts=True),
    f"{_INFERENCE}/Embed": Rule(Role.INFER, counts=True),
    f"{_INFERENCE}/Score": Rule(Role.INFER, counts=True),
    f"{_INFERENCE}/Rerank": Rule(Role.INFER, counts=True),
    f"{_INFERENCE}/Classify": Rule(Role.INFER, counts=True),
    f"{_INFERENCE}/Abort": Rule(Role.INFER),  # the caller's own requests; others' only with CONTROL
    f"{_INFERENCE}/UpdateWeights": Rule(Role.CONTROL),
    f"{_CONTROL}/GetModelInfo": Rule(Role.INFER),
    f"{_CONTROL}/GetServerInfo": Rule(Role.INFER),
    f"{_CONTROL}/GetLoad": Rule(Role.INFER),
    f"{_CONTROL}/WatchLoad": Rule(Role.INFER),  # requests are listed only with CONTROL
    f"{_CONTROL}/Tokenize": Rule(Role.INFER, counts=True),
    f"{_CONTROL}/Detokenize": Rule(Role.INFER, counts=True),
    f"{_CONTROL}/GetVocabulary": Rule(Role.INFER),  # a client asks for it once
    f"{_CONTROL}/Pause": Rule(Role.CONTROL),
    f"{_CONTROL}/Resume": Rule(Role.CONTROL),
    f"{_CONTROL}/CommitWeights": Rule(Role.CONTROL),
    f"{_CONTROL}/DiscardWeights": Rule(Role.CONTROL),
    f"{_CONTROL}/LoadAdapter": Rule(Role.CONTROL),
    f"{_CONTROL}/PushAdapter": Rule(Role.CONTROL),
    f"{_CONTROL}/UnloadAdapter": Rule(Role.CONTROL),
    f"{_CONTROL}/PinAdapter": Rule(Role.CONTROL),
    f"{_CONTROL}/ListAdapters": Rule(Role.INFER),  # those that the caller may use
    f"{_CONTROL}/FlushCache": Rule(Role.CONTROL),
    f"{_CONTROL}/SetTracing": Rule(Role.CONTROL),
    f"{_CONTROL}/Profile": Rule(Role.CONTROL),
    f"{_VLLM}/Generate": Rule(Role.INFER, counts=True),
    f"{_VLLM}/HealthCheck": Rule(Role.INFER),
    f"{_VLLM}/Abort": Rule(Role.INFER),  # only the caller's own requests
    f"{_VLLM}/GetModelInfo": Rule(Role.INFER),
    f"{_VLLM}/GetServerInfo": Rule(Role.INFER),
    f"{_VLLM}/GetLoads": Rule(Role.INFER),
    f"{_VLLM}/GetTokenizer": Rule(Role.INFER),
}
"""From a method, such as "penstock.v1.Service/Method", to its rule."""


def rule_of(method: str) -> Rule:
    """Look up the rule of a method; one that is not in the table needs CONTROL."""
    return RULES.get(method, Rule(Role.CONTROL))


def check_role(caller: Caller, method: str) -> None:
    """Raise Forbidden unless the caller has the role that the method needs."""
    role = rule_of(method).role
    if role not in caller.roles and not caller.controls:
        raise _lacking(caller, role, method.rpartition("/")[2])


def check_controls(caller: Caller, what: str) -> None:
    """Raise Forbidden unless the caller has the role CONTROL, which a part of an RPC needs."""
    if not caller.controls:
        raise _lacking(caller, Role.CONTROL, what)


def _lacking(caller: Caller, role: Role, what: str) -> Forbidden:
    return Forbidden(f"{what} needs a key with the role {role.value}, which {caller.id!r} does not have")


def check_model(caller: Caller, served: str) -> None:
    """Raise Forbidden if the caller's key is limited to other models than the served one."""
    if caller.models and served not in caller.models:
        raise Forbidden(f"the key {caller.id!r} does not allow the model that is served here")


def check_adapter(caller: Caller, name: str) -> None:
    """Raise Forbidden if the caller's key is limited to other adapters than this one."""
    if not caller.allows_adapter(name):
        raise Forbidden(f"the key {caller.id!r} does not allow the adapter {name!r}")
