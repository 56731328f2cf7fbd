"""How relevant documents are to a query, by what any model tells of prompts: vectors, or log-probabilities.

A model that was trained to judge, such as Qwen3-Reranker, is shown a query and a document and answers "yes"
or "no". The relevance is how likely "yes" is against "no".
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature, Violation
from penstock.runtime.requests.reader import Reader
from penstock.runtime.text.interface import Text

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What a model judges by where a request does not say it, as the publisher of Qwen3-Reranker recommends."""
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_ROLES = ("query", "document")


class RelevanceMethod(enum.Enum):
    """What relevance is computed from."""

    EMBEDDINGS = "embeddings"
    """The cosine of the angle between the vectors of query and document, from -1 to 1."""
    YES_NO = "yes_no"
    """The probability of "yes" against "no", from 0 to 1."""
    CLASSIFIER = "classifier"
    """The sigmoid of the one number of a classifier that reads query and document together, from 0 to 1."""


def judges_pairs(reader: Reader | None) -> bool:
    """Say whether the model is a classifier with one class."""
    return reader is not None and reader.classes is not None and len(reader.classes.labels) == 1


def default_method(
    answers: tuple[int, int] | None, text: Text | None, reader: Reader | None = None
) -> RelevanceMethod:
    """Choose the method that the checkpoint is made for: that of the classifier for one with one class; that
    of vectors for other models that generate nothing; that of yes and no where its files say which tokens
    mean these (`answers`), or its chat template knows queries and documents; that of vectors for all others.
    """
    if reader is not None:
        return RelevanceMethod.CLASSIFIER if judges_pairs(reader) else RelevanceMethod.EMBEDDINGS
    judges = answers is not None or (text is not None and knows_pairs(text))
    return RelevanceMethod.YES_NO if judges else RelevanceMethod.EMBEDDINGS


def answer_tokens(answers: tuple[int, int] | None, text: Text | None) -> tuple[int, int]:
    """Return the tokens that mean yes and no: `answers` if the files name them. UnsupportedFeature where the
    model has no chat template, or does not write each word as one token.
    """
    if text is None or not text.has_chat_template:
        raise UnsupportedFeature(["method"], "the model has no chat template, so it cannot be asked")
    if answers is not None:
        return answers
    ids = [text.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(each) != 1 for each in ids):
        raise UnsupportedFeature(["method"], 'the tokenizer has no single tokens for "yes" and "no"')
    return ids[0][0], ids[1][0]


def judged(text: Text, instruction: str, query: str, document: str) -> str:
    """Write the prompt after which a model says whether the document is relevant: what its chat template
    makes of turns of the roles "query" and "document", or else of the words that Qwen3-Reranker was trained
    with. Thinking is switched off. InvalidRequest where the template refuses them.
    """
    turns: Sequence[Mapping[str, str]]
    if knows_pairs(text):
        turns = (
            {"role": "system", "content": instruction},
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        )
    else:
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        turns = ({"role": "system", "content": _JUDGE}, {"role": "user", "content": asked})
    return text.render_turns(turns, {"enable_thinking": False, "thinking": False})


def knows_pairs(text: Text) -> bool:
    """Say whether the chat template knows the roles "query" and "document"."""
    template = text.default_template
    return all(f"'{role}'" in template or f'"{role}"' in template for role in _ROLES)


def pair_ids(text: Text, reader: Reader, query: str, document: str, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids of query and document as a classifier reads them: as the tokenizer puts two texts
    together, with the types of their tokens if the model has such; or, of a decoder, what a template makes of
    them that knows both.
    """
    if not reader.reads_whole and knows_pairs(text):
        return tuple(text.encode(judged(text, INSTRUCTION, query, document), add_special_tokens=False))
    token_ids, types = text.encode_pair(query, document)
    if reader.token_types == 1:
        return tuple(token_ids)
    return tuple(i + kind * vocab_size for i, kind in zip(token_ids, types, strict=True))


def yes_against_no(yes: float, no: float) -> float:
    """Compute the probability of yes, if it can only be yes or no, of the log-probabilities of both."""
    odds = yes - no
    return 1 / (1 + math.exp(-odds)) if odds >= 0 else math.exp(odds) / (1 + math.exp(odds))


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Compute the cosine of the angle between two vectors; 0 where one of them has no length."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0


def best_first(relevances: Sequence[float], most: int | None) -> list[int]:
    """Return the numbers of at most so many documents, the most relevant first, and equal ones in their
    order.
    """
    return sorted(range(len(relevances)), key=lambda i: (-relevances[i], i))[:most]


def check_fits(num_tokens: int, room: int) -> None:
    """Raise InvalidRequest for a prompt that leaves the context no room for an answer."""
    if num_tokens > room - 2:
        described = f"with what the model is asked it has {num_tokens} tokens; at most {room - 2}"
        raise InvalidRequest([Violation("documents", described)])
