"""The text for a custom tool, out of the JSON of a call's arguments that comes in pieces."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import ToolCall
from penstock.openai.routes.custom_tools import InputPieces, input_of

TEXTS = st.text(st.sampled_from('ab é\u2028\n"\\/𝄞\x01\x7f'), max_size=12)


@given(TEXTS, st.booleans(), st.sampled_from(["", " ", "\n  "]), st.lists(st.integers(0, 80), max_size=8))
def test_however_the_arguments_are_cut_the_text_is_that_of_the_json(
    text: str, in_ascii: bool, space: str, cuts: list[int]
) -> None:
    """In ASCII, 𝄞 is a pair of surrogates, which may be cut within one of them or between them."""
    value = json.dumps(text, ensure_ascii=in_ascii)
    arguments = f'{space}{{{space}"input"{space}:{space}{value}{space}}}'
    pieces, places = InputPieces(), [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    told = [pieces.add(arguments[a:b]) for a, b in itertools.pairwise(places)]
    assert "".join(told) + pieces.rest() == text
    assert input_of(ToolCall("c", "f", arguments)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "ab', "ab"),
        ('{"input": "ab\\', "ab"),
        ('{"input": "ab\\ud834\\u', "ab"),
        ('{"input": "ab\\ud834"}', "ab\ufffd"),
        ('{"input": "C:\\dir\\n"}', 'C:\\dir\\n"}'),
        ('{"input": "a\\u12G"}', 'a\\u12G"}'),
        ('{"input": "ab", "x": "y"}', 'ab", "x": "y"}'),
        ('{"inp', '{"inp'),
        ('{"input": 7}', '{"input": 7}'),
        ('{"x": "y"}', '{"x": "y"}'),
        ("", ""),
    ],
)
def test_what_does_not_follow_the_function_or_ends_early_is_told_as_far_as_it_goes(
    arguments: str, text: str
) -> None:
    pieces = InputPieces()
    assert "".join(map(pieces.add, arguments)) + pieces.rest() == text
    assert input_of(ToolCall("c", "f", arguments)) == text
