"""Generates all training text of the demo model, from a seeded grammar and from nothing else.

`documents(seed, num)` is the first stream. `late_documents` is a stream for the later part of training, in
which one kind of exercise (`LATE`) is the most frequent: sums, or what remains after them. Stories are plain
text; chats are messages for the chat template. One seed gives the same streams on every machine (only
`random.Random` decides).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tools.demo_model import chats, stories, weather

Document = str | dict[str, Any]


def document(rng: random.Random) -> Document:
    """Make one training document: a story (str), or a chat ({"messages", "tools"})."""
    draw = rng.random()
    if draw < 0.22:
        plots = rng.choices((1, 2, 3), (0.86, 0.10, 0.04))[0]
        return stories.story(rng, plots=plots)
    if draw < 0.76:
        return chats.small_talk(rng)
    if draw < 0.985:
        return weather.weather_chat(rng)
    return weather.no_tool_chat(rng)


LATE: dict[str, Callable[[random.Random], Document]] = {"sums": chats.sums, "drills": chats.drills}
"""The exercise that is the most frequent in a late stream."""


def late_document(rng: random.Random, kind: str) -> Document:
    """Make one document of the late stream `kind`."""
    draw = rng.random()
    if draw < 0.45:
        return LATE[kind](rng)
    if draw < 0.60:
        return stories.story(rng, plots=rng.choices((1, 2, 3), (0.7, 0.2, 0.1))[0])
    if draw < 0.80:
        return chats.small_talk(rng)
    return weather.weather_chat(rng)


def documents(seed: int, num: int) -> Iterator[Document]:
    """Yield the first `num` documents of the stream that `seed` names."""
    rng = random.Random(seed)
    for _ in range(num):
        yield document(rng)


def late_documents(seed: int, num: int, kind: str) -> Iterator[Document]:
    """Yield the first `num` documents of the late stream `kind`."""
    rng = random.Random(seed)
    for _ in range(num):
        yield late_document(rng, kind)
