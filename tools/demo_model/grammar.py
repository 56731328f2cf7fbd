"""The whole training text of the demo model, written by a seeded grammar and by nothing else.

`documents(seed, num)` is the stream: stories as plain text, chats as messages for the chat template. The same
seed gives the same stream on every machine (only `random.Random` decides).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tools.demo_model import chats, stories, weather

Document = str | dict[str, Any]


def document(rng: random.Random) -> Document:
    """One training document: a story (str), or a chat ({"messages", "tools"})."""
    draw = rng.random()
    if draw < 0.22:
        plots = rng.choices((1, 2, 3), (0.86, 0.10, 0.04))[0]
        return stories.story(rng, plots=plots)
    if draw < 0.76:
        return chats.small_talk(rng)
    if draw < 0.985:
        return weather.weather_chat(rng)
    return weather.no_tool_chat(rng)


def documents(seed: int, num: int) -> Iterator[Document]:
    """The first `num` documents of the stream that `seed` names."""
    rng = random.Random(seed)
    for _ in range(num):
        yield document(rng)
