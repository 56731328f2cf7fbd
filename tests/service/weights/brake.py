"""Holds the thread of an engine between two steps, so that a test says what runs when an update comes, and
not the machine's speed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.runtime.loop.changes import Changes
from penstock.runtime.loop.requests import Delivery
from penstock.runtime.requests.request import StepOutput
from tests.service.rig import WAIT_S, until


class Brake:
    """The thread of one engine stops after it has handed over the outputs of a step, as long as the brake is
    on.
    """

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._is_on = False
        self._steps = 0
        """How many deliveries are let pass at least."""
        self._wanted = 0
        """How many requests are to have a token before the thread is held."""
        self._generation = 0
        """Which weights are to have made it, at least."""
        self._given: set[str] = set()
        """Which have one."""
        self._is_held = False
        self._asked: Counter[str] = Counter()
        """How often `update` and `pause` were called."""
        self._patch(monkeypatch)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        deliver, post, engine = Delivery.deliver, Delivery.post, self._engine

        def deliver_and_wait(delivery: Delivery) -> None:
            was_due = delivery.is_pending
            deliver(delivery)
            if was_due and threading.get_ident() == engine.pulse().thread_id:
                self._pass()

        def post_and_note(delivery: Delivery, outputs: Sequence[StepOutput]) -> None:
            post(delivery, outputs)
            if threading.get_ident() == engine.pulse().thread_id:
                self._given.update(
                    one.request_id
                    for one in outputs
                    if one.token_ids and one.weights_generation >= self._generation
                )

        def counted(name: str) -> Any:
            method = getattr(Changes, name)

            def count(changes: Changes, *args: Any, **more: Any) -> Any:
                queued = method(changes, *args, **more)
                if changes is engine.changes:
                    self._asked[name] += 1
                return queued

            return count

        monkeypatch.setattr(Delivery, "deliver", deliver_and_wait)
        monkeypatch.setattr(Delivery, "post", post_and_note)
        for name in ("update", "pause"):
            monkeypatch.setattr(Changes, name, counted(name))

    def _pass(self) -> None:
        """Hold the engine's thread, which calls this when it has handed over the outputs of a step."""
        with self._changed:
            while self._is_on and self._steps <= 0 and len(self._given) >= self._wanted:
                self._is_held = True
                assert self._changed.wait(6 * WAIT_S), "nobody has released the brake"
            self._is_held = False
            self._steps -= 1

    def hold(self, *, steps: int = 0, tokens_of: int = 0, generation: int = 0) -> None:
        """Let so many steps be delivered, and go on until so many outputs have been given a token from now
        on, made by these weights or newer ones, and then hold the thread.
        """
        with self._changed:
            self._is_on, self._steps, self._wanted, self._generation = True, steps, tokens_of, generation
            self._given.clear()
            self._is_held = False
            self._changed.notify_all()

    async def holding(self) -> None:
        """Wait until the thread is held."""
        await until(lambda: self._is_held)

    def release(self) -> None:
        """Let the thread go on."""
        with self._changed:
            self._is_on = False
            self._changed.notify_all()

    async def running(self, count: int, *, steps: int = 0) -> None:
        """Wait until this many outputs are with the engine, while its thread is held, and then let them run
        for some steps and until each has a token, and hold the thread again.
        """
        load = self._engine.load
        await until(lambda: load().num_running + load().num_waiting == count)
        self.hold(steps=steps, tokens_of=min(count, self._engine.config.max_num_seqs))
        await self.holding()
        assert load().num_running + load().num_waiting == count, "none has ended"

    async def queued(self, name: str, count: int = 1) -> None:
        """Wait until this many calls in all of `update` or `pause` have reached the engine."""
        await until(lambda: self._asked[name] >= count)
