"""Defines what an endpoint is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.openai.schemas.base import Body

_KEY: Final = "penstock.endpoint"
_PARAMS: Final = "penstock.params"
_IGNORED: Final = "penstock.ignored"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table of endpoints (app.py)."""

    method: str
    path: str
    """In Starlette's form, such as "/v1/models/{model:path}"."""
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type[Body] | None = None
    """What its requests are read as; None where they have no body."""
    params: Mapping[str, str] = field(default_factory=dict)
    """From paths of the contract to fields of the body, so that errors of the server name the latter."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The JSON Schemas of the parameters that its query may have, by their names."""
    is_api: bool = True
    """Whether it is a part of the API: it has a line in the access log, and is refused while the front
    drains.
    """


def mark(scope: Scope, endpoint: Endpoint) -> None:
    """Note which endpoint a request came to."""
    scope[_KEY] = endpoint


def endpoint_of(scope: Scope) -> Endpoint | None:
    """Return the endpoint that a request came to; None where no path matched."""
    found: Endpoint | None = scope.get(_KEY)
    return found


def name_params(scope: Scope, make: Callable[[], Mapping[str, str]]) -> None:
    """Note what makes the table of `Endpoint.params` for this one request, whose body decides about some
    names. It is called if the request fails.
    """
    scope[_PARAMS] = make


def params_of(scope: Scope) -> Mapping[str, str]:
    """Return the names of the contract's paths for a request."""
    make: Callable[[], Mapping[str, str]] | None = scope.get(_PARAMS)
    if make is not None:
        return make()
    endpoint = endpoint_of(scope)
    return {} if endpoint is None else endpoint.params


def ignored_in(scope: Scope) -> set[str]:
    """Return the fields of a request that have no effect, such as "user" and "messages[].name", of which its
    caller and the log are told. Whoever finds out about one adds it, in words that no caller wrote.
    """
    ignored: set[str] = scope.setdefault(_IGNORED, set())
    return ignored
