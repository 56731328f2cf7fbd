"""The workloads, as a table. Pure and without dependencies, because the runner of every engine imports it.

All workloads are greedy, ignore end tokens and give token ids. Tokens are random, but for the workloads on
speculation, whose prompts are text (`bench.texts`). A repeat is one or more waves; the jobs of a
wave are submitted together, and all end before the next wave begins. Every repeat has the same lengths and
other tokens, so a prefix cache can help only within a repeat.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bench.texts import STORIES, words

WARMUP = -1
"""The number of the repeat that runs first and is not counted."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request. If `after_tokens` is above 0, it is submitted when every job of its wave whose value is 0
    has generated that many tokens.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    after_tokens: int = 0


Wave = tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """`count` requests of a wave. Lengths are drawn evenly from (least, most), both included. A prompt is
    `shared_prompt` tokens that all prompts of the group have in common, followed by its own.
    """

    count: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared_prompt: int = 0
    after_tokens: int = 0
    text: str = ""
    """"words": prompts are parts of `bench.texts.words`; "stories": of its STORIES; "": of random tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What to send: `waves` times the same jobs, token for token."""

    name: str
    title: str
    groups: tuple[Group, ...]
    figures: tuple[str, ...]
    """The figures of `bench.measures.figures` that this workload is about, the most important one first."""
    waves: int = 1


def _one(count: int, prompt: int, output: int) -> tuple[Group, ...]:
    return (Group(count, (prompt, prompt), (output, output)),)


def _copied(count: int) -> tuple[Group, ...]:
    return (Group(count, (1000, 1000), (256, 256), text="words"),)


def _concurrent(count: int) -> Workload:
    title = f"{count} at once, 128 in, 64 out"
    return Workload(f"C{count}", title, _one(count, 128, 64), ("output_tokens_per_s",))


LEVELS = (1, 2, 4, 8, 16, 32)
CONCURRENCY = tuple(f"C{count}" for count in LEVELS)
"""The names of the workloads for throughput against concurrency."""
MAIN = ("W1", "W2", "W3", "W4", "W5", "W6")
LARGE = ("L1", "L2")
"""Like W1 and W2 and shorter, for models of which a slow machine reads the weights for a third of a second.
"""

SPECULATION = ("S1", "S1x4", "S1x16", "S2")
"""S1 measures what its title says only with a checkpoint that repeats prompts of 1,000 tokens, and S2 with
the demo model."""

TABLE: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload(
                "W1",
                "1 request, 128 in, 128 out",
                _one(1, 128, 128),
                ("decode_tokens_per_s", "prefill_tokens_per_s", "itl_p50_ms"),
            ),
            Workload("W2", "16 at once, 256 in, 128 out", _one(16, 256, 128), ("output_tokens_per_s",)),
            Workload("W3", "1 request, 2048 in, 1 out", _one(1, 2048, 1), ("prefill_tokens_per_s",)),
            Workload(
                "W4",
                "twice the same 16 at once, 1024 shared + 32 own in, 32 out",
                (Group(16, (32, 32), (32, 32), shared_prompt=1024),),
                ("wave1_s", "wave2_s"),
                waves=2,
            ),
            Workload(
                "W5",
                "32 ragged at once, 16..512 in, 16..128 out",
                (Group(32, (16, 512), (16, 128)),),
                ("output_tokens_per_s",),
            ),
            Workload(
                "W6",
                "4 decodes while 2048 tokens prefill",
                (
                    Group(4, (64, 64), (128, 128)),
                    Group(1, (2048, 2048), (1, 1), after_tokens=8),
                ),
                ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "late_ttft_s"),
            ),
            Workload(
                "L1",
                "1 request, 64 in, 64 out",
                _one(1, 64, 64),
                ("decode_tokens_per_s", "prefill_tokens_per_s"),
            ),
            Workload("L2", "16 at once, 32 in, 16 out", _one(16, 32, 16), ("output_tokens_per_s",)),
            Workload(
                "S1",
                "1 request that repeats text, 1000 in, 256 out",
                _copied(1),
                ("decode_tokens_per_s", "itl_p50_ms"),
            ),
            *(
                Workload(
                    f"S1x{count}",
                    f"{count} at once that repeat text, 1000 in, 256 out",
                    _copied(count),
                    ("output_tokens_per_s", "decode_tokens_per_s"),
                )
                for count in (4, 16)
            ),
            Workload(
                "S2",
                "1 story of the demo model, 12 in, 256 out",
                (Group(1, (12, 12), (256, 256), text="stories"),),
                ("decode_tokens_per_s", "itl_p50_ms"),
            ),
            *map(_concurrent, LEVELS),
        )
    }
)


def jobs(workload: Workload, repeat: int, num_words: int) -> Wave:
    """Return the jobs of one wave of a repeat. Token ids are below `num_words`.

    Lengths depend only on the workload's name, tokens on name and repeat. (A random.Random seeded with a
    string is the same on every machine, and in every Python from 3.2 on.)
    """
    lengths = random.Random(f"lengths of {workload.name}")
    tokens = random.Random(f"tokens of {workload.name} {repeat}")
    made: list[Job] = []
    for group in workload.groups:
        shared = tokens.choices(range(num_words), k=group.shared_prompt)
        for i in range(group.count):
            length = lengths.randint(*group.prompt)
            if group.text == "stories":
                story = STORIES[(repeat + i) % len(STORIES)]
                own = [token % num_words for token in story[:length]]
            elif group.text == "words":
                start = tokens.randrange(len(words(num_words)) - length)
                own = list(words(num_words)[start : start + length])
            else:
                own = tokens.choices(range(num_words), k=length)
            made.append(Job((*shared, *own), lengths.randint(*group.output), group.after_tokens))
    return tuple(made)


def waves(workload: Workload, repeat: int, num_words: int) -> tuple[Wave, ...]:
    """Yield all waves of a repeat."""
    return (jobs(workload, repeat, num_words),) * workload.waves


def select(names: Sequence[str]) -> tuple[Workload, ...]:
    """Select workloads by name; "main", "concurrency", "large" and "speculation" stand for their lists.
    Raises ValueError for an unknown name.
    """
    lists = {"main": MAIN, "concurrency": CONCURRENCY, "large": LARGE, "speculation": SPECULATION}
    wanted = [name for given in names for name in lists.get(given, (given,))]
    if unknown := sorted(set(wanted) - set(TABLE)):
        raise ValueError(f"no workload {', '.join(unknown)}; there are {', '.join([*TABLE, *lists])}")
    return tuple(TABLE[name] for name in dict.fromkeys(wanted))


def shrunk(workload: Workload, divisor: int) -> Workload:
    """Divide the lengths of the workload, to try a runner out. Prompts keep at least 2 tokens, and outputs
    keep 2 if they had more than 1.
    """

    def less(span: tuple[int, int], least: int) -> tuple[int, int]:
        return max(least, span[0] // divisor), max(least, span[1] // divisor)

    groups = tuple(
        dataclasses.replace(
            group,
            prompt=less(group.prompt, 2),
            output=less(group.output, min(2, group.output[0])),
            shared_prompt=group.shared_prompt // divisor,
            after_tokens=min(1, group.after_tokens),
        )
        for group in workload.groups
    )
    return dataclasses.replace(workload, title=f"{workload.title}; lengths / {divisor}", groups=groups)
