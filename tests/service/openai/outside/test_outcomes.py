"""A new failure and a new pass are both noticed, and the page tells what the files say."""

from __future__ import annotations

from datetime import date

import pytest

from tests.service.openai.outside.outcomes import differences, page, parse, read_all
from tests.support.toolchains import ROOT

EXPECTED = parse(
    {
        "tool": "a tool",
        "version": "1",
        "tried": date(2026, 11, 27),
        "checks": 2,
        "exceptions": {"image": {"kind": "refused", "error": "image_url", "reason": "It sees none."}},
    }
)


def test_all_is_as_expected() -> None:
    assert differences(EXPECTED, {"text": None, "image": "400: image_url is refused"}) == []


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ({"text": "no text", "image": "image_url"}, "text fails: no text"),
        ({"text": None, "image": None}, "image passes now"),
        ({"text": None, "image": "500"}, "image fails otherwise than by 'image_url': 500"),
        ({"text": None}, "image did not run"),
        ({"text": None, "image": "image_url", "audio": None}, "2 checks in the file and 3 outcomes"),
    ],
    ids=["a new failure", "a new pass", "another error", "a check that vanished", "a new check"],
)
def test_what_is_not_as_expected_is_told(outcomes: dict[str, str | None], told: str) -> None:
    assert any(told in sentence for sentence in differences(EXPECTED, outcomes))


def test_an_exception_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no kind"):
        parse(
            {
                "tool": "a tool",
                "version": "1",
                "tried": date(2026, 11, 27),
                "checks": 1,
                "exceptions": {"image": {"kind": "whatever", "error": "", "reason": ""}},
            }
        )


def test_the_page_says_what_the_files_say() -> None:
    assert page(read_all()) in (ROOT / "docs" / "openai.md").read_text()
