"""Measures a server that has many more LoRA adapters on its disk than in memory.

    python -m bench.probes.adapters.disk --checkpoint bench/out/model --adapters bench/out/adapters

It writes the adapters that are not in the folder yet, of random values and of all linear layers: one of rank
16 of the 0.6B shape has 20 MB. Then `penstock serve` has the folder as its --adapter-dir. What is measured:

- a load: LoadAdapter of one that is not in memory, alone and beside streams that use no adapter;
- the first token of a request for a random adapter that is in memory, and for one of all;
- tokens/s of the streams beside requests for adapters in memory, and beside requests for any. The requests
  are the same but for the adapters that they name: one after the other, so many of them per second;
- a push of another adapter under a name that is there, and the first token of a request that names it then.

Whoever measures a disk drops the pages that the kernel keeps of it first, as the superuser.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import grpc

from bench.drivers import options
from bench.drivers.options import serve_arguments
from bench.probes.adapters.made import Maker
from bench.probes.updates import Streams, address_of, child
from penstock.cli.measuring.stats import percentile
from penstock.client import Client
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc

_PROMPT = 16
_PUSHED = "pushed"


def name_of(number: int) -> str:
    """Return the name of an adapter."""
    return f"adapter-{number:05d}"


class Asker:
    """Asks one server, and times each answer in milliseconds."""

    def __init__(self, client: Client, vocab: int) -> None:
        self._client, self._vocab = client, vocab
        self._rng = random.Random(1)

    def first_token_ms(self, adapter: str) -> float:
        """Time a request for one token. Its prompt is a new one."""
        ids = [self._rng.randrange(self._vocab) for _ in range(_PROMPT)]
        return _ms(
            lambda: self._client.generate(
                token_ids=ids,
                adapter=adapter,
                temperature=0,
                max_tokens=1,
                ignore_eos=True,
                return_text=False,
            )
        )

    def load_ms(self, adapter: str) -> float:
        """Time the load of an adapter that is not in memory. It leaves memory again."""
        took_ms = _ms(lambda: self._client.load_adapter(adapter))
        self._client.unload_adapter(adapter)
        return took_ms

    def push_ms(self, maker: Maker, number: int) -> float:
        """Time a push."""
        source = (maker.config, maker.tensors(number))
        return _ms(lambda: self._client.push_adapter(_PUSHED, source, replace=True, progress=False))


def _ms(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began_s)


def paced(names: Sequence[str], per_second: float, ask: Callable[[str], float]) -> list[float]:
    """Ask for each, one after the other and at most so many per second. Returns what they took."""
    began_s, found = time.perf_counter(), list[float]()
    for number, name in enumerate(names):
        time.sleep(max(0.0, began_s + number / per_second - time.perf_counter()))
        found.append(ask(name))
    return found


def measured(
    asker: Asker, streams: Streams, maker: Maker, args: argparse.Namespace
) -> Mapping[str, Sequence[float]]:
    """Measure what the module's docstring lists. The streams run already."""
    rng = random.Random(args.seed)
    names = [name_of(number) for number in range(args.count)]
    rng.shuffle(names)
    loaded, kept, others = names[: args.loads], names[args.loads :][: args.cached // 2], names[args.loads :]
    for name in kept:
        asker.first_token_ms(name)
    found: dict[str, Sequence[float]] = {}
    found["streams alone, tok/s"] = [streams.undisturbed(args.seconds)]
    found["load beside streams, ms"] = [asker.load_ms(name) for name in loaded]
    num_asked = int(args.seconds * args.per_second)
    for told, choices in (("in memory", kept), ("of all", others)):
        began_s = time.perf_counter()
        asked = rng.choices(choices, k=num_asked)
        found[f"first token, adapter {told}, ms"] = paced(asked, args.per_second, asker.first_token_ms)
        rate = streams.rate(began_s, time.perf_counter())
        found[f"streams beside requests, adapters {told}, tok/s"] = [rate]
    pushes, answers = list[float](), list[float]()
    for number in range(args.loads):
        pushes.append(asker.push_ms(maker, args.count + number))
        answers.append(asker.first_token_ms(_PUSHED))
    found["push beside streams, ms"], found["first token after it, ms"] = pushes, answers
    streams.stop()
    found["load alone, ms"] = [asker.load_ms(name) for name in loaded]
    found["push alone, ms"] = [asker.push_ms(maker, args.count + number) for number in range(args.loads)]
    return found


def table(found: Mapping[str, Sequence[float]]) -> str:
    """Write the median, the 99th percentile and the largest value of each figure."""
    lines = ["| figure | median | p99 | largest | values |", "|---|---:|---:|---:|---:|"]
    for name, values in found.items():
        numbers = (median(values), percentile(values, 99), max(values))
        lines.append(f"| {name} | {' | '.join(f'{number:,.1f}' for number in numbers)} | {len(values)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.adapters.disk", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="see bench.checkpoint")
    parser.add_argument("--adapters", type=Path, required=True, metavar="DIR", help="where adapters are")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="adapters; %(default)s")
    parser.add_argument("--cached", type=int, default=64, metavar="N", help="of them in memory; %(default)s")
    parser.add_argument("--rank", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="streams; default: %(default)s")
    parser.add_argument("--loads", type=int, default=20, metavar="N", help="loads, pushes; %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of a phase; %(default)s")
    parser.add_argument("--per-second", type=float, default=2.0, metavar="N", help="requests; %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the mix; default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine option")
    parser.add_argument("--logs", type=Path, default=Path("bench/out"), metavar="DIR", help="%(default)s")
    args = parser.parse_args()
    if args.count < 2 * args.loads + args.cached:
        parser.error("--count: there must be more adapters than are cached and loaded")
    maker = Maker.of(Path(args.checkpoint), args.rank)
    for number in range(args.count):
        maker.write(args.adapters / name_of(number), number)
    places = {"max_adapters": 16, "max_adapter_rank": max(16, args.rank), "max_cached_adapters": args.cached}
    given = {**options.DEFAULTS, **places, "adapter_dir": str(args.adapters), **options.parse(args.set)}
    serve = ("-m", "penstock.cli", "serve", args.checkpoint, "--port", "0", *serve_arguments(given))
    with (
        child(*serve, log=args.logs / "adapters_server.log") as server,
        grpc.insecure_channel(address := address_of(server)) as channel,
        Client(address) as client,
    ):
        info = control_pb2_grpc.ControlServiceStub(channel).GetModelInfo(control_pb2.GetModelInfoRequest())
        most = info.max_context_tokens - 128
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        streams = Streams(stub, args.rows, info.vocab_size, most)
        try:
            found = measured(Asker(client, info.vocab_size), streams, maker, args)
        finally:
            streams.stop()
    print(f"{args.count} adapters on disk, {args.cached} in memory, {args.rows} streams\n")
    print(table(found))
    beside = [
        found[f"streams beside requests, adapters {told}, tok/s"][0] for told in ("in memory", "of all")
    ]
    print(f"\nloads leave the streams {beside[1] / beside[0]:.1%} of their pace")
    return 0


if __name__ == "__main__":
    sys.exit(main())
