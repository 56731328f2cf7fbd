"""What the commands that change a running server share: flags for its running requests, and how a change is
shown.
"""

from __future__ import annotations

import argparse
from typing import get_args

from penstock.cli.calling.flag_values import number
from penstock.client import (
    CommittedWeights,
    InFlight,
    InFlightPolicy,
    UpdateOutcome,
    WeightsUpdate,
    WeightsVersion,
)

_KINDS = {
    "waited": "finished first",
    "aborted": "aborted",
    "kept": "went on",
    "recomputed": "went on after their prompts were computed again",
}


def add_policy(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags that say what happens to running requests."""
    group = parser.add_argument_group("running requests")
    group.add_argument(
        "--policy",
        choices=get_args(InFlightPolicy),
        help="wait: they finish first; abort: they end with what they have; keep: they go on with the KV "
        f"that they have; recompute: they go on after it was computed again; default: {default}",
    )
    group.add_argument(
        "--drain-timeout",
        type=number(low=0),
        metavar="S",
        help="with wait: give up, and change nothing, if they have not finished after S seconds; default: "
        + ("no limit" if default == "wait" else default),
    )


def version(weights: WeightsVersion) -> str:
    """Write the label and the generation."""
    return f"{weights.label} (generation {weights.generation})"


def running(in_flight: InFlight) -> str:
    """Say what became of the running requests; empty if none ran."""
    counts = ((getattr(in_flight, name), what) for name, what in _KINDS.items())
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def outcome(change: WeightsUpdate | CommittedWeights) -> str:
    """Tell in a few lines what came of an update, and which weights are in use."""
    current = version(change.current)
    match change.outcome:
        case UpdateOutcome.COMMITTED:
            lines = [f"{current} is in use, after {version(change.previous)}"]
            lines.append(f"no token was made for {_duration(change.paused_s)}")
            if requests := running(change.in_flight):
                lines.append(f"running requests: {requests}")
        case UpdateOutcome.STAGED:
            lines = [f"the update is staged; {current} is still in use"]
            lines.append(f"swap it in: penstock commit-weights {change.update_id}")
            lines.append(f"or drop it: penstock discard-weights {change.update_id}")
        case UpdateOutcome.VALIDATED:
            lines = [f"the server would take these weights; {current} is still in use"]
        case UpdateOutcome.ALREADY_COMMITTED:
            lines = [f"the update {change.update_id} was committed before; {current} is in use"]
        case UpdateOutcome.UNKNOWN:
            lines = [f"the outcome is one that this client does not know; {current} is in use"]
    if change.digest:
        lines.append(f"digest {change.digest.hex()}")
    return "\n".join(lines)


def sent(update: WeightsUpdate) -> str:
    """Tell how much was sent, and how long it took; empty if nothing was."""
    if not update.bytes_received:
        return ""
    megabytes = update.bytes_received / 1e6
    return f"{update.tensors_updated} tensors, {megabytes:.1f} MB, staged in {update.staged_s:.2f} s"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
