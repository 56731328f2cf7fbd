"""Short stories from a grammar: one cast per story, so names, pronouns and objects stay consistent."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tools.demo_model.phrases import expand, pairs, with_article, words


def _read_patterns() -> dict[str, list[str]]:
    """Read the parts of stories.txt by their headings."""
    parts: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("stories.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            parts[line.removeprefix("== ")] = []
        elif line and not line.startswith(";"):
            parts[list(parts)[-1]].append(line)
    return parts


_PATTERNS = _read_patterns()
PLOTS = {name.removeprefix("plot "): part for name, part in _PATTERNS.items() if name.startswith("plot ")}
"""Each plot's paragraphs. [F] may meet [N] for the first time or be an old friend: both read well."""


@dataclass(frozen=True)
class Cast:
    """Who and what one story is about, as the slots of the patterns above."""

    slots: dict[str, str]


def _pronouns(gender: str, prefix: str) -> dict[str, str]:
    he, him, his = ("she", "her", "her") if gender == "f" else ("he", "him", "his")
    forms = {"he": he, "him": him, "his": his}
    return {prefix + k: v for k, v in forms.items()} | {
        prefix + k.capitalize() if not prefix else prefix.capitalize() + k: v.capitalize()
        for k, v in forms.items()
    }


def _being(rng: random.Random, kind: str | None, avoid: str) -> tuple[str, str, str]:
    """Draw the (name, kind, gender) of a character; `kind` may be asked for, also one outside the lists."""
    if kind is None:
        draw = rng.random()
        if draw < 0.35:
            kind = rng.choice(("girl", "boy"))
        elif draw < 0.85:
            kind = rng.choice(words("animals"))
        else:
            kind = rng.choice(pairs("people"))[0]
    fixed = {"girl": "f", "boy": "m"} | dict(pairs("people"))
    gender = fixed.get(kind, rng.choice("fm"))
    names = (words("girls") if gender == "f" else words("boys")) if kind in fixed else words("pets")
    return rng.choice([name for name in names if name != avoid]), kind, gender


def make_cast(
    rng: random.Random, kind: str | None = None, name: str | None = None, thing: str | None = None
) -> Cast:
    """Draw a hero, a friend, things and places; hero kind, hero name and object may be asked for."""
    drawn, hero, gender = _being(rng, kind, "")
    hero_name = name or drawn
    friend, friend_kind, friend_gender = _being(rng, rng.choice(words("animals")), hero_name)
    colour = rng.choice(words("colours"))
    verb, doing, where = rng.choice(words("skills")).split("/")
    if thing is not None and thing.split(" ")[0] in words("colours"):
        colour = thing.split(" ")[0]
    thing = thing or colour + " " + rng.choice(words("toys"))
    adjective, trait = rng.sample(words("adjectives"), 2)
    slots = {
        "N": hero_name, "F": friend, "kind": hero, "fkind": friend_kind, "adj": trait, "colour": colour,
        "a_hero": with_article(f"{adjective} {hero}") if rng.random() < 0.75 else with_article(hero),
        "a_friend": with_article(friend_kind), "obj": thing, "a_obj": with_article(thing), "verb": verb,
        "doing": doing, "where": where, "place": rng.choice(words("places")),
        "home": rng.choice(words("homes")), "food": rng.choice(words("foods")),
    }  # fmt: skip
    return Cast(slots | _pronouns(gender, "") | _pronouns(friend_gender, "f"))


def story(
    rng: random.Random,
    kind: str | None = None,
    name: str | None = None,
    thing: str | None = None,
    plots: int = 1,
    plot: str | None = None,
) -> str:
    """Tell a story of `plots` episodes in paragraphs; `plot` names the first episode's shape."""
    slots = make_cast(rng, kind, name, thing).slots
    chosen = [plot] if plot else []
    chosen += rng.sample([key for key in PLOTS if key != plot], plots - len(chosen))
    opening = rng.choice(_PATTERNS["openings"])
    paragraphs = [expand(rng, opening, slots)]
    for index, key in enumerate(chosen):
        episode = [expand(rng, paragraph, slots) for paragraph in PLOTS[key]]
        if index:
            episode[0] = expand(rng, rng.choice(_PATTERNS["bridges"]), slots) + " " + episode[0]
            slots = slots | {"place": rng.choice(words("places"))}
        paragraphs += episode
    paragraphs.append(expand(rng, rng.choice(_PATTERNS["endings"]), slots))
    shape = rng.random()
    if shape < 0.5:
        return "\n\n".join(paragraphs)
    if shape < 0.8:  # the opening runs into the first episode
        return "\n\n".join([" ".join(paragraphs[:2]), *paragraphs[2:]])
    return " ".join(paragraphs)
