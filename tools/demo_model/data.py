"""Turns documents of the grammar into training rows: renders them with the checkpoint's template, tokenises
and packs them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tools.demo_model.grammar import Document
from tools.demo_model.tokenizer import END_OF_TEXT, IM_END, IM_START, TEMPLATE


@dataclass(frozen=True)
class Example:
    """One tokenised document: its ids, and for each whether predicting it counts (both [len])."""

    ids: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Packed rows, each [num_rows, length]: token ids, document number within the row, loss weights."""

    tokens: np.ndarray
    segments: np.ndarray
    weights: np.ndarray


def render(document: Document) -> str:
    """Render the text that the model sees: a story and its end, or a chat rendered with the template that is
    shipped.
    """
    if isinstance(document, str):
        return document + END_OF_TEXT
    texts = render_jinja_template(
        [document["messages"]], tools=document["tools"], chat_template=TEMPLATE.read_text(encoding="utf-8")
    )[0]
    return texts[0]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Example]:
    """Tokenise texts. In a story every token but the first counts; in a chat only what the assistant says."""
    start, end = tokenizer.token_to_id(IM_START), tokenizer.token_to_id(IM_END)
    header = tokenizer.encode(IM_START + "assistant\n").ids
    examples = []
    for encoding in tokenizer.encode_batch(texts):
        ids = np.asarray(encoding.ids, np.int32)
        weights = np.zeros(len(ids), np.float32)
        if ids[0] != start:
            weights[1:] = 1.0
        else:
            for at in np.flatnonzero(ids == start):
                if ids[at : at + len(header)].tolist() == header:
                    stop = at + int(np.argmax(ids[at:] == end))
                    weights[at + len(header) : stop + 1] = 1.0
        examples.append(Example(ids, weights))
    return examples


def pack(examples: Iterable[Example], length: int, seed: int, open_rows: int = 64) -> Rows:
    """Fill rows of `length` tokens with whole documents, each into the fullest open row that still has room
    for it.

    A document longer than a row is left out: cutting it would teach endings without beginnings.
    """
    order = [example for example in examples if len(example.ids) <= length]
    random.Random(seed).shuffle(order)
    done: list[list[Example]] = []
    rows: list[tuple[int, list[Example]]] = []
    for example in order:
        size = len(example.ids)
        fits = [i for i, (used, _) in enumerate(rows) if used + size <= length]
        if fits:
            best = max(fits, key=lambda i: rows[i][0])
            used, content = rows[best]
            rows[best] = (used + size, [*content, example])
        else:
            rows.append((size, [example]))
        if len(rows) > open_rows:
            fullest = max(range(len(rows)), key=lambda i: rows[i][0])
            done.append(rows.pop(fullest)[1])
    done += [content for _, content in rows]
    random.Random(seed + 1).shuffle(done)
    shape = (len(done), length)
    packed = Rows(np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.float32))
    for row, content in enumerate(done):
        at = 0
        for number, example in enumerate(content):
            span = slice(at, at + len(example.ids))
            packed.tokens[row, span] = example.ids
            packed.segments[row, span] = number
            packed.weights[row, span] = example.weights
            packed.weights[row, at] = 0.0
            at = span.stop
    return packed
