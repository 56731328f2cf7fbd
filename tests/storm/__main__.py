"""A storm of random faults against a server of the demo model, with honest callers in the middle of it.

    python -m tests.storm --faults 10000 --seconds 600

It prints what came of each kind of fault, whether the honest callers' answers have the bits that they have
alone, their times to the first token, and what the server held before and after. The exit code is 1 where
something that must hold did not.

The attackers run at the lowest priority: elsewhere they have machines of their own, and what is measured is
what the server lets them take from others, not what they take of this machine by their own work.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.storm.run import Finding, storm
from tests.storm.target import Remains

MEMORY = 1.10
"""How much memory the server may hold after the storm, as a multiple of before."""
SLOWER = 2.0
"""How much longer honest callers may wait in the storm for their first token (p99), as a multiple."""


def faults_of(finding: Finding) -> list[str]:
    """Return what had to hold and did not, in words. The machine's speed is not judged."""
    load, before, after = finding.load, finding.before, finding.after
    checks = {
        f"{finding.num_wrong} honest answers have other bits than alone": finding.num_wrong == 0,
        "no honest caller was answered": finding.num_answers > 0,
        f"honest callers were refused without a reason: {dict(finding.honest_refusals)}": not any(
            kind.startswith("bare") for kind in finding.honest_refusals
        ),
        f"statuses without a reason: {dict(finding.bare)}": not finding.bare,
        f"requests or pages are left: {load}": (
            (load.running_requests, load.queued_requests, load.kv_pages_used) == (0, 0, 0)
        ),
        f"tasks are left: {before.tasks} before, {after.tasks} after": after.tasks <= before.tasks,
        f"descriptors are left: {before.descriptors} before, {after.descriptors} after": (
            after.descriptors <= before.descriptors
        ),
        f"child processes are left: {before.children} before, {after.children} after": (
            after.children <= before.children
        ),
        f"the exit code after SIGTERM is {finding.exit_code}": finding.exit_code == 0,
    }
    return [words for words, holds in checks.items() if not holds]


def told(remains: Remains) -> str:
    return (
        f"{remains.rss_bytes / 2**20:.0f} MiB, {remains.descriptors} descriptors, {remains.threads} threads, "
        f"{remains.children} children, {remains.tasks} tasks"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=10_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="default: %(default)g")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-storm-") as folder:
        finding = asyncio.run(
            storm(
                Path(folder),
                num_faults=args.faults,
                seconds=args.seconds,
                seed=args.seed,
                step_back=partial(os.nice, 19),
            )
        )
    for (fault, outcome), count in sorted(finding.outcomes.items()):
        print(f"{fault:<14}{count:>7}  {outcome}")
    print(f"\n{finding.num_faults} faults in {finding.seconds:.0f} s")
    print(
        f"honest: {finding.num_answers} answers, {finding.num_wrong} wrong; {dict(finding.honest_refusals)}"
    )
    slower = finding.storm_p99_s / finding.quiet_p99_s
    print(
        f"time to first token, p99: {finding.quiet_p99_s:.3f} s before, {finding.storm_p99_s:.3f} s in the "
        f"storm, {slower:.2f} times"
    )
    print(f"before: {told(finding.before)}\nafter:  {told(finding.after)}")
    print(f"SIGTERM: exit code {finding.exit_code} after {finding.exit_s:.1f} s")
    wrong = faults_of(finding)
    if finding.after.rss_bytes > MEMORY * finding.before.rss_bytes:
        wrong.append("memory did not come back to within a tenth of its start")
    if slower > SLOWER:
        wrong.append(f"honest callers waited {slower:.2f} times as long for their first token")
    print("\n" + ("\n".join(f"WRONG: {words}" for words in wrong) or "all that must hold does"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
