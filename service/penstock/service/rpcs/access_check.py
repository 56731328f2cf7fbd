"""Who may make which call: the one gate before every RPC, at its headers, before its message is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import grpc

from penstock.service.access.authentication import Authenticator
from penstock.service.access.callers import ANYBODY, CURRENT_CALLER, Caller
from penstock.service.access.rates import Account
from penstock.service.access.roles import check_model, check_role, rule_of
from penstock.service.listening.tls import certificate_names
from penstock.service.usage.meter import CURRENT_METER, Meter, UsageSink

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_OURS = "penstock.v1."
_OPEN = "grpc.health.v1.Health/"
"""Anybody may ask: probes cannot carry a key, and learn no more than whether the server is up."""


class Access:
    """The gate of one server. Without an authenticator it is open: everybody is ANYBODY."""

    def __init__(self, authenticator: Authenticator | None = None, sink: UsageSink | None = None) -> None:
        self._authenticator = authenticator
        self._sink = sink
        self.served_model: str | None = None
        """Once it is known: keys may be limited to models."""

    def authenticate(self, method: str, context: Context) -> None:
        """Set who makes this call of a method such as "penstock.v1.InferenceService/Generate", and the meter
        that counts what it uses. Raises Unauthenticated, KeyExpired or Forbidden. Reflection needs a key, of
        any role.
        """
        caller = ANYBODY
        if self._authenticator is not None and not method.startswith(_OPEN):
            metadata = cast("Any", context.invocation_metadata() or ())
            known = self._authenticator.authenticate(metadata)
            caller = known or self._authenticator.by_certificate(certificate_names(context))
        CURRENT_CALLER.set(caller)  # before more is checked: a refusal, too, is this caller's
        if not method.startswith(_OURS):
            return
        if rule_of(method).counts:
            CURRENT_METER.set(Meter(caller, method, self._account(caller), self._sink))
        check_role(caller, method)
        if self.served_model is not None:
            check_model(caller, self.served_model)

    def admit(self, method: str) -> Callable[[], None]:
        """Count this call against its caller's rates, if it is one that counts; call what is returned, once,
        when it has ended. Raises RateLimited or Busy.
        """
        account = self._account(CURRENT_CALLER.get()) if rule_of(method).counts else None
        if account is None:
            return _nothing
        account.admit()
        return account.leave

    def _account(self, caller: Caller) -> Account | None:
        return None if self._authenticator is None else self._authenticator.account(caller)


def _nothing() -> None:
    pass
