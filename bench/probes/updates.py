"""Measures weight updates of a server that goes on serving.

    python -m bench.probes.updates --checkpoint bench/out/model

A pusher in a process of its own sends all tensors of the checkpoint to `penstock serve`, which serves the
same one, and, for comparison, to a gRPC server that drops them. Each repeat has these figures, and the
medians are printed:

- MB/s of the push, with nothing else to do, and of the push whose messages are dropped;
- the server's memory: at most during that push, against what it held before and one checkpoint more;
- tokens/s of streams while weights are pushed and staged, against the mean of just before and just after;
- the pause when the weights are swapped under these streams (KEEP), against their decode step.

The pusher runs at the lowest priority, because a trainer has machines of its own: what counts is what the
server does. `--niceness 0` measures a pusher that competes with the server for this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from bench.drivers import options
from bench.drivers.options import serve_arguments
from penstock.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
    weights_pb2,
)

_READY = "ready on "
_PROMPT, _STOP_S = 64, 60.0
MB = 1e6


@contextlib.contextmanager
def child(*command: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process of this Python, whose stderr goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def address_of(process: subprocess.Popen[str]) -> str:
    """Return what a server prints when it is ready. Raises RuntimeError if it ends before."""
    assert process.stdout is not None
    line = next((line for line in process.stdout if _READY in line), None)
    if line is None:
        raise RuntimeError(f"a server ended with {process.wait()}; see the logs")
    return line.partition(_READY)[2].strip()


def ask(pusher: subprocess.Popen[str], **what: Any) -> dict[str, Any]:
    """Have the pusher send one update. Raises RuntimeError if it fails."""
    assert pusher.stdin is not None
    assert pusher.stdout is not None
    pusher.stdin.write(json.dumps(what) + "\n")
    pusher.stdin.flush()
    line = pusher.stdout.readline()
    if not line:
        raise RuntimeError("the pusher failed; see the log")
    answer: dict[str, Any] = json.loads(line)
    return answer


@dataclass
class Streams:
    """Streams that run until they are stopped, each begun again where it ends, and when their tokens came."""

    stub: Any
    count: int
    vocab: int
    max_tokens: int
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._calls: dict[int, Any] = {}
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(self.count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        ids = [(31 * number + 7 * i) % self.vocab for i in range(_PROMPT)]
        request = inference_pb2.StreamRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=ids),
            sampling=types_pb2.SamplingParams(temperature=0),
            stopping=types_pb2.StoppingParams(max_tokens=self.max_tokens, ignore_eos=True),
            output=types_pb2.OutputOptions(text=False),
        )
        while not self._stopping.is_set():
            self._calls[number] = self.stub.Stream(request)
            try:
                for message in self._calls[number]:
                    if message.HasField("delta"):
                        self.arrivals.append((time.perf_counter(), len(message.delta.token_ids)))
            except grpc.RpcError:
                if not self._stopping.is_set():
                    raise

    def rate(self, began: float, ended: float) -> float:
        """Return the tokens per second of all streams together in this time."""
        return sum(n for when, n in self.arrivals if began <= when < ended) / (ended - began)

    def undisturbed(self, seconds: float) -> float:
        """Measure the tokens per second from now on, for this long."""
        began = time.perf_counter()
        time.sleep(seconds)
        return self.rate(began, time.perf_counter())

    def stop(self) -> None:
        self._stopping.set()
        for call in list(self._calls.values()):
            call.cancel()
        for thread in self._threads:
            thread.join()


def memory(pid: int, name: str) -> int:
    """Read a line of /proc/PID/status in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@dataclass(frozen=True)
class Setting:
    """What a repeat works with."""

    server: subprocess.Popen[str]
    address: str
    dropping: str
    """The address of the server that drops everything."""
    pusher: subprocess.Popen[str]
    inference: Any
    control: Any
    vocab: int
    staging: int
    rows: int
    seconds: float
    """How long streams are measured before and after a push."""
    max_tokens: int


def measured(setting: Setting, repeat: int) -> dict[str, float]:
    """Measure the figures of one repeat."""
    update: dict[str, Any] = {"version_label": "bench", "staging": setting.staging}
    dropped = ask(setting.pusher, address=setting.dropping, update_id="x", **update)
    serving = memory(setting.server.pid, "VmRSS")
    Path(f"/proc/{setting.server.pid}/clear_refs").write_text("5")  # the peak begins anew
    update |= {"address": setting.address, "stage_only": True}
    idle = ask(setting.pusher, update_id=f"idle-{repeat}", **update)
    peak = memory(setting.server.pid, "VmHWM")
    setting.control.DiscardWeights(control_pb2.DiscardWeightsRequest(update_id=f"idle-{repeat}"))
    streams = Streams(setting.inference, setting.rows, setting.vocab, setting.max_tokens)
    try:
        while sum(count for _, count in streams.arrivals) < 4 * setting.rows:
            time.sleep(0.01)
        before = streams.undisturbed(setting.seconds)
        began = time.perf_counter()
        ask(setting.pusher, update_id=f"busy-{repeat}", **update)
        staging = streams.rate(began, time.perf_counter())
        staged_s = time.perf_counter() - began
        reply = setting.control.CommitWeights(
            control_pb2.CommitWeightsRequest(
                update_id=f"busy-{repeat}", in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP
            )
        )
        time.sleep(1.0)
        after = streams.undisturbed(setting.seconds)
    finally:
        streams.stop()
    undisturbed = (before + after) / 2
    return {
        "dropped, MB/s": dropped["bytes"] / dropped["seconds"] / MB,
        "pushed, MB/s": idle["bytes"] / idle["seconds"] / MB,
        "staged in, s": idle["staged_s"],
        "held before, MB": serving / MB,
        "peak, MB": peak / MB,
        "bound, MB": (serving + idle["bytes"]) / MB,
        "undisturbed, tok/s": undisturbed,
        "during staging, tok/s": staging,
        "of undisturbed, %": 100 * staging / undisturbed,
        "push beside streams, s": staged_s,
        "pause, ms": reply.paused_for.ToNanoseconds() / 1e6,
        "decode step, ms": 1e3 * setting.rows / undisturbed,
    }


def table(repeats: Sequence[Mapping[str, float]]) -> str:
    """Write the median of each figure, and all of them."""
    lines = ["| figure | median | each |", "|---|---:|---|"]
    for name in repeats[0]:
        values = [repeat[name] for repeat in repeats]
        each = ", ".join(f"{value:,.1f}" for value in values)
        lines.append(f"| {name} | {median(values):,.1f} | {each} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.updates", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="see bench.checkpoint")
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="streams; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="before and after; default: %(default)s"
    )
    parser.add_argument("--staging", choices=("host", "device"), default="host", help="default: %(default)s")
    parser.add_argument(
        "--niceness", type=int, default=19, metavar="N", help="of the pusher; default: %(default)s"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine option")
    parser.add_argument("--logs", type=Path, default=Path("bench/out"), metavar="DIR", help="%(default)s")
    args = parser.parse_args()
    given = {**options.DEFAULTS, **options.parse(args.set)}
    serve = ("-m", "penstock.cli", "serve", args.checkpoint, "--port", "0", *serve_arguments(given))
    drop = ("-m", "bench.probes.drop_server")
    push = ("-m", "bench.probes.pusher", args.checkpoint, str(args.niceness))
    with (
        child(*serve, log=args.logs / "updates_server.log") as server,
        child(*drop, log=args.logs / "updates_drop.log") as dropping,
        child(*push, log=args.logs / "updates_pusher.log") as pusher,
        grpc.insecure_channel(address := address_of(server)) as channel,
    ):
        control: Any = control_pb2_grpc.ControlServiceStub(channel)
        info = control.GetModelInfo(control_pb2.GetModelInfoRequest())
        setting = Setting(
            server=server,
            address=address,
            dropping=address_of(dropping),
            pusher=pusher,
            inference=inference_pb2_grpc.InferenceServiceStub(channel),
            control=control,
            vocab=info.vocab_size,
            staging=weights_pb2.StagingMode.Value(f"STAGING_MODE_{args.staging.upper()}"),
            rows=args.rows,
            seconds=args.seconds,
            max_tokens=info.max_context_tokens - _PROMPT,
        )
        repeats = [measured(setting, repeat) for repeat in range(-1, args.repeats)][1:]
    print(f"{args.rows} streams, staging in {args.staging} memory, {args.repeats} repeats after a warm-up\n")
    print(table(repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
