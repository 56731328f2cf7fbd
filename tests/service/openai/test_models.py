"""The list of models, as OpenAI's client and others see it."""

from __future__ import annotations

from tests.service.openai.rig import front_rig


async def test_openais_client_lists_the_model() -> None:
    async with front_rig() as rig:
        (model,) = (await rig.openai.models.list()).data
        assert (model.id, model.object, model.owned_by) == ("fake", "model", "penstock")
        assert (await rig.openai.models.retrieve("fake")) == model


async def test_it_says_what_the_model_takes() -> None:
    async with front_rig() as rig:
        (model,) = (await rig.http.get("/v1/models")).json()["data"]
        assert model["input_modalities"] == ["text"]


async def test_another_model_is_not_found() -> None:
    async with front_rig() as rig:
        reply = await rig.http.get("/v1/models/some/other")
        assert reply.status_code == 404
        assert reply.json()["error"] == {
            "message": "the model 'some/other' is not served here",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }


async def test_health_follows_the_servers() -> None:
    async with front_rig() as rig:
        assert (await rig.http.get("/health")).status_code == 200
