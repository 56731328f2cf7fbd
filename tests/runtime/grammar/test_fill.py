"""Many rows at once are what each row is alone."""

import numpy as np
import pytest

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.fill import PARALLEL_ROWS, MaskFiller
from penstock.runtime.grammar.spec import Grammar
from tests.support.schemas import allowed_ids

ROWS = PARALLEL_ROWS + 4


@pytest.mark.parametrize("threads", [None, 0, 1, 3])
def test_all_kinds_together(threads, compiler, backend):
    """Grammars, one of them complete, one that leads nowhere, bad words with and without one."""
    a, b = backend.token_to_id("a"), backend.token_to_id("b")

    def rows():
        rows = {row: compiler.constraint(Grammar.regex(f"a{{{row}}}b")) for row in range(1, PARALLEL_ROWS)}
        ended = compiler.constraint(Grammar.regex("a"))
        ended.accept([a])
        stuck = compiler.constraint(Grammar.ebnf('start: "a" <|im_end|>'))
        stuck.accept([a])
        words = BadWords([(a, b)], compiler.constraint(Grammar.regex("a*b?c?")), 2048)
        words.accept([a])
        alone = BadWords([(a, b)], None, 2048)
        alone.accept([a])
        return {**rows, 0: ended, ROWS - 1: stuck, ROWS - 2: words, ROWS - 3: alone}

    masks = np.full((ROWS, 64), 7, np.int32)
    stuck = MaskFiller(threads).fill_all(rows(), masks)
    assert list(stuck) == [ROWS - 1]
    assert isinstance(stuck[ROWS - 1], InvalidRequest)
    assert (masks[ROWS - 1] == -1).all()
    expected = np.zeros(64, np.int32)
    for row, constraint in rows().items():
        if row != ROWS - 1:
            constraint.fill(expected)
            assert (masks[row] == expected).all(), row
    assert set(allowed_ids(masks[0], 2048)) == {2041, 2039}
    assert b not in allowed_ids(masks[ROWS - 2], 2048)
    assert (masks[PARALLEL_ROWS] == 7).all(), "a row without a constraint stays as it was"


def test_nothing_to_do():
    masks = np.full((2, 64), 7, np.int32)
    assert MaskFiller(2).fill_all({}, masks) == {}
    assert (masks == 7).all()


def test_masks_must_be_contiguous():
    with pytest.raises(ValueError, match="contiguous"):
        MaskFiller().fill_all({}, np.zeros((4, 4), np.int32).T[:2])


def test_whatever_a_constraint_raises_is_its_own_rows(compiler):
    class Broken:
        is_complete = False

        def fill(self, mask):
            raise ValueError("broken")

        def accept(self, token_ids):
            pass

    masks = np.zeros((2, 64), np.int32)
    stuck = MaskFiller().fill_all({0: Broken(), 1: compiler.constraint(Grammar.regex("ab"))}, masks)
    assert list(stuck) == [0]
    assert isinstance(stuck[0], ValueError)
    assert allowed_ids(masks[1], 2048)
