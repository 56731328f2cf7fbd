"""Decides which caller may make which call, from an RPC's headers, before its message is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import grpc

from penstock.service.access.authentication import Authenticator
from penstock.service.access.callers import ANYBODY, CURRENT_CALLER, Caller
from penstock.service.access.keys import Keys
from penstock.service.access.rates import Account
from penstock.service.access.roles import check_model, check_role, rule_of
from penstock.service.limits.admission import PACKAGES
from penstock.service.listening.tls import certificate_names
from penstock.service.telemetry.logs.access_log import AccessLog
from penstock.service.usage.meter import CURRENT_METER, CallLog, Meter, UsageSink

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_OPEN = "grpc.health.v1.Health/"
"""Calls of this service need no key: probes cannot carry one, and learn no more than whether the server is
up.
"""


class Access:
    """Checks the callers of one server. Without an authenticator every caller is ANYBODY."""

    def __init__(
        self,
        authenticator: Authenticator | None = None,
        sink: UsageSink | None = None,
        call_log: CallLog | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._sink = sink
        self._call_log = call_log
        self.served_model: str | None = None
        """The served model's name, once it is known, because keys may be limited to models."""

    def authenticate(self, method: str, context: Context) -> None:
        """Find out who makes this call, and set CURRENT_CALLER and, for an RPC that counts, CURRENT_METER.

        `method` is a name such as "penstock.v1.InferenceService/Generate". Reflection needs a key of any
        role. Raises Unauthenticated, KeyExpired or Forbidden.
        """
        caller = self._caller(method, context)
        # set before the other checks, so that a refusal too is logged for this caller
        CURRENT_CALLER.set(caller)
        if not method.startswith(PACKAGES):
            return
        if rule_of(method).counts:
            meter = Meter(caller, method, self._account(caller), self._sink, self._call_log)
            CURRENT_METER.set(meter)
        self._check(caller, method)

    def still(self, method: str, context: Context) -> Caller:
        """The caller of a call that is under way, by the keys that are valid now. For calls without an end: a
        key that was revoked must not see more. Raises Unauthenticated, KeyExpired or Forbidden.
        """
        caller = self._caller(method, context)
        self._check(caller, method)
        return caller

    def _caller(self, method: str, context: Context) -> Caller:
        if self._authenticator is None or method.startswith(_OPEN):
            return ANYBODY
        metadata = cast("Any", context.invocation_metadata() or ())
        known = self._authenticator.authenticate(metadata)
        return known or self._authenticator.by_certificate(certificate_names(context))

    def _check(self, caller: Caller, method: str) -> None:
        check_role(caller, method)
        if self.served_model is not None:
            check_model(caller, self.served_model)

    def admit(self, method: str) -> Callable[[], None]:
        """Count this call against its caller's rates, if it is an RPC that counts. Call the returned function
        once, when the RPC has ended. Raises RateLimited or Busy.
        """
        account = self._account(CURRENT_CALLER.get()) if rule_of(method).counts else None
        if account is None:
            return _nothing
        account.admit()
        return account.leave

    def _account(self, caller: Caller) -> Account | None:
        return None if self._authenticator is None else self._authenticator.account(caller)


def access_of(keys: Keys | None, sink: UsageSink | None, *, logs_calls: bool) -> Access:
    """The checks of a server with these keys, or without any. `logs_calls`: whether it has an access log."""
    return Access(None if keys is None else keys.authenticator, sink, AccessLog() if logs_calls else None)


def _nothing() -> None:
    pass
