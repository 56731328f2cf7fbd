"""The parser that separates a model's reasoning from its answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.reasoning import REASONING_FORMS, ReasoningParser
from tests.support.chat import pieces_of

THINK = REASONING_FORMS["think"]


def split(pieces: list[str], *, inside: bool = False, form: str = "think") -> tuple[str, str]:
    """Return what the parser makes of the pieces: (reasoning, answer)."""
    parser = ReasoningParser(REASONING_FORMS[form], inside=inside)
    parts = [*map(parser.push, pieces), parser.flush()]
    return "".join(p.reasoning for p in parts), "".join(p.answer for p in parts)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nso\n</think>\n\nYes.\n", False, ("so", "Yes.\n")),
        ("\n <think>a\n\nb</think>c", False, ("a\n\nb", "c")),
        ("<think></think>\n\nYes.", False, ("", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("<think>on and on\n", False, ("on and on", "")),  # without an end tag all of it is reasoning
        ("<think>a < b </thin", False, ("a < b </thin", "")),
        ("so\n</think>\n\nYes.", True, ("so", "Yes.")),
        ("\nso</think>Yes <think>no</think>", True, ("so", "Yes <think>no</think>")),
        ("<think>\nso</think>Yes.", True, ("so", "Yes.")),  # the block is opened twice
        ("on and on", True, ("on and on", "")),
        ("</think>Yes.", True, ("", "Yes.")),
        ("Yes.", False, ("", "Yes.")),
        ("\n\nYes. ", False, ("", "\n\nYes. ")),
        ("Yes <think>no</think>.", False, ("", "Yes <think>no</think>.")),
        ("Yes.</think>", False, ("", "Yes.</think>")),
        ("<thin air>", False, ("", "<thin air>")),
        ("<think><think>x</think></think>y", False, ("<think>x", "</think>y")),
        ("", False, ("", "")),
        ("", True, ("", "")),
        ("  ", False, ("", "  ")),
    ],
)
def test_examples(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split([text], inside=inside) == expected
    assert split(list(text), inside=inside) == expected


@pytest.mark.parametrize("form", sorted(REASONING_FORMS))
def test_every_form(form: str) -> None:
    tags = REASONING_FORMS[form]
    assert split([f"{tags.start}{tags.title}\nso{tags.end}\nYes."], form=form) == ("so", "Yes.")
    assert not tags.title or split([f"{tags.start}so"], form=form) == ("", f"{tags.start}so")
    assert split([f"so{tags.end}Yes."], form=form, inside=True) == ("so", "Yes.")


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "</", "a", "\n", " ", "é", "<"]), max_size=10
    ),
    inside=st.booleans(),
    cuts=st.lists(st.integers(0, 50), max_size=8),
)
def test_pieces_do_not_matter(parts, inside, cuts) -> None:
    text = "".join(parts)
    whole = split([text], inside=inside)
    assert split(pieces_of(text, cuts), inside=inside) == whole
    assert split(list(text), inside=inside) == whole
    if not inside and not text.lstrip(" \n").startswith("<think>"):
        assert whole == ("", text)


@settings(max_examples=100, deadline=None)
@given(reasoning=st.text(max_size=20), answer=st.text(max_size=20), inside=st.booleans())
def test_what_is_written_is_found(reasoning, answer, inside) -> None:
    if "</think>" in reasoning or (inside and reasoning.lstrip(" \t\r\n").startswith("<think>")):
        return
    text = ("" if inside else "<think>\n") + reasoning + "\n</think>\n\n" + answer
    assert split(list(text), inside=inside) == (reasoning.strip(" \t\r\n"), answer.lstrip(" \t\r\n"))


def test_text_comes_at_once() -> None:
    parser = ReasoningParser(THINK, inside=True)
    assert [parser.push(p) for p in ("so", " it", " is </", "b>", "</think>", "\n", "Yes", " ")] == [
        ("so", ""), (" it", ""), (" is", ""), (" </b>", ""), ("", ""), ("", ""), ("", "Yes"), ("", " "),
    ]  # fmt: skip


def test_a_prompt_may_begin_the_reasoning_itself() -> None:
    """Seed-OSS' template does so where the model may not think, and Gemma 4's writes an empty block."""
    seed, gemma = REASONING_FORMS["seed"], REASONING_FORMS["gemma4"]
    assert seed.opened_by("<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>")
    text = "No budget.</seed:cot_budget_reflect>\n</seed:think>Yes."
    assert split([text], inside=True, form="seed") == ("No budget.</seed:cot_budget_reflect>", "Yes.")
    assert gemma.closed_by("<|turn>model\n<|channel>thought\n<channel|>")
    assert gemma.opened_by("<|turn>model\n<|channel>thought\n")


@pytest.mark.parametrize(
    ("prompt", "opened", "closed"),
    [
        ("<|im_start|>assistant\n", False, False),
        ("<|im_start|>assistant\n<think>\n", True, False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False, False),
        ("", False, False),
    ],
)
def test_the_prompts_end_shows_whether_reasoning_is_open(prompt: str, opened: bool, closed: bool) -> None:
    assert (THINK.opened_by(prompt), THINK.closed_by(prompt)) == (opened, closed)
