"""Which RPC is whose, in one table. A test walks the contract: an RPC that has no rule here fails it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.service.access.callers import Caller, Role
from penstock.service.access_errors import Forbidden

_INFERENCE = "penstock.v1.InferenceService"
_CONTROL = "penstock.v1.ControlService"


@dataclass(frozen=True, slots=True)
class Rule:
    """What an RPC asks of its caller."""

    role: Role
    """The one that is needed; CONTROL may do all."""
    counts: bool = False
    """Whether it is one of the requests that a key's rates limit. Those that cost next to nothing are not:
    a caller at its limit may still look at the load, and abort what it has.
    """


RULES: Mapping[str, Rule] = {
    f"{_INFERENCE}/Generate": Rule(Role.INFER, counts=True),
    f"{_INFERENCE}/Stream": Rule(Role.INFER, counts=True),
    f"{_INFERENCE}/Abort": Rule(Role.INFER),  # its own requests; those of others only with CONTROL
    f"{_INFERENCE}/UpdateWeights": Rule(Role.CONTROL),
    f"{_CONTROL}/GetModelInfo": Rule(Role.INFER),
    f"{_CONTROL}/GetServerInfo": Rule(Role.INFER),
    f"{_CONTROL}/GetLoad": Rule(Role.INFER),
    f"{_CONTROL}/Tokenize": Rule(Role.INFER, counts=True),
    f"{_CONTROL}/Detokenize": Rule(Role.INFER, counts=True),
    f"{_CONTROL}/Pause": Rule(Role.CONTROL),
    f"{_CONTROL}/Resume": Rule(Role.CONTROL),
    f"{_CONTROL}/CommitWeights": Rule(Role.CONTROL),
    f"{_CONTROL}/DiscardWeights": Rule(Role.CONTROL),
    f"{_CONTROL}/FlushCache": Rule(Role.CONTROL),
}
"""Method, as "penstock.v1.Service/Method", to its rule."""


def rule_of(method: str) -> Rule:
    """One that is not in the table needs CONTROL."""
    return RULES.get(method, Rule(Role.CONTROL))


def check_role(caller: Caller, method: str) -> None:
    """Raises Forbidden unless the caller has the role that the method needs."""
    role = rule_of(method).role
    if role not in caller.roles and not caller.controls:
        name = method.rpartition("/")[2]
        raise Forbidden(f"{name} needs a key with the role {role.value}, which {caller.id!r} does not have")


def check_model(caller: Caller, served: str) -> None:
    """Raises Forbidden where the caller's key is for other models than the one that is served here."""
    if caller.models and served not in caller.models:
        raise Forbidden(f"the key {caller.id!r} is not for the model that is served here")
