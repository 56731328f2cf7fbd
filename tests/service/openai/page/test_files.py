"""The files of the page: all are there, none is loaded from elsewhere, and a browser may run nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from posixpath import dirname, join, normpath

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from penstock.openai.routes.page import page_files, show_page, show_page_file

TEXTS = {name: file.content.decode() for name, file in page_files().items()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=[Route("/", show_page), Route("/page/{name:path}", show_page_file)]))


def test_the_page_is_served_with_a_strict_policy(client: TestClient) -> None:
    reply = client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy.pop("img-src") == "'self' data:"  # the images that somebody sends are shown to them
    loaded = {rule for name, rule in policy.items() if name.endswith("-src")}
    assert loaded == {"'none'", "'self'"}  # no "unsafe-inline", no other host, no data: or blob:
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("js/main.js", "text/javascript"), ("css/base.css", "text/css"), ("icon.svg", "image/svg+xml")],
)
def test_each_file_has_its_type(client: TestClient, name: str, media_type: str) -> None:
    reply = client.get(f"/page/{name}")
    assert reply.status_code == 200
    assert reply.headers["content-type"].split(";")[0] == media_type
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert reply.text == TEXTS[name]


@pytest.mark.parametrize(
    "name", ["js/none.js", "../settings.py", "%2e%2e/settings.py", "js", "", "/etc/passwd"]
)
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_a_file_that_has_not_changed_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/js/main.js")
    again = client.get("/page/js/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/js/main.js", headers={"if-none-match": '"other"'}).status_code == 200


def named() -> Iterator[tuple[str, str]]:
    """(file, name of a file that it needs), over all files."""
    for path in re.findall(r'(?:src|href)="(?!#)([^"]+)"', TEXTS["index.html"]):
        yield "index.html", path.removeprefix("page/")
    for name, text in SCRIPTS.items():
        for path in re.findall(r'^(?:import|\} from|export .* from)\b.*"(\.[^"]+)";$', text, re.MULTILINE):
            yield name, normpath(join(dirname(name), path))


def test_files_that_are_named_are_there_and_all_are_named() -> None:
    needed = {path for _, path in named()}
    assert len(needed) > 15
    assert needed | {"index.html"} == set(TEXTS)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_file_names_another_host(name: str) -> None:
    allowed = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w./-]*", TEXTS[name])) <= allowed


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_scripts_make_no_html_of_texts(name: str) -> None:
    bad = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    assert re.findall(bad, SCRIPTS[name]) == []


def test_the_page_itself_has_no_code_or_style_in_it() -> None:
    """The policy would stop them, and the page would be broken."""
    assert (
        re.findall(r'\son\w+=|\sstyle="|<style|<script(?![^>]* src=)|javascript:', TEXTS["index.html"]) == []
    )


def test_every_drawing_that_is_used_is_there() -> None:
    there = set(re.findall(r'<symbol id="icon-(\w+)"', TEXTS["index.html"]))
    used = set(re.findall(r'href="#icon-(\w+)"', TEXTS["index.html"]))
    for text in SCRIPTS.values():
        used |= set(re.findall(r'(?:\bicon|[bB]utton)\("(\w+)"', text))
    assert used - {"button"} <= there
    assert len(used) > 8
