"""Every RPC of the contract has a rule, and the rules are the agreed ones."""

from __future__ import annotations

import pytest

from penstock.cli.__main__ import main
from penstock.service.access.callers import ANYBODY, Caller, Role
from penstock.service.access.roles import RULES, check_adapter, check_model, check_role, rule_of
from penstock.service.access_errors import Forbidden
from penstock.service.gateways import vllm_service
from penstock.v1 import control_pb2, inference_pb2

INFER = Caller("i", frozenset({Role.INFER}))
CONTROL = Caller("c", frozenset({Role.CONTROL}))
CONTRACT = {
    f"{service.full_name}/{method.name}"
    for file in (inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
GATEWAYS = {f"{vllm_service.SERVICE.full_name}/{method.name}" for method in vllm_service.SERVICE.methods}
"""The methods of a gateway's service, which anybody may call who may generate."""
EVERYBODY = {
    *("InferenceService/Generate", "InferenceService/Stream", "InferenceService/Abort"),
    *("InferenceService/Embed", "InferenceService/Score", "InferenceService/Rerank"),
    "InferenceService/Classify",
    *("ControlService/GetModelInfo", "ControlService/GetServerInfo", "ControlService/GetLoad"),
    *("ControlService/WatchLoad", "ControlService/ListAdapters"),
    *("ControlService/Tokenize", "ControlService/Detokenize", "ControlService/GetVocabulary"),
}


def test_every_rpc_of_the_contract_has_a_rule():
    """An RPC that is added to the contract fails here until somebody has decided which role it needs."""
    assert (len(CONTRACT), len(GATEWAYS)) == (27, 7)
    assert set(RULES) == CONTRACT | GATEWAYS


@pytest.mark.parametrize("command", ["serve", "keys add"])
def test_the_help_names_all_rpcs_that_are_bounded_together(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    said = " ".join(capsys.readouterr().out.split())
    *names, last = (
        method.rpartition("/")[2] for method, rule in RULES.items() if rule.counts and method in CONTRACT
    )
    assert f"{', '.join(names)} and {last}" in said


@pytest.mark.parametrize("method", sorted(CONTRACT | GATEWAYS))
def test_who_may_call_it(method):
    check_role(CONTROL, method)
    check_role(ANYBODY, method)
    if method in GATEWAYS or method.removeprefix("penstock.v1.") in EVERYBODY:
        check_role(INFER, method)
    else:
        with pytest.raises(Forbidden, match=r"needs a key with the role control, which 'i' does not have"):
            check_role(INFER, method)


def test_what_is_in_no_table_is_for_control_only():
    assert rule_of("penstock.v1.ControlService/Tomorrow").role is Role.CONTROL


def test_adapters():
    check_adapter(INFER, "a")
    limited = Caller("l", frozenset(Role), adapters=frozenset({"a", "b"}))
    check_adapter(limited, "a")
    with pytest.raises(Forbidden, match="'l' does not allow the adapter 'c'"):
        check_adapter(limited, "c")


def test_models():
    check_model(INFER, "m")
    limited = Caller("l", frozenset(Role), frozenset({"m", "n"}))
    check_model(limited, "m")
    with pytest.raises(Forbidden, match="'l' does not allow the model that is served here"):
        check_model(limited, "o")
