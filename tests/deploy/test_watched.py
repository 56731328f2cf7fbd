"""A real Prometheus scrapes a real server under traffic, evaluates the rules, and answers every question of
the dashboard.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from penstock.client import Client, FinishReason, JsonSchema, PenstockClientError, TensorsRefused
from tests.deploy.files import RULES, alerts, asked_by_panels, dashboard
from tests.support.demo_server import ROOT, served_demo
from tests.support.otlp import OtlpReceiver
from tests.support.prometheus import PROGRAM, Prometheus, free_port, prometheus

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(PROGRAM is None, reason="no prometheus here (Debian's package prometheus)"),
]
WEIGHTS = ROOT / "runtime/penstock/runtime/loading/demo_model/model.safetensors"
NO_NUMBERS = {"model.norm.weight": np.full(256, np.nan, np.float32)}
"""Weights that the server begins to take, and then refuses."""
NOBODY = "127.0.0.1:1"
"""A second target, where no server is."""
WINDOW = "20s"
"""What stands for Grafana's $__rate_interval, with a scrape every two seconds."""
SCHEMA = JsonSchema(
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
)


@dataclass(frozen=True)
class Watched:
    """A server, who watches it, and since when there has been traffic."""

    address: str
    metrics: str
    """Where Prometheus reads its metrics."""
    prometheus: Prometheus
    receiver: OtlpReceiver
    traffic: Future[None]
    since_s: float

    def values_of(self, promql: str) -> list[float]:
        return self.prometheus.values_of(promql, self.since_s)

    def wait_until(self, condition: Callable[[], bool], what: Callable[[], object]) -> None:
        """Wait for what Prometheus will know of the traffic."""

        def known() -> bool:
            if self.traffic.done():
                self.traffic.result()  # raises what ended it
            return condition()

        self.prometheus.wait_until(known, what)


def one_caller(client: Client, number: int) -> None:
    """Do a bit of everything that the dashboard shows, refusals included."""
    story = "Once upon a time there was a fox. " * 4
    client.generate(story + "The fox", max_tokens=12, n=2)
    client.generate("Once upon a time", max_tokens=8, temperature=0)
    client.generate(messages=[{"role": "user", "content": f"what is 3 + {number}?"}], max_tokens=12)
    client.generate("A number: ", constraint=SCHEMA, max_tokens=16)
    with client.stream("Once upon a time", max_tokens=200, ignore_eos=True) as stream:
        next(iter(stream))  # and then it is left
    with contextlib.suppress(PenstockClientError):
        client.generate("x", model="another")
    client.tokenize("a long text " * 2_000)


def go_on(address: str, end: threading.Event) -> None:
    """Traffic of six callers at a time, and a trainer, until the end."""
    with Client(address) as client, ThreadPoolExecutor(6) as callers:
        while not end.is_set():
            list(callers.map(lambda number: one_caller(client, number), range(6)))
            client.update_weights(WEIGHTS, label="again", policy="keep", progress=False)
            with contextlib.suppress(TensorsRefused):
                client.update_weights(
                    NO_NUMBERS, label="bad", partial=True, refuse_non_finite=True, progress=False
                )
            client.pause()
            client.resume()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    metrics = f"127.0.0.1:{free_port()}"
    flags = ["--metrics-port", metrics.partition(":")[2], "--max-num-seqs", "8"]
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "penstock", "static_configs": [{"targets": [metrics, NOBODY]}]}],
    }
    end = threading.Event()
    with OtlpReceiver() as receiver, contextlib.ExitStack() as stack:
        address = stack.enter_context(served_demo(*flags, "--otlp-endpoint", receiver.endpoint))
        seen = stack.enter_context(prometheus(tmp_path_factory.mktemp("prometheus"), config))
        since_s = time.time()
        traffic = stack.enter_context(ThreadPoolExecutor(1)).submit(go_on, address, end)
        stack.callback(end.set)
        yield Watched(address, metrics, seen, receiver, traffic, since_s)
        end.set()
        traffic.result(60)


OPTIONAL = ("Requests by adapter", "Proposed tokens", "Accepted share by position")
"""Panels without values on a server that has neither adapters nor speculation."""


def test_the_dashboard_asks_nothing_that_has_no_answer(watched: Watched) -> None:
    questions = {
        one.place: one.promql.replace("$instance", ".*").replace("$__rate_interval", WINDOW)
        for one in asked_by_panels()
        if not any(f"'{title}'" in one.place for title in OPTIONAL)
    }
    assert len(questions) > 60
    unanswered = dict(questions)

    def all_answered() -> bool:
        for place, promql in list(unanswered.items()):
            if watched.values_of(promql):
                del unanswered[place]
        return not unanswered

    watched.wait_until(all_answered, lambda: unanswered)


def test_the_marks_of_weight_updates_have_answers(watched: Watched) -> None:
    (promql,) = [a["expr"] for a in dashboard()["annotations"]["list"] if a["name"] == "New weights"]
    promql = promql.replace("$instance", ".*").replace("$__rate_interval", WINDOW)
    watched.wait_until(lambda: bool(watched.values_of(promql)), lambda: promql)


def test_the_choices_at_the_top_have_values(watched: Watched) -> None:
    ask = watched.prometheus.ask
    watched.wait_until(lambda: ask("label/model/values") == ["demo"], lambda: ask("labels"))
    (instance,) = ask("label/instance/values", **{"match[]": 'penstock_build_info{model=~"demo"}'})
    assert instance.startswith("127.0.0.1:")


def test_what_prometheus_counts_is_what_was_asked(watched: Watched) -> None:
    """Requests of one kind, which the traffic does not have, by what the calls answered."""
    mine = 'penstock_outputs_finished_total{reason="time_limit"}'
    watched.wait_until(lambda: bool(watched.values_of("up == 1")), lambda: "no scrape")
    with Client(watched.address) as client:
        outputs = [
            client.generate("Once upon a time", time_limit=0.05, max_tokens=400, ignore_eos=True).outputs[0]
            for _ in range(5)
        ]
    ended = sum(output.finish.reason is FinishReason.TIME_LIMIT for output in outputs)
    assert ended
    watched.wait_until(lambda: watched.values_of(mine)[-1:] == [ended], lambda: watched.values_of(mine))


def test_points_of_histograms_lead_to_traces_that_the_collector_has(watched: Watched) -> None:
    name = "gen_ai_server_time_to_first_token_seconds_bucket"

    def exemplars() -> set[str]:
        found = watched.prometheus.ask("query_exemplars", query=name, start=watched.since_s, end=time.time())
        return {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}

    def known() -> set[str]:
        return {span.trace_id for span in watched.receiver.spans}

    watched.wait_until(lambda: bool(exemplars() & known()), lambda: (exemplars(), known()))


def test_rules_are_evaluated_and_what_is_wrong_and_nothing_else_is_an_alert(watched: Watched) -> None:
    def rules() -> list[dict[str, str]]:
        return [rule for group in watched.prometheus.ask("rules")["groups"] for rule in group["rules"]]

    def firing() -> set[tuple[str, str]]:
        found = watched.prometheus.ask("alerts")["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"].get("instance", ""))
            for alert in found
            if alert["state"] == "firing"
        }

    watched.wait_until(lambda: all(rule["health"] == "ok" for rule in rules()), rules)
    assert {rule["name"] for rule in rules()} == {rule["alert"] for rule in alerts()}
    assert not any(rule.get("lastError") for rule in rules())
    watched.wait_until(lambda: len(firing()) >= 2, firing)
    assert firing() == {("PenstockDown", NOBODY), ("PenstockWeightUpdatesFailing", watched.metrics)}
