"""Writes the page that scrapers read, in Prometheus' text format or in OpenMetrics, which has exemplars.

Writing the page takes five to ten milliseconds of Python. So it gives way to the other threads after each
metric family, and a page is served again to whoever asks within KEEP_S: however many scrapers there are, and
however often they ask, writing pages takes a bounded share of the time.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client import exposition as text
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics

KEEP_S = 0.25
"""For how long a page is served again, in seconds."""
GIVE_WAY_S = 0.0001
"""How long the writer sleeps after each family, in seconds, so that another thread gets the interpreter."""
OPENMETRICS = "application/openmetrics-text"
_TEXTS = ("text/plain", "text/*", "*/*")


@dataclass(frozen=True, slots=True)
class Page:
    """What is sent to a scraper."""

    content_type: str
    body: bytes
    is_gzip: bool = False


class Pages:
    """Makes pages. Used on one thread."""

    def __init__(
        self,
        families: Callable[[], Iterable[Family]],
        *,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`families` is asked for each page, and may raise. Metrics of the process are added to its own."""
        self._families = families
        self._keep_s = keep_s
        self._clock = clock
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)
        self._kept: dict[bool, tuple[float, Page]] = {}
        """When each form was written, and what it is; by whether it is OpenMetrics."""
        self._zipped: dict[bool, Page] = {}

    def page(self, accept: str, accept_encoding: str) -> Page:
        """The page in the form that these headers of a request prefer. Raises what `families` raises."""
        is_openmetrics = prefers_openmetrics(accept)
        made_s, page = self._kept.get(is_openmetrics, (0.0, None))
        if page is None or self._clock() >= made_s + self._keep_s:
            page = self._write(is_openmetrics)
            self._kept[is_openmetrics] = self._clock(), page
            self._zipped.pop(is_openmetrics, None)
        if not _accepts_gzip(accept_encoding):
            return page
        if is_openmetrics not in self._zipped:
            self._zipped[is_openmetrics] = _zipped(page)
        return self._zipped[is_openmetrics]

    def _write(self, is_openmetrics: bool) -> Page:
        if is_openmetrics:
            # No name needs UTF-8, but prometheus_client's default breaks names with a colon, as vLLM's are.
            write: Callable[..., bytes] = openmetrics.generate_latest
            return Page(openmetrics.CONTENT_TYPE_LATEST, write(self, escaping=openmetrics.ALLOWUTF8))
        return Page(text.CONTENT_TYPE_PLAIN_0_0_4, text.generate_latest(self))

    def collect(self) -> Iterator[Family]:
        """All families, for prometheus_client."""
        for family in self._families():
            yield family
            time.sleep(GIVE_WAY_S)
        yield from self._process.collect()


def _zipped(page: Page) -> Page:
    return Page(page.content_type, gzip.compress(page.body, compresslevel=1), is_gzip=True)


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header weighs OpenMetrics at least as much as plain text."""
    weights = {name: weight for name, weight in _weights(accept) if weight > 0}
    plain = max((weights.get(name, 0.0) for name in _TEXTS), default=0.0)
    return OPENMETRICS in weights and weights[OPENMETRICS] >= plain


def _accepts_gzip(accept_encoding: str) -> bool:
    return any(name == "gzip" and weight > 0 for name, weight in _weights(accept_encoding))


def _weights(header: str) -> Iterator[tuple[str, float]]:
    """The names in a header such as "text/plain;version=0.0.4;q=0.5, */*;q=0.1", each with its weight. The
    weight of a name that stands there twice is that of its heaviest.
    """
    found: dict[str, float] = {}
    for part in header.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                weight = _number(value)
        found[name] = max(weight, found.get(name, 0.0))
    yield from found.items()


def _number(value: str) -> float:
    """A weight, from 0 to 1. What is none counts as 0, so that it is not chosen."""
    try:
        number = float(value)
    except ValueError:
        return 0.0
    return number if 0 <= number <= 1 else 0.0
