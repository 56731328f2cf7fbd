"""Guesses of what follows in a text, on the device: where the newest tokens of a row stand in the text, what
comes next there is guessed to follow. So a window of decode steps guesses without the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

CONTEXT = 4
"""How many of the newest tokens are looked for, at most."""
_SHORTEST = 2
_LENGTHS = range(CONTEXT, _SHORTEST - 1, -1)
"""How many of them must stand in the text, in the order in which they are tried."""
_MIX = 1_000_003
_SPREAD = 15
"""By so many bits the words of a hash are shifted, so that its lowest bits depend on all of them."""
_PLACES = 4
"""How many places a table has for each token."""
NO_TOKEN = -1
"""Stands where there is no token; it is never found."""


class TextTables(NamedTuple):
    """A text, and where its words stand."""

    tokens: Any  # int32[N] with NO_TOKEN behind the last one
    places: Any  # int32[len(_LENGTHS), H] by length and hash of some tokens the index behind them; 0: none


def text_tables(tokens: NDArray[np.int32], most_guesses: int) -> TextTables:
    """Make the tables of a text, for so many guesses at a time. Of several places of the same tokens the last
    one counts, and of several tokens of one hash, too: then the others are not found. The sizes are powers of
    two, so that texts of similar lengths have the same programs.
    """
    size = 1 << max(len(tokens) + most_guesses, CONTEXT).bit_length()
    text = np.full(size, NO_TOKEN, np.int32)
    text[: len(tokens)] = tokens
    places = np.zeros((len(_LENGTHS), _PLACES * size), np.int32)
    for of_length, length in zip(places, _LENGTHS, strict=True):
        if len(tokens) <= length:
            continue
        words = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length).astype(np.uint32)
        of_length[_hashed(words, of_length.size)] = np.arange(length, len(tokens), dtype=np.int32)
    return TextTables(text, places)


def _hashed(words: Any, size: int) -> Any:
    """Turn tokens uint32[..., L] -> a number below `size`, which is a power of two, for each L of them. It
    computes the same with numpy and with JAX.
    """
    mixed = words[..., 0]
    for i in range(1, words.shape[-1]):
        mixed = mixed * np.uint32(_MIX) ^ words[..., i]
    mixed = mixed * np.uint32(_MIX)
    return (mixed ^ (mixed >> np.uint32(_SPREAD))) & np.uint32(size - 1)


def guess_from(text: TextTables, recent: Array, most: int) -> tuple[Array, Array]:
    """Turn the newest tokens of each row, int32[R, CONTEXT] with the newest last -> (guesses int32[R, most],
    how many of them there are int32[R]). The longest end of them that stands in the text decides.
    """
    size = text.places.shape[1]
    at = jnp.zeros(recent.shape[:1], jnp.int32)
    for of_length, length in zip(text.places, _LENGTHS, strict=True):
        newest = recent[:, CONTEXT - length :]
        found = of_length[_hashed(newest.astype(jnp.uint32), size)]
        there = text.tokens[jnp.maximum(found[:, None] + jnp.arange(-length, 0)[None, :], 0)]
        is_same = (found > 0) & (there == newest).all(axis=1)
        at = jnp.where((at == 0) & is_same, found, at)
    guesses = text.tokens[at[:, None] + jnp.arange(most)[None, :]]
    num_known = jnp.cumprod((guesses != NO_TOKEN).astype(jnp.int32), axis=1).sum(axis=1)
    return guesses, jnp.where(at > 0, num_known, 0).astype(jnp.int32)
