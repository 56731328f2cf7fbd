"""The front serves the page, unless its settings say otherwise."""

from __future__ import annotations

import pytest

from tests.service.openai.rig import front_rig


async def test_the_page_is_at_the_root() -> None:
    async with front_rig() as rig:
        reply = await rig.http.get("/")
        assert reply.status_code == 200
        assert "<title>Penstock</title>" in reply.text
        assert reply.headers["content-security-policy"]
        script = await rig.http.get("/page/js/main.js")
        assert script.headers["content-type"].startswith("text/javascript")
        assert (await rig.http.head("/")).status_code == 200
        assert (await rig.http.post("/")).status_code == 405


@pytest.mark.parametrize("path", ["/", "/page/js/main.js"])
async def test_without_the_page_its_paths_are_unknown(path: str) -> None:
    async with front_rig(settings={"page": False}) as rig:
        reply = await rig.http.get(path)
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "unknown_url"
        assert (await rig.http.get("/v1/models")).status_code == 200
