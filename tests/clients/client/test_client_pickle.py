"""Errors survive pools of processes: each class of the client, of the runtime and of the service."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest

from penstock import client as api
from penstock.client.status import StatusDetails, Violation
from penstock.runtime import errors as runtime
from penstock.runtime.sent_tensors import TensorProblem, TensorReason
from penstock.service import errors as service

DETAILS = StatusDetails(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "told so",
    "QUEUE_FULL",
    (("limit", "9"),),
    (Violation("a.b", "bad"),),
    2.5,
    "r-1",
)
WAYS = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def tree(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(below for child in root.__subclasses__() for below in tree(child))]


CLIENT_TREE: list[Any] = [c for c in tree(api.PenstockClientError) if c.__module__.startswith("penstock.")]

SAMPLES: dict[str, Any] = {
    "str": "x",
    "int": 7,
    "float": 2.5,
    "float | None": 2.5,
    "str | None": "x",
    "Sequence[str]": ("x", "y"),
    "Sequence[Violation]": (runtime.Violation("a.b", "bad"),),
    "Sequence[TensorProblem]": (TensorProblem("a", TensorReason.MISSING),),
    "bool": True,
    "datetime": datetime(2026, 1, 2, tzinfo=UTC),
}
"""A value for each argument of a constructor, by the argument's type."""

SERVER_TREE: list[Any] = [c for c in tree(runtime.PenstockError) if c.__module__.startswith("penstock.")]


def made(kind: Any) -> Any:
    if kind.__init__ is Exception.__init__:
        return kind("told so")
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    given = {
        p.name: SAMPLES[p.annotation.removeprefix("errors.").replace("[errors.", "[")]
        for p in parameters
        if p.kind is not p.KEYWORD_ONLY or p.default is p.empty
    }
    return kind(**given)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CLIENT_TREE, ids=lambda kind: kind.__name__)
def test_errors_of_the_client(kind, way):
    error = kind(DETAILS)
    error.add_note("noted")
    again = WAYS[way](error)
    assert type(again) is kind
    assert (str(again), again.details, again.__notes__) == ("told so", DETAILS, ["noted"])
    assert (again.code, again.reason, again.retry_after, again.request_id) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        2.5,
        "r-1",
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SERVER_TREE, ids=lambda kind: kind.__name__)
def test_errors_of_the_engine_and_the_service(kind, way):
    error = made(kind)
    again = WAYS[way](error)
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_the_walks_see_the_trees():
    assert {api.QueueFull, api.ProtocolError, api.InvalidRequest} <= set(CLIENT_TREE)
    assert {runtime.QueueFull, service.StalledReader} <= set(SERVER_TREE)


def ask(addr: str) -> str:
    with api.Client(addr) as client:
        return client.generate("p").text


def test_a_refusal_in_a_pool_of_processes_reaches_the_parent(server, failure):
    server.failure = failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "no", violations=[("a", "b")])
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(api.InvalidRequest) as caught:
            pool.submit(ask, server.addr).result(timeout=120)
        assert [(v.field, v.description) for v in caught.value.violations] == [("a", "b")]
        server.failure = None
        assert pool.submit(ask, server.addr).result(timeout=120) == "Hello"  # the pool still works
