"""Measures what the engine's metrics cost in processor time, for each step and for each snapshot.

    python -m bench.probes.watching.metrics                    # 64 streams, as the demo model serves them

The entries are those that `tracing` makes: no model runs and nothing listens. They are folded in batches as
large as the journal's. The last column is what that takes of one core, if the device makes `--steps-per-s`
steps.
"""

from __future__ import annotations

import argparse
import sys

from bench.probes.watching.tracing import Load, recorded, spent_s
from penstock.runtime.loop.journal import Journal
from penstock.runtime.measuring.engine_meters import EngineMeters
from penstock.runtime.measuring.engine_state import BuildInfo, Sources
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.scheduling import load as scheduling

_SNAPSHOTS = 100


def measured(load: Load, *, traced: bool) -> tuple[float, float, EngineMeters]:
    """Measure the processor time in seconds to fold all steps of this load, and for one snapshot; and what
    has folded them. `traced`: whether every request has a span, which the metrics then name.
    """
    batches, _ = recorded(load, batch_steps=20, traced=traced)
    registry, counts = Registry(), scheduling.Counts()
    sources = Sources(
        load=lambda: scheduling.Load.idle(1),
        totals=counts.totals,
        weights_generation=lambda: 1,
        are_weights_broken=lambda: False,
        is_paused=lambda: False,
        compiles_after_warmup=lambda: 0,
        dropped_entries=lambda: 0,
        memory=dict,
    )
    build = BuildInfo(version="", jax="", platform="", model="", dtype="", quantization="", kv_cache_dtype="")
    meters = EngineMeters(registry, Journal(), sources, build)
    folding_s = sum(spent_s(lambda batch=batch: meters.read(batch)) for batch in batches)  # type: ignore[misc]
    snapshot_s = spent_s(lambda: [registry.snapshot() for _ in range(_SNAPSHOTS)]) / _SNAPSHOTS
    return folding_s, snapshot_s, meters


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.watching.metrics", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps-per-s", type=float, default=200, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    load = Load(args.streams, args.prompt, args.tokens, args.steps)
    print("| requests | folding, us/step | one snapshot, us | of a core |")
    print("|---|---:|---:|---:|")
    for traced in (False, True):
        folding_s, snapshot_s, _ = measured(load, traced=traced)
        share = 100 * folding_s * args.steps_per_s / args.steps
        name = "traced" if traced else "not traced"
        print(f"| {name} | {1e6 * folding_s / args.steps:.1f} | {1e6 * snapshot_s:.1f} | {share:.2f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
