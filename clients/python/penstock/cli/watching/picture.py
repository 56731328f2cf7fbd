"""Keeps what is to be shown while reports come and fail to come."""

from __future__ import annotations

from penstock.cli.watching.following import Event, Found, Lost, NoRequests
from penstock.cli.watching.history import History
from penstock.cli.watching.view import Shown
from penstock.client import LoadReport


class Picture:
    """What is known of one server."""

    def __init__(self, addr: str) -> None:
        self._addr = addr
        self._model = ""
        self._history = History()
        self._problem = ""
        self._why_no_requests = ""
        self.report: LoadReport | None = None
        """The newest report; None before the first."""

    def take(self, event: Event) -> None:
        """Take the next event. What was known stays until something else is."""
        match event:
            case Found():
                self._model = event.model
            case NoRequests():
                self._why_no_requests = event.why
            case Lost():
                self._problem = event.why
            case LoadReport():
                self._problem = ""
                self.report = event
                self._history.add(event)

    def shown(self) -> Shown:
        """Return what there is to show now; there must have been a report."""
        assert self.report is not None, "there is nothing to show before the first report"
        return Shown(
            addr=self._addr,
            model=self._model,
            report=self.report,
            history=self._history,
            problem=self._problem,
            why_no_requests=self._why_no_requests,
        )
