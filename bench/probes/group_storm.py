"""Kills and stops processes of a group of two at random moments, and prints a table of how the group ended.

    python -m bench.probes.group_storm --rounds 200 --updates

Each round starts a group on this machine, with a device of the CPU for each process, has a few streams run,
and at a random moment kills (SIGKILL) or stops (SIGSTOP) its leader or its follower. Then the other process
must end within the group's timeout by itself, with an exit code that has it started again, and no stream may
end without an error or with a token that a whole group does not give. What was stopped is killed after that.

With `--stages` each process has one of two stages, in place of a part of each layer.

With `--updates` other weights and the first ones are pushed in turns meanwhile, so that most losses meet an
update. Every stream must have the tokens of one of the two, because an update waits for those that run.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from safetensors.numpy import load_file, save_file

from bench.drivers.over_grpc import free_port
from penstock.client import Client, PenstockClientError, UnavailableError
from penstock.v1 import inference_pb2, inference_pb2_grpc, types_pb2

ROOT = Path(__file__).parents[2]
START_S = 300.0
RESTART_CODES = (75, -signal.SIGABRT)
"""GROUP_ENDED, and what JAX ends a process with that notices first that the leader is gone."""
OPTIONS = (
    "--tensor-parallel-size=2",
    "--dtype=float32",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=16",
    "--max-model-len=256",
    "--page-size=8",
    "--kv-cache-bytes=4M",
    "--threads=1",
    "--grace=5",
)
STAGES = ("--tensor-parallel-size=1", "--pipeline-parallel-size=2")
"""What gives each of two processes a stage."""
MAX_TOKENS = 120
READY, MET = "penstock: ready", "processes of the group are there"
"""What a leader prints when it takes requests, and when all processes are there."""


class Group:
    """The processes of one group on this machine; to be used in a `with` block."""

    def __init__(
        self,
        model: str,
        *more: str,
        processes: int = 2,
        timeout_s: float = 30.0,
        own: Sequence[Sequence[str]] = (),
    ) -> None:
        """`more`: further flags of all processes. `own`: further flags of each."""
        self.timeout_s = timeout_s
        self.address = f"127.0.0.1:{free_port()}"
        shared = (
            *OPTIONS,
            f"--leader={self.address}",
            f"--port={self.address.rpartition(':')[2]}",
            f"--processes={processes}",
            f"--coordinator=localhost:{free_port()}",
            f"--group-timeout={timeout_s:g}",
            *more,
        )
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(processes)]  # noqa: SIM115 -- `__exit__` closes them
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-u", "-m", "penstock.cli", "serve", model, *shared),
                    *(f"--process-id={number}", *(own[number] if own else ())),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
            for number, log in enumerate(self._logs)
        ]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()

    def output(self, number: int) -> str:
        """Return what a process has printed so far."""
        self._logs[number].seek(0)
        return self._logs[number].read()

    def wait_ready(self, line: str = READY) -> None:
        """Wait until the leader has printed this line. RuntimeError if it ends before."""
        ends_s = time.monotonic() + START_S
        while line not in self.output(0):
            if time.monotonic() > ends_s or self.processes[0].poll() is not None:
                raise RuntimeError(f"no group: {self.output(0)}\n{self.output(1)}")
            time.sleep(0.1)

    def wait_codes(self, timeout_s: float) -> list[int | None]:
        """Return the exit codes of all processes, after waiting so long for them; None: it still runs."""
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s and any(process.poll() is None for process in self.processes):
            time.sleep(0.05)
        return [process.poll() for process in self.processes]


@dataclass
class Reading:
    """One stream that is read on a thread of its own."""

    address: str
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    error: Any = None
    is_done: bool = False
    credentials: grpc.ChannelCredentials | None = None
    """None: without TLS."""

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        request = inference_pb2.StreamRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=self.prompt),
            sampling=types_pb2.SamplingParams(temperature=0),
            stopping=types_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
            output=types_pb2.OutputOptions(text=False),
        )
        with (
            grpc.insecure_channel(self.address)
            if self.credentials is None
            else grpc.secure_channel(self.address, self.credentials)
        ) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            try:
                for message in stub.Stream(request, timeout=120):
                    self.tokens.extend(message.delta.token_ids)
                self.is_done = True
            except grpc.RpcError as error:
                self.error = error


PROMPTS = ([5, 9, 13, 2, 40, 41], [7] * 20, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])


@dataclass(frozen=True)
class Round:
    """What one round did, and what came of it."""

    what: str
    after_s: float
    ended_s: float
    codes: tuple[int | None, ...]
    problems: tuple[str, ...]
    num_updates: int
    """How many updates went live before the loss."""


Right = Sequence[Sequence[Sequence[int]]]
"""The tokens of each of PROMPTS, with each of the weights."""


def expected(weights: Sequence[str], *more: str) -> Right:
    """Compute the tokens that a whole group gives. `weights`: the model's directory, and others that are
    pushed.
    """
    found: list[list[Sequence[int]]] = [[] for _ in PROMPTS]
    with Group(weights[0], *more) as group:
        group.wait_ready()
        for number, folder in enumerate(weights):
            if number:
                with Client(group.address) as client:
                    client.update_weights(folder, label="other", progress=False)
            readings = [Reading(group.address, prompt) for prompt in PROMPTS]
            for thread in [reading.start() for reading in readings]:
                thread.join()
            if not all(reading.is_done for reading in readings):
                raise RuntimeError(f"a whole group failed: {[reading.error for reading in readings]}")
            for of_prompt, reading in zip(found, readings, strict=True):
                of_prompt.append(reading.tokens)
    return found


def other_weights(model: str, folder: Path) -> str:
    """Write a checkpoint whose tensors have the model's rows in the other order."""
    tensors = load_file(Path(model) / "model.safetensors")
    save_file({name: tensor[::-1].copy() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


@dataclass
class Updating:
    """Updates that are pushed one after the other, until one fails."""

    address: str
    weights: Sequence[str]
    num_updates: int = 0
    error: Exception | None = None

    def run(self) -> None:
        """Push other weights and the first ones in turns."""
        with Client(self.address) as client:
            try:
                while True:
                    folder = self.weights[(self.num_updates + 1) % len(self.weights)]
                    client.update_weights(folder, label=folder, progress=False, timeout=120.0)
                    self.num_updates += 1
            except PenstockClientError as error:
                self.error = error


def storm_round(
    weights: Sequence[str], right: Right, chance: random.Random, timeout_s: float, *more: str
) -> Round:
    """Run one round. `weights`: the model's directory, and others, if updates are to be pushed."""
    number, kind = chance.randrange(2), chance.choice((signal.SIGKILL, signal.SIGSTOP))
    problems: list[str] = []
    with Group(weights[0], *more, timeout_s=timeout_s) as group:
        at_start = chance.random() < 0.2
        group.wait_ready(MET if at_start else READY)
        after_s = chance.uniform(0.0, 10.0 if at_start else 6.0 if len(weights) > 1 else 1.0)
        readings = [] if at_start else [Reading(group.address, prompt) for prompt in PROMPTS]
        threads = [reading.start() for reading in readings]
        updating = Updating(group.address, weights)
        updater = threading.Thread(target=updating.run, daemon=True)
        if len(weights) > 1 and not at_start:
            updater.start()
            threads.append(updater)
        time.sleep(after_s)
        group.processes[number].send_signal(kind)
        hit_s = time.monotonic()
        others = [process for at, process in enumerate(group.processes) if at != number]
        try:
            for process in others:
                process.wait(timeout_s + 10.0)
        except subprocess.TimeoutExpired:
            problems.append("a process hangs")
        ended_s = time.monotonic() - hit_s
        group.processes[number].kill()
        for thread in threads:
            thread.join(30.0)
        codes = tuple(process.poll() for process in group.processes)
        problems += [
            f"exit code {process.poll()}" for process in others if process.poll() not in RESTART_CODES
        ]
        if ended_s > timeout_s:
            problems.append(f"ended after {ended_s:.1f} s")
        if updater.is_alive():
            problems.append("an update hangs")
        if not isinstance(updating.error, UnavailableError | None):
            problems.append(f"an update ended with {updating.error!r}")
        for reading, allowed in zip(readings, right, strict=False):
            if not any(reading.tokens == list(tokens[: len(reading.tokens)]) for tokens in allowed):
                problems.append("wrong tokens")
            if not reading.is_done and (reading.error is None or reading.error.code() is not UNAVAILABLE):
                problems.append(f"a stream ended with {reading.error and reading.error.code()}")
    name = f"{kind.name} of the {'follower' if number else 'leader'}{' at the start' if at_start else ''}"
    return Round(name, after_s, ended_s, codes, tuple(problems), updating.num_updates)


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def table(rounds: Sequence[Round]) -> str:
    """Write a table with a row for each kind of loss."""
    lines = [
        "| what | rounds | updates | longest end, s | exit codes of the others | problems |",
        "|---|---|---|---|---|---|",
    ]
    for what in sorted({each.what for each in rounds}):
        own = [each for each in rounds if each.what == what]
        codes = sorted({str(each.codes[0 if "follower" in what else 1]) for each in own})
        problems = sorted({problem for each in own for problem in each.problems})
        longest = max(each.ended_s for each in own)
        lines.append(
            f"| {what} | {len(own)} | {sum(each.num_updates for each in own)} | {longest:.1f} "
            f"| {', '.join(codes)} | {'; '.join(problems) or 'none'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=30.0, help="the group's --group-timeout")
    parser.add_argument("--model", default=str(ROOT / "tests" / "golden" / "qwen3"))
    parser.add_argument("--updates", action="store_true", help="push weights meanwhile")
    parser.add_argument("--stages", action="store_true", help="give each process a stage")
    args = parser.parse_args()
    more = STAGES if args.stages else ()
    chance, rounds = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder:
        weights = [args.model, *([other_weights(args.model, Path(folder))] if args.updates else [])]
        right = expected(weights, *more)
        for at in range(args.rounds):
            rounds.append(storm_round(weights, right, chance, args.timeout, *more))
            print(f"{at + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    print(table(rounds))
    return int(any(each.problems for each in rounds))


if __name__ == "__main__":
    sys.exit(main())
