"""The scheduler and the pacer on a simulated machine: running requests keep their pace while a long prompt is
computed, and short prompts behind a long one do not wait for all of it.

The machine runs one step after the other. A step takes the time to read the weights or to multiply its
tokens, whichever is longer, and a part of the shorter one. Noise from a seed and an occasional stall are
added.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import median

import pytest

from penstock.runtime.loop.stepping import Pacer
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig

MS = 10**6
WORD = 9


@dataclass
class Machine:
    fixed_ms: float
    token_ms: float
    hidden: float = 0.0
    """The part of the shorter of the two times that costs nothing."""
    noise: float = 0.1
    stalls: float = 0.02
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def took_ms(self, plan: Plan) -> float:
        products = self.token_ms * plan.num_tokens
        both = max(self.fixed_ms, products) + (1 - self.hidden) * min(self.fixed_ms, products)
        stall = 20.0 if self.rng.random() < self.stalls else 1.0
        return both * self.rng.uniform(1 - self.noise, 1 + self.noise) * stall


class Simulation:
    """A scheduler and a pacer with two steps in flight, as in the engine."""

    def __init__(self, machine: Machine, target_s: float, budget: int = 512, policy: str = "fcfs") -> None:
        self.machine, self.pacer = machine, Pacer(0.02, 8, target_s)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=budget,
                max_model_len=200_000,
                page_size=64,
                num_pages=10_000,
                eos_token_ids=frozenset(),
                max_queued_requests=100,
                prefix_cache_pages=0,
                scheduling_policy=policy,
            )
        )
        self.now_ns = 0
        self.in_flight: list[Plan] = []
        self.steps: list[tuple[Plan, float]] = []
        """Each plan that ran, and how many ms it took."""
        self.first_step: dict[str, int] = {}
        """For each request the step that made its first token."""

    def add(self, name: str, num_prompt: int, max_tokens: int = 10_000, priority: int = 0) -> None:
        stopping = StoppingParams(max_tokens=max_tokens)
        request = Request(name, (1,) * num_prompt, stopping=stopping, priority=priority)
        self.scheduler.add(request, self.now_ns)

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now_ns, prefill_budget=self.pacer.prefill_budget)
        if plan is not None:
            self.in_flight.append(plan)
        if plan is not None and len(self.in_flight) < 2:
            return
        plan = self.in_flight.pop(0)
        ms = self.machine.took_ms(plan)
        self.now_ns += int(ms * MS)
        if plan.decode_only:
            self.pacer.decoded(1, int(ms * MS))
        else:
            self.pacer.prefilled(plan.num_prompt_tokens, int(ms * MS))
        self.steps.append((plan, ms))
        sampled = [(WORD,) if row.samples else () for row in plan.rows]
        for output in self.scheduler.commit(plan, StepResult(sampled, [()] * len(plan.rows)), self.now_ns):
            self.first_step.setdefault(output.request_id, len(self.steps))

    def until_first_token(self, name: str) -> int:
        """Run until the request has its first token. Returns the number of steps."""
        before = len(self.steps)
        while name not in self.first_step:
            self.step()
        return len(self.steps) - before

    def decode(self, num_rows: int, num_prompt: int = 64) -> None:
        """Add so many requests that decode until the end."""
        for i in range(num_rows):
            self.add(f"decode{i}", num_prompt)
        self.until_first_token(f"decode{num_rows - 1}")
        for _ in range(10):
            self.step()


def durations(simulation: Simulation, first: int) -> list[float]:
    """Return the durations of the steps from `first` on that had prompt tokens beside decodes, in ms."""
    return [ms for plan, ms in simulation.steps[first:] if 0 < plan.num_prompt_tokens < plan.num_tokens]


MACHINES = {
    "matrix unit": lambda: Machine(40, 0.56, hidden=0.6),
    "none": lambda: Machine(50, 3.3, hidden=0.6),
    "reads and computes in turn": lambda: Machine(50, 0.6),
    "tiny": lambda: Machine(0.5, 0.004),
}


def while_a_long_prompt_comes_in(machine: Machine, target_s: float) -> tuple[Simulation, float]:
    """Return the simulation, with only the steps that ran while a long prompt was computed, and how many ms
    that took.
    """
    simulation = Simulation(machine, target_s)
    simulation.decode(4)
    before, begun_ns = len(simulation.steps), simulation.now_ns
    simulation.add("late", 8192, max_tokens=1)
    simulation.until_first_token("late")
    simulation.steps = simulation.steps[before:]
    return simulation, (simulation.now_ns - begun_ns) / MS


@pytest.mark.parametrize("kind", MACHINES)
def test_running_requests_keep_their_pace_while_a_long_prompt_comes_in(kind: str) -> None:
    paced, _ = while_a_long_prompt_comes_in(MACHINES[kind](), 0.15)
    steps = durations(paced, 0)
    assert median(steps) <= 150
    assert sum(ms > 180 for ms in steps) <= 0.05 * len(steps) + 3  # stalls, and the first steps
    unpaced, _ = while_a_long_prompt_comes_in(MACHINES[kind](), 0.0)
    if kind == "tiny":
        assert median(plan.num_prompt_tokens for plan, _ in paced.steps) > 500  # steps are short anyway
    else:
        assert median(durations(unpaced, 0)) > 250
        assert median(steps) > 110


# If the machine reads and computes in turn, a third of each step is reading the weights, so smaller steps
# cost half as much again.
@pytest.mark.parametrize(
    ("kind", "price"),
    [("matrix unit", 1.3), ("none", 1.3), ("reads and computes in turn", 1.6), ("tiny", 1.1)],
)
def test_pacing_costs_a_long_prompt_little(kind: str, price: float) -> None:
    machine = MACHINES[kind]()
    machine.stalls = 0
    _, unpaced_ms = while_a_long_prompt_comes_in(machine, 0.0)
    _, paced_ms = while_a_long_prompt_comes_in(machine, 0.15)
    assert paced_ms <= price * unpaced_ms


def test_the_budget_follows_a_machine_whose_speed_changes() -> None:
    machine = Machine(40, 0.5, stalls=0)
    simulation = Simulation(machine, 0.15)
    simulation.decode(4)
    simulation.add("late", 150_000)
    for factor in (1, 4, 0.5):
        machine.token_ms = 0.5 * factor
        for _ in range(8):
            simulation.step()
        first = len(simulation.steps)
        for _ in range(20):
            simulation.step()
        assert 120 < median(durations(simulation, first)) <= 150


def test_prompts_go_on_if_decodes_alone_take_longer_than_the_target() -> None:
    simulation = Simulation(Machine(300, 1.0, stalls=0), 0.15)
    simulation.decode(4)
    simulation.add("late", 4096)
    first = len(simulation.steps)
    simulation.until_first_token("late")
    assert 400 < median(durations(simulation, first)[3:]) < 500


@pytest.mark.parametrize(("before_ms", "now_ms", "least", "most"), [(250, 60, 110, 150), (60, 250, 320, 400)])
def test_decodes_that_change_their_pace_while_a_prompt_comes_in(
    before_ms: float, now_ms: float, least: float, most: float
) -> None:
    """This happens when most of the running requests end. Steps aim at 142 ms, or at 375 ms if decodes alone
    take 250.
    """
    machine = Machine(before_ms, 0.6, stalls=0)
    simulation = Simulation(machine, 0.15)
    simulation.decode(4)
    simulation.add("late", 150_000)
    for _ in range(20):
        simulation.step()
    machine.fixed_ms = now_ms
    for _ in range(40):
        simulation.step()
    first = len(simulation.steps)
    for _ in range(40):
        simulation.step()
    assert least < median(durations(simulation, first)) <= most


def test_without_running_requests_a_step_takes_the_whole_budget() -> None:
    simulation = Simulation(Machine(50, 3.3), 0.15)
    simulation.add("a", 5120)
    assert simulation.until_first_token("a") == 10


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_long", [1, 3])
@pytest.mark.parametrize("num_rows", [0, 4])
def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it(
    policy: str, num_long: int, num_rows: int
) -> None:
    simulation = Simulation(Machine(40, 0.56, hidden=0.6), 0.15, policy=policy)
    if num_rows:
        simulation.decode(num_rows)
    for i in range(num_long):
        simulation.add(f"long{i}", 100_000)
    simulation.step()
    simulation.step()
    simulation.add("short", 300)
    # "short" gets a quarter of about 180 prompt tokens in each step, less what the other long prompts get.
    assert simulation.until_first_token("short") <= 14
    first = simulation.scheduler.roster.find("long0")
    others = [simulation.scheduler.roster.find(f"long{i}") for i in range(1, num_long)]
    assert first is not None
    assert all(other is not None and 0 < other.num_computed < first.num_computed / 10 for other in others)


def test_an_urgent_prompt_goes_before_a_long_one_that_is_underway() -> None:
    simulation = Simulation(Machine(40, 0.56, hidden=0.6), 0.15, policy="priority")
    simulation.decode(4)
    simulation.add("long", 100_000)
    for _ in range(8):
        simulation.step()
    simulation.add("urgent", 300, priority=1)
    assert simulation.until_first_token("urgent") <= 5


def test_prompts_of_few_steps_come_in_one_after_the_other() -> None:
    simulation = Simulation(Machine(40, 0.56, noise=0, stalls=0), 0.0)
    for name in "abc":
        simulation.add(name, 1024)
    for name in "abc":
        simulation.until_first_token(name)
    assert [simulation.first_step[name] for name in "abc"] == [2, 5, 7]
