"""Many threads push at once while requests run: one update at a time, and each is whole or not at all."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from penstock.runtime.errors import UpdateUnderWay
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.updating.interface import Staging, UpdateOutcome
from tests.support.collector import Collector, submit
from tests.support.models.toy import toy_engine, toy_tokens
from tests.support.updating import begun, send

THREADS, ROUNDS = 4, 40


def test_pushers_at_once_are_served_one_after_the_other() -> None:
    """Whatever they do, and whenever they give up. Every token is of the weights of its generation."""
    engine = toy_engine()
    live: dict[int, int] = {1: 1, 2: 1}  # generation to offset
    refused, sinks, lock = [0], [Collector() for _ in range(THREADS)], threading.Lock()

    def push(thread: int) -> None:
        rng = random.Random(thread)
        for round_ in range(ROUNDS):
            submit(engine, sinks[thread], f"{thread}.{round_}", [thread, round_], tokens=rng.randint(1, 30))
            offset = 1 + thread * ROUNDS + round_
            tensors = {"offset": np.full((1,), offset, np.float32)}
            update_id = f"update {offset}"
            end = rng.choice(["commit", "commit", "close", "take back", "stage", "discard", "in place"])
            policy = rng.choice([InFlightPolicy.WAIT, InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE])
            staging = Staging.IN_PLACE if end == "in place" else rng.choice([Staging.HOST, Staging.DEVICE])
            try:
                upload = begun(engine, tensors, update_id, in_flight=policy, staging=staging)
            except UpdateUnderWay:
                with lock:
                    refused[0] += 1
                continue
            try:
                if end == "close":
                    upload.write(0, 0, b"12")
                    continue
                total = send(upload, tensors)
                if end in ("stage", "discard"):
                    upload.stage(total)
                    if end == "discard":
                        assert engine.updater.discard(update_id)
                        continue
                    pending = engine.updater.commit_staged(update_id)
                else:
                    pending = upload.commit(total)
                if end == "take back" and pending.cancel():
                    assert pending.cancelled()
                    continue
                report = pending.result(60)
                assert report.outcome is UpdateOutcome.COMMITTED
                with lock:
                    live[report.current.generation] = offset
            finally:
                upload.close()

    try:
        # JAX counts an array from the host as two; the first weights came from elsewhere.
        engine.update_weights({"offset": np.ones((1,), np.float32)}, label="first").result(60)
        num_live = len(jax.live_arrays())
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(push, thread) for thread in range(THREADS)]:
                done.result(300)
        for thread, sink in enumerate(sinks):
            for round_ in range(ROUNDS):
                known = [thread, round_]
                sink.last(f"{thread}.{round_}")
                for output in sink.outputs[f"{thread}.{round_}"]:
                    for token in output.token_ids:
                        assert [token] == toy_tokens(known, 1, live[output.weights_generation])
                        known.append(token)
        assert sorted(live) == list(range(1, len(live) + 1))
        assert len(live) > 5
        assert engine.weights.generation == len(live)
        assert len(jax.live_arrays()) == num_live
        last = {"offset": np.full((1,), 7, np.float32)}
        upload = begun(engine, last, "last")
        upload.commit(send(upload, last)).result(60)
        upload.close()
        assert engine.ready
    finally:
        engine.shutdown()
