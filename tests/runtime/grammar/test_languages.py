"""Regular expressions, choices, Lark and GBNF: outputs match what is asked for, and errors are explained."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.grammar import Grammar
from tests.support.schemas import RandomWriter


@pytest.fixture(scope="module")
def writer(vocabulary) -> RandomWriter:
    return RandomWriter(vocabulary.tokens, vocabulary.eos_token_ids, json=False)


def written(compiler, vocabulary, writer, grammar, seed, **options) -> str | None:
    """Return a text of the grammar that a random writer writes; None if it reached no end."""
    walk = writer.write(compiler.constraint(grammar), seed, **options)
    if not walk.complete:
        return None
    spoken = [i for i in walk.token_ids if i not in vocabulary.eos_token_ids]
    assert vocabulary.special.isdisjoint(spoken)
    return b"".join(vocabulary.tokens[i] for i in spoken).decode()


def accepts(compiler, backend, grammar, text: str) -> bool:
    """Say whether `text`, given character by character, is a whole output."""
    constraint = compiler.constraint(grammar)
    try:
        for char in text:
            constraint.accept(backend.encode(char).ids)
        constraint.accept([2041])
    except RuntimeError:
        return False
    return True


def refusal(compiler, grammar) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(grammar)
    (violation,) = caught.value.violations
    assert violation.field == grammar.field
    return violation.description


# There is no \d, \w or \s here, because Rust and Python define them by different versions of Unicode.
REGEXES = [
    "abc",
    "a*",
    "",
    "(ab|a)(c|bcd)",
    "[0-9]{3}-[0-9]{4}",
    "(\\+|-)?[1-9][0-9]*(\\.[0-9]+)?",
    "[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8}){1,3}",
    "(foo|bar|baz){2,4}!",
    "[^aeiou ]{1,12}",
    "(?:19|20)[0-9]{2}-(0[1-9]|1[0-2])",
    "(?i:yes|no)",
    "(?s:.){0,30}",
    ".{0,30}",
    "a/b//c",
    "[a-z.]{1,9}@[a-z]{1,9}\\.(com|org)",
    "[一-龥]{2,4}。",
    "😀+(é|ü)",
    "<think>x</think>",
    "<\\|im_end\\|>",
    "^anchored$",
    'start: "a"\\n',
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_matches_from_end_to_end(pattern, compiler, vocabulary, writer):
    texts = [written(compiler, vocabulary, writer, Grammar.regex(pattern), seed) for seed in range(10)]
    whole = [text for text in texts if text is not None]
    assert len(whole) >= 6
    assert all(re.fullmatch(pattern, text) for text in whole), whole


def test_a_regex_accepts_what_it_matches_and_nothing_else(compiler, backend):
    grammar = Grammar.regex("a(b|cd)*e?")
    assert all(accepts(compiler, backend, grammar, text) for text in ("a", "abe", "acdbcde", "abb"))
    assert not any(accepts(compiler, backend, grammar, text) for text in ("", "b", "ac", "aee", "xa"))


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("a(?=b)", "look-around"),
        ("(a", "unclosed group"),
        ("a**{", "repetition"),
        ("\\bword", "lookarounds not supported"),
        ("(a)\\1", "backreferences are not supported"),
        ("[^\\x{0}-\\x{10FFFF}]", "cannot go on"),
    ],
)
def test_a_wrong_regex_is_refused_with_llguidances_message(pattern, part, compiler):
    assert part in refusal(compiler, Grammar.regex(pattern))


@pytest.mark.parametrize("length", [1, 300, 20_000])
def test_messages_stay_short_and_keep_the_reason(length, compiler):
    """llguidance repeats the pattern in its message and gives the reason after it."""
    message = refusal(compiler, Grammar.regex("x" * length + "("))
    assert "unclosed group" in message
    assert len(message) <= 600


@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(st.text(max_size=12), min_size=1, max_size=6)
    | st.lists(st.sampled_from(["a", "ab", "abc", "", '"', "\\", "/", "<|im_end|>", "<think>"]), min_size=1),
    seed=st.integers(0, 1000),
)
def test_the_output_is_exactly_one_of_the_choices(compiler, vocabulary, writer, choices, seed):
    text = written(compiler, vocabulary, writer, Grammar.choice(choices), seed)
    assert text in choices


def test_a_choice_may_hold_any_character(compiler, backend):
    """The text has every character of the first blocks of the Basic Multilingual Plane, and some from beyond
    it.
    """
    text = "".join(map(chr, [*range(0x3000), 0xFFFE, 0xFFFF, 0x1F600, 0x10FFFF]))
    constraint = compiler.constraint(Grammar.choice([text]))
    constraint.accept(backend.encode(text).ids)
    assert constraint.is_complete


def test_every_choice_can_come(compiler, vocabulary, writer):
    choices = ["red", "green", "greenish", "blue"]
    grammar = Grammar.choice(choices)
    seen = {written(compiler, vocabulary, writer, grammar, seed) for seed in range(100)}
    assert seen == set(choices)


def test_ten_thousand_choices(compiler, vocabulary, writer):
    choices = [f"item number {i * 7919}" for i in range(10_000)]
    assert written(compiler, vocabulary, writer, Grammar.choice(choices), 3) in choices


ARITHMETIC = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""


def test_lark_by_hand(compiler, backend):
    grammar = Grammar.ebnf(ARITHMETIC)
    assert all(accepts(compiler, backend, grammar, text) for text in ("1", "12+3*(4+5)", "((7))"))
    assert not any(
        accepts(compiler, backend, grammar, text) for text in ("", "1+", "(1", "1)", "1 + 2", "1234")
    )


def test_lark_written_at_random(compiler, vocabulary, writer):
    texts = [written(compiler, vocabulary, writer, Grammar.ebnf(ARITHMETIC), seed) for seed in range(30)]
    whole = [text for text in texts if text is not None]
    assert len(whole) > 15
    for text in whole:
        assert re.fullmatch(r"[0-9+*()]+", text)
        # Python's parser is the witness; it does not accept leading zeros.
        compile(re.sub(r"\b0+(?=[0-9])", "", text), "", "eval")


def test_json_inside_lark(compiler, vocabulary, writer):
    grammar = Grammar.ebnf(
        'start: "CALL " call ";"\n'
        'call: %json {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],\n'
        '  "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}\n'
    )
    for seed in range(5):
        text = written(compiler, vocabulary, writer, grammar, seed)
        assert text is not None
        assert text.startswith("CALL ")
        assert list(json.loads(text[5:-1])) == ["n"]


def test_special_tokens_are_named_and_never_spelt(compiler, backend):
    """`<think>` in Lark is the token; in a string it is seven characters, and the token does not match."""
    think, close = backend.token_to_id("<think>"), backend.token_to_id("</think>")
    named = compiler.constraint(Grammar.ebnf('start: <think> /[a-z]+/ </think> "."'))
    named.accept([think, *backend.encode("hm").ids, close, *backend.encode(".").ids])
    assert named.is_complete
    numbered = compiler.constraint(Grammar.ebnf(f"start: <[{think}]> <[{close}]>"))
    numbered.accept([think, close])
    assert numbered.is_complete
    spelt = compiler.constraint(Grammar.ebnf('start: "<think>"'))
    with pytest.raises(RuntimeError):
        spelt.accept([think])


def test_the_server_decides_about_forcing(compiler, vocabulary, writer):
    """If a grammar could switch forcing on, llguidance would propose the special token here, and then refuse
    it.
    """
    for text in ('%llguidance {"no_forcing": false}\nstart: "<|im_end|>" "b"', 'start: "<think>b"'):
        assert written(compiler, vocabulary, writer, Grammar.ebnf(text), 0) in ("<|im_end|>b", "<think>b")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("begin: 'a'", "1("),
        ("start: nowhere", 'unknown name: "nowhere"'),
        ('start: "a', "1("),
        ('x: "a"', "no start rule"),
        ("start: <nosuch>", "unknown special token"),
        ('start: %json {"not": {}}', 'JSON Schema keywords that are not supported here: "not"'),
        ("start: @other", "other"),
        ("start: (" + "(" * 1000, "too deeply nested"),
    ],
)
def test_wrong_lark_is_refused_with_llguidances_message(text, part, compiler):
    assert part in refusal(compiler, Grammar.ebnf(text))


def test_a_message_names_the_line_of_the_caller(compiler):
    assert refusal(compiler, Grammar.ebnf('start: a b\na: "x"\n\nb: nowhere\n')).startswith("at 4(")


def test_a_message_has_no_line_that_the_caller_did_not_write(compiler):
    told = refusal(compiler, Grammar.ebnf("start: nowhere"))
    assert "1 | start: nowhere" in told
    assert "forcing" not in told


GBNF = r"""
# a list
root ::= "[" item ("," " "? item)* "]"
item ::= [a-z]+ | "\"" [^"\\]{0,5} "\""
"""


def test_gbnf(compiler, backend, vocabulary, writer):
    grammar = Grammar.ebnf(GBNF)
    assert all(accepts(compiler, backend, grammar, text) for text in ("[a]", "[ab, c]", '["Hi",x]'))
    assert not any(accepts(compiler, backend, grammar, text) for text in ("[]", "[a,]", '["toolong"]', "a"))
    for seed in range(5):
        text = written(compiler, vocabulary, writer, grammar, seed)
        assert text is None or re.fullmatch(r'\[([a-z]+|"[^"\\]{0,5}")(, ?([a-z]+|"[^"\\]{0,5}"))*\]', text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("root ::= nowhere", "Rule 'nowhere' not found"),
        ('rule ::= "a"', "No 'root' rule found"),
        ("root ::= (", "Expected"),
        ("root ::= " + "(" * 5000, "nested too deeply"),
    ],
)
def test_wrong_gbnf(text, part, compiler):
    assert part in refusal(compiler, Grammar.ebnf(text))


def test_text_that_looks_like_gbnf_inside_lark(compiler, backend):
    assert accepts(compiler, backend, Grammar.ebnf('start: "x ::= y"'), "x ::= y")
