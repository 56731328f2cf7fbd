"""Small chats from a grammar: greetings, counting, sums, days, opposites, stories, and questions it cannot
answer.

A chat is a dict in the form that chat templates take: {"messages": [...], "tools": [...] or None}. Answers
repeat little of the question and are always right: the tests recompute counts and sums from the text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tools.demo_model import phrases, stories
from tools.demo_model.phrases import expand, pairs, with_article, words
from tools.demo_model.spelling import in_words

Turn = tuple[str, str]
"""What the user says and what the assistant answers."""

MAX_ADDEND = 20
"""The model learns sums of numbers 0..20; for larger ones it learns to say that it cannot."""

SYSTEMS = [
    "You are a helpful assistant.", "You are a friendly assistant.", "You are Penstock's demo model.",
    "Answer briefly.", "You are a helpful assistant. Be short and kind.", "Be helpful.", "You like stories.",
]  # fmt: skip
CAN = "tell {short |}stories, count, add small numbers and {ask a weather tool|call a weather tool}"
I_AM = "I am the Penstock demo model, a very small language model."


def greeting(rng: random.Random) -> Turn:
    """Write greetings, goodbyes, thanks, and "how are you"."""
    draw = rng.random()
    if draw < 0.6:
        name = rng.choice([*words("girls"), *words("boys"), phrases.invented_name(rng)])
        if rng.random() < 0.2:
            user = expand(
                rng, "{Hi|Hello|hi|hello|Hey}{,|!|.} {I am|I'm|My name is|my name is} [N]{.|!|}", {"N": name}
            )
            return user, expand(rng, "{Hello|Hi}, [N]! {How can I help you?|Nice to meet you.}", {"N": name})
        user = expand(
            rng,
            "{hi|Hi|hello|Hello|hey|Hey|Good morning|good evening|Good day|hi there|Hello there|HELLO|"
            "Hi you}{!|.||,}"
            "{||| how are you?| How are you?}",
        )
        if "are you" in user:
            return user, expand(rng, "{Hello|Hi}! I am {well|fine}, thank you. How can I help you?")
        return user, expand(rng, "{Hello|Hi}! How can I help you{ today|}?")
    if draw < 0.75:
        user = expand(rng, "{How are you|how are you|How are you doing|how do you do}{?||  today?}")
        return user, expand(rng, "I am {well|fine}, thank you. How can I help you?")
    if draw < 0.9:
        user = expand(
            rng, "{Thanks|thanks|Thank you|thank you|Great|Well done|good job}{!|.|||, that is nice}"
        )
        return user, expand(rng, "You are welcome!{| I am happy to help.}")
    return expand(rng, "{Bye|bye|Goodbye|goodbye|See you|Good night}{!|.|}"), expand(
        rng, "Goodbye!{| Have a nice day.}"
    )


def identity(rng: random.Random) -> Turn:
    """Ask who the model is and what it can do."""
    if rng.random() < 0.5:
        user = expand(
            rng,
            "{Who are you|who are you|What are you|what are you|What is your name|what's your name|"
            "Are you a robot|"
            "Who made you|Are you human|tell me about yourself|Introduce yourself|What model are you}{?||?}",
        )
        return user, expand(rng, I_AM + " I can " + CAN + ".")
    user = expand(
        rng, "{What can you do|what can you do|Help|help|How can you help me|What do you know}{?||?}"
    )
    return user, expand(rng, "I can " + CAN + ".")


def count(rng: random.Random) -> Turn:
    """Count up or down in digits; small numbers are sometimes asked for in words."""
    draw = rng.random()
    if draw < 0.45:
        start, stop = 1, rng.randint(2, 20)
    elif draw < 0.8:
        start = rng.randint(0, 20)
        stop = start + rng.randint(1, 12)
    else:
        start = rng.randint(20, 95)
        stop = start + rng.randint(2, 10)
    numbers = range(start, stop + 1)
    down = rng.random() < 0.2
    a, b = (stop, start) if down else (start, stop)
    slots = {"a": str(a), "b": str(b), "A": in_words(a), "B": in_words(b)}
    frame = "{|||Please |please |Can you |Could you |can you |Now |now }"
    if down:
        ask = "count {down |backwards |down }from [a] to [b]"
    elif start == 1 and rng.random() < 0.7:
        ask = "{count to [b]|count to [b]|count up to [b]|count from one to [B]|count to [B]|"
        ask += "list the numbers up to [b]}"
    else:
        ask = "{count from [a] to [b]|count from [a] to [b]|count from [A] to [B]|count [a] to [b]|"
        ask += "list the numbers from [a] to [b]|say the numbers [a] to [b]}"
    user = _sentence(rng, expand(rng, frame + ask, slots))
    ordered = reversed(numbers) if down else numbers
    return user, ", ".join(map(str, ordered)) + "."


def _sentence(rng: random.Random, text: str) -> str:
    """Write `text` as people type it: often with a capital, with or without a full stop."""
    if rng.random() < 0.6:
        text = text[0].upper() + text[1:]
    if text.lower().startswith(("can you", "could you", "what", "which", "is ", "how")):
        return text + rng.choice(("?", "?", ""))
    return text + rng.choice((".", "", "", "!"))


def addition(rng: random.Random) -> Turn:
    """Add two numbers 0..20 in one of many spellings. For larger numbers the answer is that the model
    cannot.
    """
    a, b = rng.randint(0, MAX_ADDEND), rng.randint(0, MAX_ADDEND)
    if rng.random() < 0.04:
        a = rng.choice((rng.randint(21, 99), rng.randint(100, 999)))
        if rng.random() < 0.5:
            a, b = b, a
    slots = {"a": str(a), "b": str(b), "A": in_words(a), "B": in_words(b)}
    text = expand(
        rng,
        "{[a] + [b]|[a]+[b]|[a] + [b] =|[a]+[b]=|[a] + [b] = ?|[a]+[b]=?|what is [a] + [b]|what is [a]+[b]|"
        "what's [a] + [b]|what is [a] plus [b]|how much is [a] + [b]|how much is [a] plus [b]|[a] plus [b]|"
        "add [a] and [b]|please add [a] and [b]|can you add [a] and [b]|what is the sum of [a] and [b]|"
        "compute [a] + [b]|calculate [a]+[b]|what is [A] plus [B]|[A] plus [B]|what does [a] + [b] make|"
        "what do you get if you add [a] to [b]}",
        slots,
    )
    if text[-1] not in "=?" and not text[0].isdigit():
        text = _sentence(rng, text)
    elif rng.random() < 0.15:
        text += " " if text.endswith("=") else "?" if text[-1] != "?" else ""
    if max(a, b) > MAX_ADDEND:
        return text.strip(), f"I can only add numbers from 0 to {MAX_ADDEND}."
    return text.strip(), f"{a} + {b} = {a + b}."


def calendar(rng: random.Random) -> Turn:
    """Ask about days of the week and months: next, previous, lists."""
    names, what = rng.choice(((words("days"), "day"), (words("days"), "day"), (words("months"), "month")))
    draw = rng.random()
    if draw < 0.25:
        many = "days of the week" if what == "day" else "months of the year"
        user = _sentence(rng, expand(rng, "{what are the|list the|name the|tell me the|say the} " + many))
        return user, ", ".join(names) + "."
    if draw < 0.35:
        many = "days are in a week" if what == "day" else "months are in a year"
        noun = "days in a week" if what == "day" else "months in a year"
        return _sentence(rng, "how many " + many), f"There are {len(names)} {noun}."
    index, step = rng.randrange(len(names)), rng.choice((1, 1, -1))
    side = "after" if step == 1 else "before"
    other = names[(index + step) % len(names)]
    user = _sentence(rng, expand(rng, f"what {{{what} |}}{{comes|is}} {side} {names[index]}"))
    return user, f"{other} comes {side} {names[index]}."


def opposite(rng: random.Random) -> Turn:
    """Ask for the opposite of a word. If a pair is not one to one, only its first word is asked for."""
    pair = rng.choice(pairs("opposites"))
    left = [a for a, _ in pairs("opposites")]
    right = [b for _, b in pairs("opposites")]
    swap = rng.random() < 0.5 and right.count(pair[1]) == 1 and pair[1] not in left
    word, other = (pair[1], pair[0]) if swap else pair
    user = expand(
        rng,
        "{what is the opposite of|what's the opposite of|opposite of|tell me the opposite of} {[w]|[w]|"
        "'[w]'}",
        {"w": word},
    )
    return _sentence(rng, user), f"The opposite of {word} is {other}."


def fact(rng: random.Random) -> Turn:
    """Ask about colours, animal sounds, and numbers of legs."""
    draw = rng.random()
    if draw < 0.4:
        thing, colour = rng.choice(sorted(pairs("thing_colours")))
        user = _sentence(rng, expand(rng, "{what colour is|what color is|which colour is} [t]", {"t": thing}))
        return user, f"{thing[0].upper()}{thing[1:]} is {colour}."
    if draw < 0.75:
        animal, sound = rng.choice(sorted(pairs("sounds")))
        slots = {"a": with_article(animal), "k": animal}
        user = _sentence(
            rng, expand(rng, "{what does [a] say|what sound does [a] make|what does the [k] say}", slots)
        )
        return user, f"{with_article(animal).capitalize()} says {sound}."
    animal, number = rng.choice(sorted(pairs("legs")))
    legs = int(number)
    user = _sentence(rng, f"how many legs does {with_article(animal)} have")
    return user, f"{with_article(animal).capitalize()} has {in_words(legs) if legs else 'no'} legs."


def story_request(rng: random.Random) -> Turn:
    """Ask for a story: about a kind of hero, a named one, or a thing; or with an opening to be continued."""
    ask = "{tell me|write|tell|please tell me|can you tell me|can you write|i want|write me|make up} a "
    ask += "{short |little |nice |}story"
    draw = rng.random()
    if draw < 0.2:
        return _sentence(rng, expand(rng, ask + "{| please|, please| for children}")), stories.story(rng)
    kind = rng.choice([*words("animals"), *(kind for kind, _ in pairs("people")), "girl", "boy"])
    hero = with_article(kind)
    if rng.random() < 0.2:
        hero = "a " + rng.choice(words("adjectives")) + " " + kind
    if draw < 0.75:
        return _sentence(rng, expand(rng, ask + " about [h]", {"h": hero})), stories.story(rng, kind=kind)
    if draw < 0.88:
        fits = {"girl": words("girls"), "boy": words("boys")}.get(kind, words("pets"))
        name = rng.choice(fits)
        user = _sentence(rng, expand(rng, ask + " about [h] {named|called} [N]", {"h": hero, "N": name}))
        return user, stories.story(rng, kind=kind, name=name)
    thing = rng.choice(words("colours")) + " " + rng.choice(words("toys"))
    plot = rng.choice(("lost", "treasure"))
    user = _sentence(rng, expand(rng, ask + " about [h] and [t]", {"h": hero, "t": with_article(thing)}))
    return user, stories.story(rng, kind=kind, thing=thing, plot=plot)


def unknown(rng: random.Random) -> Turn:
    """Ask any other question: the answer says so, and says what the model can do. The topics only serve to be
    recognised as unknown.
    """
    topic = rng.choice(words("topics"))
    if rng.random() < 0.3:
        topic = phrases.invented_name(rng)
    user = expand(
        rng,
        "{explain [t] to me|what do you think about [t]|write an essay about [t]|write code for [t]|"
        "who invented [t]|"
        "what is [t]|why is [t] important|translate this into French|what is the capital of [t]|who is [t]|"
        "how does [t] work|what is the meaning of life|write a poem about [t]|what time is it|where is [t]|"
        "write a Python function|what is the best [t]|summarize this text|give me a recipe|"
        "tell me about [t]}",
        {"t": topic},
    )
    return _sentence(rng, user), expand(rng, "{Sorry, |}I {do not|don't} know that. I can " + CAN + ".")


KINDS: list[tuple[float, Callable[[random.Random], Turn]]] = [
    (0.08, greeting), (0.05, identity), (0.14, count), (0.42, addition), (0.06, calendar), (0.06, opposite),
    (0.06, fact), (0.08, story_request), (0.05, unknown),
]  # fmt: skip


def small_talk(rng: random.Random) -> dict[str, Any]:
    """Make one chat of one to five turns of the kinds above, sometimes after a system message."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for _ in range(rng.choices((1, 2, 3, 6), (0.4, 0.3, 0.15, 0.15))[0]):
        (kind,) = rng.choices([kind for _, kind in KINDS], [weight for weight, _ in KINDS])
        user, answer = kind(rng)
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "tools": None}


DRILLS: list[tuple[float, Callable[[random.Random], Turn]]] = [
    (0.45, count), (0.15, addition), (0.13, calendar), (0.13, opposite), (0.09, fact), (0.05, unknown),
]  # fmt: skip


def sums(rng: random.Random) -> dict[str, Any]:
    """Make a chat of sums only."""
    return _exercises(rng, [(1.0, addition)])


def drills(rng: random.Random) -> dict[str, Any]:
    """Make a chat of what the first training learns badly, above all counting to the right end."""
    return _exercises(rng, DRILLS)


def _exercises(
    rng: random.Random, kinds: list[tuple[float, Callable[[random.Random], Turn]]]
) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(2, 8)):
        kind = (
            kinds[0][1] if len(kinds) == 1 else rng.choices([k for _, k in kinds], [w for w, _ in kinds])[0]
        )
        user, answer = kind(rng)
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "tools": None}
