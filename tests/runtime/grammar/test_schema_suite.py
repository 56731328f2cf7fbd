"""The published test suite of JSON Schema. A schema of it is followed, or refused by name; it is never taken
and followed wrongly.
"""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.grammar import Grammar
from tests.runtime.grammar.test_languages import accepts

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).parents[3]
SUITE = json.loads((ROOT / "tests/support/schema_suite.json").read_text())["groups"]
DRAFTS = {
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
    "7": "http://json-schema.org/draft-07/schema#",
}
KEYWORDS = sorted({group["keyword"] for group in SUITE})
OBEYED_BESIDE_REF = "ref overrides any sibling keywords"
"""The one case of which a valid instance is not taken: what is beside a $ref counts in draft 7,
too, as the page says.
"""
IMPOSSIBLE = "Unsatisfiable schema|an object or true"
"""What a refusal says if it means that the schema has no instance."""


@dataclass(frozen=True)
class Verdict:
    """What became of a schema of the suite."""

    keyword: str
    about: str
    refusal: str | None
    missed: tuple[str, ...]
    """Valid instances that the grammar does not take."""
    wrong: tuple[str, ...]
    """Invalid instances that it takes."""
    has_instances: bool


def written(value):
    return json.dumps(value, ensure_ascii=False)


def spellings(value):
    """Texts of a value. A grammar that takes the value takes one of them: members come in an order that is
    the schema's, and 1.0 may be an integer.
    """
    if isinstance(value, dict):
        for order in itertools.permutations(value.items()):
            members = [[f"{written(key)}:{text}" for text in spellings(one)] for key, one in order]
            yield from ("{" + ",".join(chosen) + "}" for chosen in itertools.product(*members))
    elif isinstance(value, list):
        parts = [list(spellings(one)) for one in value]
        yield from ("[" + ",".join(chosen) + "]" for chosen in itertools.product(*parts))
    else:
        yield written(value)
        if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
            yield str(int(value))


def judged(group, draft, compiler, backend):
    schema = group["schema"]
    if isinstance(schema, dict):
        schema = {"$schema": DRAFTS[draft], **schema}
    grammar = Grammar.json_schema(json.dumps(schema))
    refusal, missed, wrong = None, [], []
    try:
        compiler.compile(grammar)
    except InvalidRequest as error:
        refusal = error.violations[0].description
    else:

        def takes(value):
            texts = itertools.islice(spellings(value), 500)
            return any(accepts(compiler, backend, grammar, text) for text in texts)

        missed = [json.dumps(value) for value in group["valid"] if not takes(value)]
        wrong = [json.dumps(value) for value in group["invalid"] if takes(value)]
    return Verdict(
        group["keyword"], group["about"], refusal, tuple(missed), tuple(wrong), bool(group["valid"])
    )


@pytest.fixture(scope="module")
def verdicts(compiler, backend):
    return [judged(group, draft, compiler, backend) for group in SUITE for draft in group["drafts"]]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_schema_is_followed_or_refused_by_name(keyword, verdicts):
    mine = [verdict for verdict in verdicts if verdict.keyword == keyword]
    assert mine
    for verdict in mine:
        assert verdict.wrong == (), verdict
        assert verdict.missed == () or verdict.about == OBEYED_BESIDE_REF, verdict
        if verdict.refusal is not None and re.search(IMPOSSIBLE, verdict.refusal):
            assert not verdict.has_instances, verdict


def test_the_page_says_how_many_of_each_keyword_are_followed(verdicts):
    page = (ROOT / "docs/reference/grammars.md").read_text()
    rows = re.findall(r"^\| `?([\w$-]+)`? \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    followed = Counter(verdict.keyword for verdict in verdicts if verdict.refusal is None)
    refused = Counter(verdict.keyword for verdict in verdicts if verdict.refusal is not None)
    assert rows == [(keyword, str(followed[keyword]), str(refused[keyword])) for keyword in KEYWORDS]
