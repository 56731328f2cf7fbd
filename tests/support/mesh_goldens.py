"""Runs goldens that are cut over devices of the CPU.

    python -m tests.support.mesh_goldens DEVICES NAME[:experts|:pages]...

With ":experts" the experts stay whole; with ":pages" the pages of the cache are dealt, too. Each golden's
longest prompt runs, whose chunks and decode steps are all the programs that there are.

JAX makes the devices of a process only once, so this is a process of its own. It prints one JSON object for
each golden: its name, what differs from PyTorch's (empty: nothing), and the collectives of its program.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import jax
from jax.sharding import Mesh

from penstock.runtime.execution.backend import mesh_of
from penstock.runtime.execution.on_mesh import cut_sharding
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.cutting import cut
from penstock.runtime.models.params import ModelState
from tests.support.goldens import GOLDEN, check_greedy, check_last_logits
from tests.support.models.reading import check_reading
from tests.support.models.sequence import Sequence

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def main() -> None:
    devices, *names = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    mesh = mesh_of(jax.devices("cpu"))
    for name in names:
        golden, _, dealt = name.partition(":")
        directory = GOLDEN / golden
        config = cut(
            load_config(directory),
            mesh.size,
            expert_parallel=bool(dealt),
            context_parallel=dealt == "pages",
        )
        state = load_weights(directory, config, "float32", placement=cut_sharding(mesh), progress=False)
        if golden.startswith("encoders/"):
            say(name, *reading(directory, config, state, mesh))
            continue
        sequence = Sequence(config, state, "float32", mesh=mesh)
        cases = json.loads((directory / "expected.json").read_text())["cases"]
        longest = max(cases, key=lambda case: len(case["prompt"]))
        problem = ""
        try:
            logits = sequence.feed(longest["prompt"])
            check_last_logits(logits, longest)
            check_greedy(logits, sequence.feed, longest)
        except AssertionError as error:
            problem = str(error) or "it differs"
        say(name, problem, sequence.hlo())


def reading(directory: Path, config: ModelConfig, state: ModelState, mesh: Mesh) -> tuple[str, str]:
    """Return (what differs from PyTorch's, the program) of a model that generates nothing."""
    try:
        return "", check_reading(directory, config, state, mesh)
    except AssertionError as error:
        return str(error) or "it differs", ""


def say(name: str, problem: str, program: str) -> None:
    line = {"name": name, "problem": problem, "collectives": collectives_of(program)}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def collectives_of(program: str) -> Counter[str]:
    """Count the collectives in a program's HLO."""
    return Counter(_COLLECTIVE.findall(program))


if __name__ == "__main__":
    main()
