"""The pieces that the grammar draws from: words, and a small notation for choices.

`expand` turns "{Hello|Hi}, [name]" into one text: braces hold alternatives (they may be nested), square
brackets are filled from a dict. All randomness comes from the `random.Random` that is passed in, so a seed
determines every text. The words are in words.txt.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"\[(\w+)\]")


def _read_words() -> dict[str, list[str]]:
    """Read words.txt: `name: item, item`, where indented lines continue a list and `;` begins a remark."""
    text = Path(__file__).with_name("words.txt").read_text(encoding="utf-8")
    lines = re.sub(r"^;.*$", "", text, flags=re.MULTILINE).replace("\n  ", " ").split("\n")
    entries = [line.partition(": ") for line in lines if line]
    return {name: items.split(", ") for name, _, items in entries}


_WORDS = _read_words()


def words(name: str) -> list[str]:
    """Read a list of words.txt."""
    return _WORDS[name]


def pairs(name: str) -> list[tuple[str, str]]:
    """Read a list of words.txt whose items are pairs with a slash."""
    return [(first, second) for first, _, second in (item.partition("/") for item in _WORDS[name])]


def expand(rng: random.Random, pattern: str, slots: Mapping[str, str] | None = None) -> str:
    """Make one random text of `pattern`: choices from the inside out, then the slots."""
    while (match := _CHOICE.search(pattern)) is not None:
        pick = rng.choice(match.group(1).split("|"))
        pattern = pattern[: match.start()] + pick + pattern[match.end() :]
    return _SLOT.sub(lambda m: (slots or {})[m.group(1)], pattern)


def with_article(noun: str) -> str:
    """Return the noun with "a" or "an" by its first letter, which is right for every word of the lists."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def invented_name(rng: random.Random) -> str:
    """Make up a name, so that the model learns to copy names instead of remembering a list."""
    starts, vowels, ends = words("name_starts"), words("name_middles"), words("name_ends")
    middles = [rng.choice(vowels) + rng.choice("lmnrstvkd") for _ in range(rng.choice((0, 1, 1)))]
    return rng.choice(starts) + rng.choice(vowels) + "".join(middles) + rng.choice(ends)


def city(rng: random.Random) -> str:
    """Name a city: a real one, one of two words, or often an invented one, so that the model is rewarded for
    copying the name.
    """
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(words("cities"))
    if draw < 0.6:
        return rng.choice(words("long_cities"))
    return invented_name(rng)
