"""What a text makes windows guess on the device, and which rows of a step check it. The witnesses are loops
in Python, written from the definitions.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.execution.step_programs import place_guesses
from penstock.runtime.execution.text_guesses import CONTEXT, NO_TOKEN, guess_from, text_tables

MOST = 5
guess = jax.jit(guess_from, static_argnums=2)
place = jax.jit(place_guesses, static_argnums=(2, 3))


def places_of(tokens: list[int], newest: list[int]) -> dict[int, int]:
    """Length of an end of the newest tokens to the index behind its last occurrence, if something follows."""
    return {
        length: end
        for length in range(2, CONTEXT + 1)
        for end in range(length, len(tokens))
        if tokens[end - length : end] == newest[-length:]
    }


def test_what_followed_the_longest_end_that_stands_in_the_text_is_guessed() -> None:
    """Tokens of one hash may hide each other. Then a shorter end is found, or nothing, and that is rare."""
    rng = random.Random(1)
    tokens = [rng.choice([7, 8, 9, 10, 2**20]) for _ in range(400)]
    recent = [[rng.choice([7, 8, 9, 10, 2**20, 11]) for _ in range(CONTEXT)] for _ in range(300)]
    recent += [tokens[at : at + CONTEXT] for at in range(0, 396, 5)]
    recent += [[NO_TOKEN, NO_TOKEN, 7, 8], [NO_TOKEN] * 3 + [7], [NO_TOKEN] * CONTEXT, tokens[-CONTEXT:]]
    guesses, counts = guess(text_tables(np.array(tokens, np.int32), MOST), jnp.array(recent, jnp.int32), MOST)
    num_best = 0
    for newest, row, count in zip(recent, np.asarray(guesses).tolist(), counts.tolist(), strict=True):
        places = places_of(tokens, newest)
        known = [tokens[at : at + MOST] for at in places.values()]
        assert row[:count] in [*known, []]
        num_best += row[:count] == (tokens[places[max(places)] :][:MOST] if places else [])
    assert num_best > 0.95 * len(recent)
    assert counts.max() == MOST
    assert counts.min() == 0


def test_guesses_end_with_the_text() -> None:
    text = text_tables(np.array([1, 2, 3, 1, 2, 4, 5], np.int32), MOST)
    recent = jnp.array([[0, 3, 1, 2], [9, 9, 2, 4], [9, 9, 4, 5], [2, 3, 1, 9]], jnp.int32)
    guesses, counts = guess(text, recent, MOST)
    found = [row[:count] for row, count in zip(np.asarray(guesses).tolist(), counts.tolist(), strict=True)]
    assert found == [[4, 5], [5], [], []]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_short_text_is_a_text(length: int) -> None:
    text = text_tables(np.arange(length, dtype=np.int32), MOST)
    guesses, counts = guess(text, jnp.array([[NO_TOKEN, NO_TOKEN, 0, 1]], jnp.int32), MOST)
    assert np.asarray(guesses)[0, : int(counts[0])].tolist() == ([2] if length == 3 else [])


def test_inputs_come_first_and_guesses_place_by_place() -> None:
    rng = random.Random(2)
    for _ in range(40):
        runs = [rng.random() < 0.7 for _ in range(4)]
        counts = [rng.randint(0, MOST) for _ in runs]
        wanted = [(p, row) for p in range(1 + MOST) for row in range(4) if runs[row]]
        wanted = [(p, row) for p, row in wanted if p <= counts[row]][:10]
        at = place(jnp.array(runs), jnp.array(counts, jnp.int32), MOST, 10)
        assert at.is_real.tolist() == [True] * len(wanted) + [False] * (10 - len(wanted))
        pairs = zip(at.places.tolist(), at.rows.tolist(), strict=True)
        assert list(pairs)[: len(wanted)] == wanted
        assert at.counts.tolist() == [sum(row == r and p > 0 for p, r in wanted) for row in range(4)]
        for number, (of_guess, row) in enumerate(wanted):
            assert int(at.number[of_guess, row]) == number
        assert {(p, r) for p, r in np.argwhere(np.asarray(at.is_computed)).tolist()} == set(wanted)
