"""Teaches the demo model to count, with a server that takes new weights after every step.

    penstock serve demo                # in another terminal
    python -m examples.reinforce rewards.csv --steps 60
    python -m examples.reinforce.plot rewards.csv rewards.svg

Each step asks the server for several answers to some questions, rewards those that are right, makes a
gradient step, and pushes the new weights. Run it in the root of the repository, with the extra `train`
installed.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import asdict, fields
from pathlib import Path

from examples.reinforce.trainer import Options, Step, Trainer
from penstock.client import DEFAULT_ADDR, Client

COLUMNS = [*(field.name for field in fields(Step)), "seconds", "held_out"]
"""Of the CSV file: what a step measured, the seconds since the start, and the reward on the held-out
questions after the step, where it was measured. The line of step 0 tells the reward before training.
"""


def train(client: Client, options: Options, *, steps: int, evaluate_every: int, out: Path) -> None:
    """Trains, and writes a line for each step."""
    with out.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, restval="")
        lines.writeheader()
        started = time.perf_counter()
        trainer = Trainer(client, options)
        for number in range(steps + 1):
            line: dict[str, object] = {"step": 0}
            if number > 0:
                done = trainer.step(number)
                show(done)
                line = asdict(done)
            line["seconds"] = time.perf_counter() - started
            if number % evaluate_every == 0 or number == steps:
                line["held_out"] = trainer.held_out_reward()
                print(f"reward on the held-out questions: {line['held_out']:.3f}")
            lines.writerow({name: round(v, 7) if isinstance(v, float) else v for name, v in line.items()})
            file.flush()


def show(done: Step) -> None:
    """Print a line about a step."""
    print(
        f"step {done.step:3}: reward {done.reward:.3f}, log-probabilities differ by "
        f"{done.mean_difference:.1e} (at most {done.max_difference:.1e}); sampled {done.sample_s:.1f} s, "
        f"trained {done.train_s:.1f} s, pushed {done.push_s:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach the demo model to count.")
    defaults = Options()
    parser.add_argument("out", type=Path, help="a CSV file, which is written anew")
    parser.add_argument("--addr", default=DEFAULT_ADDR, help="of a server of the demo model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--questions", type=int, default=defaults.questions, help="asked in each step")
    parser.add_argument("--samples", type=int, default=defaults.samples, help="of each question")
    parser.add_argument("--rate", type=float, default=defaults.rate, help="the learning rate of Adam")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps between two evaluations")
    asked = parser.parse_args()
    options = Options(questions=asked.questions, samples=asked.samples, rate=asked.rate, seed=asked.seed)
    with Client(asked.addr) as client:
        train(client, options, steps=asked.steps, evaluate_every=asked.evaluate_every, out=asked.out)


if __name__ == "__main__":
    main()
